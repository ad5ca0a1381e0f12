"""A world from init to shutdown: who is in it, what its methods do, and what is left when it ends."""

import contextlib
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline import world as world_module
from paceline.errors import BarrierTimeoutError, EnvironmentVariableError, PeerError, WorldError
from support.ranks import RankError, expect_errors, run_ranks

NEEDS_NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")


# A script's; with less patience for name servers than usual, torch would complain of them.
QUIET = {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"}


def in_a_process_of_its_own(fn, *args):
    """What ``fn`` returns in a forked process, so that no world is left in this one."""
    return run_ranks(1, lambda rank, world_size, directory: fn(*args), join=False)[0]


def place_of(world):
    return (
        world.rank,
        world.world_size,
        world.local_rank,
        world.local_world_size,
        world.node_rank,
        world.num_nodes,
    )


# -- a world of one -----------------------------------------------------------------------------------------------


def alone():
    world = paceline.init(device="cpu")
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    world.barrier()
    with world.main_first():
        pass
    seen = place_of(world), world.is_main, str(world.device), world.backend, tensor.tolist(), dist.get_rank()
    paceline.shutdown()
    assert not dist.is_initialized()
    assert world_module.current() is None
    return seen


def test_without_a_launcher_there_is_a_world_of_one_in_which_everything_works():
    assert in_a_process_of_its_own(alone) == ((0, 1, 0, 1, 0, 1), True, "cpu", "shm", [1.0, 1.0], 0)


def alone_at(method):
    with paceline.init("gloo", method, rank=0, world_size=1, timeout=10) as world:
        return place_of(world)


def test_a_world_of_one_may_meet_at_a_file(tmp_path):
    assert in_a_process_of_its_own(alone_at, (tmp_path / "f").as_uri()) == (0, 1, 0, 1, 0, 1)
    assert list(tmp_path.iterdir()) == []


# -- arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"timeout": 0}, "timeout=0: expected a positive number of seconds, or a timedelta."),
        ({"timeout": -1.5}, "timeout=-1.5: expected a positive number of seconds, or a timedelta."),
        ({"timeout": float("inf")}, "timeout=inf: expected a positive number of seconds, or a timedelta."),
        ({"timeout": float("nan")}, "timeout=nan: expected a positive number of seconds, or a timedelta."),
        (
            {"rank": 2, "world_size": 2},
            "rank=2, world_size=2: expected a world_size of at least 1 and a rank from 0 to world_size - 1.",
        ),
        (
            {"rank": -1, "world_size": 2},
            "rank=-1, world_size=2: expected a world_size of at least 1 and a rank from 0 to world_size - 1.",
        ),
        (
            {"rank": 0, "world_size": 0},
            "rank=0, world_size=0: expected a world_size of at least 1 and a rank from 0 to world_size - 1.",
        ),
        (
            {"world_size": 2},
            "init(init_method='env://', world_size=2) needs rank too, and no launcher has set it. Pass init(..., "
            "rank=r, world_size=n); or start the script with `paceline run`, which sets both.",
        ),
        (
            {"rank": 0, "init_method": "tcp://h:1"},
            "init(init_method='tcp://h:1', rank=0) needs world_size too, and no launcher has set it. Pass init(..., "
            "rank=r, world_size=n); or start the script with `paceline run`, which sets both.",
        ),
        (
            {"init_method": "file:///tmp/f"},
            "init(init_method='file:///tmp/f') needs rank too, and no launcher has set it. Pass init(..., rank=r, "
            "world_size=n); or start the script with `paceline run`, which sets both.",
        ),
    ],
)
def test_arguments_that_make_no_job_are_refused(arguments, expected):
    with pytest.raises(WorldError) as caught:
        paceline.init(**arguments)
    assert str(caught.value) == expected
    assert not dist.is_initialized()


@pytest.mark.parametrize("backend", ["smoke", "undefined", "cpu:gloo,cuda:smoke", ""])
def test_an_unknown_backend_is_refused_with_those_there_are(backend):
    with pytest.raises(WorldError) as caught:
        paceline.init(backend, "tcp://127.0.0.1:1", rank=1, world_size=2)  # refused before anybody is waited for
    bad = backend.rpartition(":")[2]
    assert str(caught.value).startswith(f"backend={backend!r}: {bad!r} is not available here; this torch offers ")
    assert "gloo" in str(caught.value).split("offers")[1]
    assert "undefined" not in str(caught.value).split("offers")[1]


@NEEDS_NO_CUDA
def test_nccl_is_refused_without_cuda():
    with pytest.raises(WorldError, match=r"is not available here|NCCL needs a CUDA device, and torch sees none"):
        paceline.init("NCCL")


@NEEDS_NO_CUDA
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 0)])
def test_cuda_is_refused_without_cuda(device):
    with pytest.raises(WorldError) as caught:
        paceline.init("gloo", "tcp://127.0.0.1:1", rank=1, world_size=2, device=device)
    assert str(caught.value) == f"device={str(device)!r}: torch sees no CUDA device here. Use 'cpu' or 'auto'."


def test_a_device_that_torch_does_not_know_is_refused():
    with pytest.raises(WorldError, match=r"device='toaster': .*toaster"):
        paceline.init(device="toaster")


@pytest.mark.parametrize(("num_visible", "index"), [(1, 0), (4, 2)])
def test_a_rank_to_which_slurm_shows_its_own_gpu_alone_takes_that(num_visible, index, monkeypatch):
    from paceline.devices import choose_device

    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert choose_device("auto", 6, 2, may_be_bound=True) == torch.device("cuda", index)
    assert chosen == [torch.device("cuda", index)]
    if num_visible == 1:
        with pytest.raises(WorldError, match="its device would be cuda:2, but this host shows 1 CUDA devices"):
            choose_device("auto", 6, 2)


@pytest.mark.cuda
def test_more_ranks_than_gpus_are_refused():
    from paceline.devices import choose_device

    count = torch.cuda.device_count()
    with pytest.raises(WorldError) as caught:
        choose_device("auto", 5, count)
    assert str(caught.value) == (
        f"rank 5: its device would be cuda:{count}, but this host shows {count} CUDA devices. Start fewer ranks per "
        "host, or pass device='cpu'."
    )


def test_half_set_variables_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(EnvironmentVariableError, match="WORLD_SIZE is not set, but RANK='1' is"):
        paceline.init()


# -- places -------------------------------------------------------------------------------------------------------


def place_with(rank, world_size, directory, variables):
    os.environ |= {name: value.format(rank=rank, half=rank // 2, odd=rank % 2) for name, value in variables.items()}
    method = pathlib.Path(directory, "f").as_uri()
    with paceline.init("gloo", method, rank=rank, world_size=world_size, timeout=20) as world:
        return place_of(world)


def test_without_a_launcher_places_come_from_the_hosts():
    assert run_ranks(3, place_with, {}, join=False) == [(0, 3, 0, 3, 0, 1), (1, 3, 1, 3, 0, 1), (2, 3, 2, 3, 0, 1)]


TWO_HOSTS = {
    "RANK": "{rank}",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "{odd}",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "{half}",
    "GROUP_WORLD_SIZE": "2",
}


def test_with_a_launcher_places_are_what_it_says():
    expected = [(0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2), (2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)]
    assert run_ranks(4, place_with, TWO_HOSTS, join=False) == expected


def test_what_the_launcher_leaves_open_comes_from_the_ranks():
    told = {name: TWO_HOSTS[name] for name in ("RANK", "WORLD_SIZE", "GROUP_RANK")}
    expected = [(0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2), (2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)]
    assert run_ranks(4, place_with, told, join=False) == expected


# -- init again, and groups that others made ----------------------------------------------------------------------


def twice(world):
    again = paceline.init()
    refused = []
    for arguments in ({"backend": "gloo"}, {"timeout": 3}, {"device": "cpu"}, {"rank": world.rank}):
        with pytest.raises(WorldError) as caught:
            paceline.init(**arguments)
        refused.append(str(caught.value))
    return again is world, world_module.current() is world, refused


def test_init_twice_is_the_same_world_and_takes_no_arguments_the_second_time():
    refused = (
        "init() was given arguments, but this process has joined a job already. Call shutdown() (or, for a group that "
        "torch has made, destroy_process_group()) first."
    )
    assert run_ranks(2, twice) == [(True, True, [refused] * 4)] * 2


def adopted(rank, world_size, directory):
    os.environ["LOCAL_RANK"] = "junk"  # of no concern to a group that was made without it
    seen = []
    for life in range(2):
        dist.init_process_group("gloo", f"file://{directory}/torchs{life}", rank=rank, world_size=world_size)
        for _ in range(2):
            world = paceline.init(timeout=20, device="cpu")
            assert paceline.init() is world
            if rank:
                time.sleep(0.1)
            entered = time.monotonic()
            world.barrier()
            seen.append((place_of(world), world.backend, rank == 1 or time.monotonic() - entered > 0.02))
            paceline.shutdown()
            assert world_module.current() is None
            assert dist.is_initialized()  # whoever made it ends it
            dist.barrier()
        dist.destroy_process_group()
    return seen


def test_a_group_that_torch_has_made_is_taken_over_and_left_to_its_maker():
    ones, twos = run_ranks(2, adopted, join=False)
    assert ones == [((0, 2, 0, 2, 0, 1), "gloo", True)] * 4
    assert twos == [((1, 2, 1, 2, 0, 1), "gloo", True)] * 4


def replaced(rank, world_size, directory):
    mine = paceline.init("gloo", f"file://{directory}/f", rank=rank, world_size=world_size, timeout=20)
    dist.destroy_process_group()
    dist.init_process_group("gloo", f"file://{directory}/torchs", rank=rank, world_size=world_size)
    theirs = paceline.init(timeout=20)
    assert theirs is not mine
    theirs.barrier()
    paceline.shutdown()
    assert dist.is_initialized()
    dist.destroy_process_group()
    return True


def test_a_world_whose_group_was_destroyed_gives_way_to_the_group_that_came_after_it():
    assert run_ranks(2, replaced, join=False) == [True, True]


def hooks(rank, world_size, directory):
    before = sys.excepthook
    for _ in range(3):
        paceline.init("gloo", f"file://{directory}/f", rank=rank, world_size=world_size, timeout=20)
        assert sys.excepthook is not before
        paceline.shutdown()
    return sys.excepthook is before


def test_torchs_excepthooks_do_not_pile_up():
    assert run_ranks(2, hooks, join=False) == [True, True]


# -- forks --------------------------------------------------------------------------------------------------------


FORKING = """
import os, sys, torch, torch.distributed as dist, paceline
from paceline.world import current

def total(number):
    tensor = torch.tensor([number])
    dist.all_reduce(tensor)
    return tensor.item()

world = paceline.init("gloo", "file://" + sys.argv[1], rank=0, world_size=1, device="cpu")
group = dist.GroupMember.WORLD
if (pid := os.fork()) == 0:
    # A loader's worker may ask for its rank, and ends with or without a world of its own.
    assert current() is world and dist.get_rank() == 0
    if sys.argv[2] == "init":
        own = paceline.init("gloo", "file://" + sys.argv[1], rank=0, world_size=1, device="cpu")
        assert own is not world and dist.GroupMember.WORLD is not group
        assert total(3.0) == 3.0
        own.barrier()
    sys.exit(7)  # through atexit and torch's destructors
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert total(5.0) == 5.0
world.barrier()
paceline.shutdown()
print("well")
"""


@pytest.mark.parametrize("child", ["init", "nothing"])
def test_a_forked_child_may_have_a_world_of_its_own_and_leaves_its_parents_alone(tmp_path, child):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKING, str(tmp_path / "f"), child],
        capture_output=True,
        text=True,
        timeout=60,
        env=QUIET,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("well\n", "", 0)


def child_holds_the_port(rank, world_size, directory, port):
    """Rank 0 forks a child that outlives it, and ends; its port must then be free."""
    read_fd, write_fd = os.pipe()
    if (pid := os.fork()) == 0:
        paceline.init("gloo", f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
        if (sleeper := os.fork()) == 0:
            time.sleep(30)
            os._exit(0)
        os.write(write_fd, str(sleeper).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    sleeper = int(os.read(read_fd, 100))
    try:
        with paceline.init("gloo", f"tcp://127.0.0.1:{port}", rank=0, world_size=1) as world:
            return world.rank
    finally:
        os.kill(sleeper, signal.SIGKILL)


def test_a_forked_child_does_not_hold_its_parents_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert run_ranks(1, child_holds_the_port, port, join=False) == [0]


def child_that_uses_its_parents_world(world):
    read_fd, write_fd = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            world.barrier()
        except WorldError as error:
            os.write(write_fd, str(error).encode())
        paceline.shutdown()
        os._exit(0)
    os.waitpid(pid, 0)
    world.barrier()
    return os.read(read_fd, 1000).decode()


def test_a_forked_child_is_no_rank():
    assert run_ranks(2, child_that_uses_its_parents_world) == [
        f"this process was forked from rank {rank} and is no rank itself. Call barrier in the rank, or init() here for "
        "a world of its own."
        for rank in (0, 1)
    ]


# -- print --------------------------------------------------------------------------------------------------------


def prints(world, directory):
    with open(pathlib.Path(directory, str(world.rank)), "w") as file:
        world.print("a", 1, sep="-", end="!", file=file)
    return world.is_main


def test_only_rank_0_prints_and_as_print_does(tmp_path):
    assert run_ranks(2, prints, str(tmp_path)) == [True, False]
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["a-1!", ""]


# -- barrier ------------------------------------------------------------------------------------------------------


def barriers(world, directory):
    """Before barrier k all ranks write k, after it all must have written it."""
    for number in range(60):
        pathlib.Path(directory, f"{world.rank}.{number}").touch()
        time.sleep(random.random() * 0.004)
        world.barrier()
        assert all(pathlib.Path(directory, f"{rank}.{number}").exists() for rank in range(world.world_size))
    return True


def test_no_rank_leaves_a_barrier_before_all_have_reached_it(tmp_path):
    assert run_ranks(3, barriers, str(tmp_path)) == [True] * 3


def late_for_the_third(world):
    world.barrier()
    world.barrier()
    if world.rank in (1, 3):
        time.sleep(1.5)
        return None
    try:
        world.barrier(timeout=0.5)
    except BarrierTimeoutError as error:
        return str(error)


def test_a_barriers_timeout_names_the_missing_ranks_and_its_number():
    told = run_ranks(4, late_for_the_third)
    assert told == [
        None
        if rank in (1, 3)
        else f"rank {rank}: ranks 1 and 3 of 4 did not reach barrier number 3 within 0.5 s. Look where they are; all "
        "ranks must call barrier() equally often."
        for rank in range(4)
    ]


def late_once(world):
    if world.rank == 1:
        time.sleep(0.6)
    try:
        world.barrier(timeout=0.2)
    except BarrierTimeoutError:
        assert world.rank == 0
    for _ in range(3):
        world.barrier()
    return True


def test_a_barrier_that_timed_out_does_not_spoil_the_next():
    assert run_ranks(2, late_once) == [True, True]


def test_a_barriers_timeout_must_be_positive():
    def try_it():
        with paceline.init(device="cpu") as world:
            try:
                world.barrier(timeout=0)
            except WorldError as error:
                return str(error)

    expected = "timeout=0: expected a positive number of seconds, or a timedelta."
    assert in_a_process_of_its_own(try_it) == expected


def barrier_without(rank, world_size, directory, victim, last_act):
    """Rank ``victim`` does not come to the barrier; the others tell what they see of it, and how soon."""
    is_victim = rank == victim
    if is_victim and (pid := os.fork()):
        os.waitpid(pid, 0)
        return None
    try:
        with paceline.init("gloo", f"file://{directory}/f", rank=rank, world_size=world_size, timeout=60) as world:
            world.barrier()
            if is_victim:
                time.sleep(0.2)
                last_act()
                os._exit(0)
            started = time.monotonic()
            try:
                world.barrier()
            except PeerError as error:
                return str(error), time.monotonic() - started < 5
    finally:
        if is_victim:
            os._exit(0)


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_is_named_by_those_that_wait_at_a_barrier(victim):
    for rank, seen in enumerate(run_ranks(3, barrier_without, victim, killed, join=False)):
        if rank == victim:
            continue
        message, at_once = seen
        assert at_once
        assert message.startswith(f"rank {rank}: rank {victim}")
        assert message.endswith(("ended without reaching barrier. Its own output says why.", "says why."))


def fails():
    raise ArithmeticError("the loss is no number")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_raises_is_named_with_its_traceback(victim):
    for rank, seen in enumerate(run_ranks(3, barrier_without, victim, fails, join=False)):
        if rank == victim:
            continue
        message, at_once = seen
        assert at_once
        assert message.startswith(f"rank {rank}: rank {victim} (pid ")
        assert "failed before it reached barrier:\nTraceback (most recent call last):" in message
        assert message.endswith("ArithmeticError: the loss is no number\n")


def test_a_rank_that_has_left_is_named():
    message, at_once = run_ranks(2, barrier_without, 1, paceline.shutdown, join=False)[0]
    assert at_once
    assert message.startswith("rank 0: rank 1 (pid ")
    assert message.endswith(
        "has left the job and will not reach barrier. All ranks must call it equally often before shutdown()."
    )


# -- main_first ---------------------------------------------------------------------------------------------------


def unpack_on_each_host(rank, world_size, directory):
    os.environ |= {name: value.format(rank=rank, half=rank // 2, odd=rank % 2) for name, value in TWO_HOSTS.items()}
    seen = []
    with paceline.init("gloo", f"file://{directory}/f", timeout=20) as world:
        for number in range(3):
            data = pathlib.Path(directory, f"host{world.node_rank}.{number}")
            with world.main_first():
                is_done = data.exists()
                if not is_done:
                    time.sleep(0.05)
                    data.write_text(f"unpacked by {world.rank}")
            seen.append((is_done, data.read_text()))
    return seen


def test_the_first_rank_of_each_host_runs_the_block_before_the_others_of_that_host():
    assert run_ranks(4, unpack_on_each_host, join=False) == [
        [(False, "unpacked by 0")] * 3,
        [(True, "unpacked by 0")] * 3,
        [(False, "unpacked by 2")] * 3,
        [(True, "unpacked by 2")] * 3,
    ]


def first_fails(world):
    with world.main_first():
        if world.is_main:
            raise OSError("no space left")
        return "ran"


def test_what_the_first_raises_reaches_the_others_with_its_traceback():
    first, second = expect_errors(2, first_fails)
    assert first == "OSError: no space left"
    assert second.startswith(
        "PeerError: rank 1: the main_first block failed on rank 0, which reports:\nTraceback (most recent call last):"
    )
    assert 'raise OSError("no space left")' in second


def first_is_slow(rank, world_size, directory):
    with paceline.init("gloo", f"file://{directory}/f", rank=rank, world_size=world_size, timeout=3) as world:
        try:
            with world.main_first():
                time.sleep(4 * (1 - rank))
        except BarrierTimeoutError as error:
            return str(error)


def test_a_first_that_takes_too_long_is_named():
    assert run_ranks(2, first_is_slow, join=False) == [
        None,
        "rank 1: rank 0 has not finished its main_first block within 3 s. Give init() a longer timeout if the work "
        "takes that long.",
    ]


def first_dies(rank, world_size, directory):
    os.environ |= {"GROUP_RANK": "1"}
    if rank == 1 and (pid := os.fork()):  # rank 1 is the first of its host, by its local rank
        os.waitpid(pid, 0)
        return None
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": str((rank + 2) % 3)}
    with paceline.init("gloo", f"file://{directory}/f", timeout=60) as world:
        started = time.monotonic()
        try:
            with world.main_first():
                time.sleep(0.2)
                killed()
        except PeerError as error:
            return str(error), time.monotonic() - started < 5


def test_a_first_that_dies_is_named():
    first, _, last = run_ranks(3, first_dies, join=False)
    for rank, (message, at_once) in ((0, first), (2, last)):
        assert at_once
        assert message.startswith(f"rank {rank}: rank 1 (pid ")
        assert message.endswith(") ended without reaching main_first. Its own output says why.")


# -- seed ---------------------------------------------------------------------------------------------------------


def draws(world, n):
    own = world.seed(n)
    seen = {
        "own": own,
        "python": random.random(),
        "numpy": float(numpy.random.rand()),
        "torch": torch.rand(1).item(),
        "weights": nn.Linear(2, 2).weight.flatten().tolist(),
    }
    paceline.DistributedDataParallel(nn.Linear(2, 2))
    seen["parted"] = torch.rand(1).item()
    paceline.DistributedDataParallel(nn.Linear(2, 2))
    seen["after"] = torch.rand(1).item()
    return seen


def drawn_twice(world):
    return draws(world, 7), draws(world, 7), draws(world, 8)


def test_after_seed_models_agree_data_differ_and_wrapping_parts_torchs_streams_all_reproducibly():
    (zero, zero_again, zero_other), (one, one_again, one_other) = run_ranks(2, drawn_twice)
    assert zero == zero_again
    assert one == one_again
    for name in zero:
        agrees = name in ("torch", "weights")
        assert (zero[name] == one[name]) == agrees, name
        assert zero[name] != zero_other[name], name
        assert one[name] != one_other[name], name


def torch_after_seed(world):
    world.seed(5)
    return torch.rand(3).tolist()


def test_seed_gives_torchs_own_stream_for_that_number():
    expected = torch.rand(3, generator=torch.Generator().manual_seed(5)).tolist()
    assert run_ranks(2, torch_after_seed) == [expected] * 2


def parted_by_hand(world):
    world.seed(5)
    world.part_random_streams()
    first = torch.rand(1).item()
    world.part_random_streams()  # only once
    return first, torch.initial_seed() == world.seed(5)


def test_streams_are_parted_once_with_the_ranks_own_seed():
    (zero, is_own), (one, is_own_too) = run_ranks(2, parted_by_hand)
    assert zero != one
    assert (is_own, is_own_too) == (True, True)


def wrapped_without_seed(world):
    model = nn.Linear(2, 2)
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    paceline.DistributedDataParallel(model)
    return before == (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_without_seed_wrapping_leaves_the_random_state_alone():
    assert run_ranks(2, wrapped_without_seed) == [True, True]


def bad_seed(world, n):
    world.seed(n)


@pytest.mark.parametrize("n", [-1, 2**63])
def test_a_seed_out_of_range_is_refused(n):
    expected = f"WorldError: seed({n}): expected an integer from 0 to 2**63 - 1."
    assert expect_errors(2, bad_seed, n) == [expected] * 2


def largest_seed(world):
    world.seed(0)
    return world.seed(2**63 - 1)


def test_the_largest_seed_is_taken_by_all_generators():
    zero, one = run_ranks(2, largest_seed)
    assert zero != one
    assert 0 <= zero < 2**63


# -- the end ------------------------------------------------------------------------------------------------------


def leaves(rank, world_size, directory, how):
    world = paceline.init("gloo", f"file://{directory}/f", rank=rank, world_size=world_size, timeout=60)
    world.barrier()
    started = time.monotonic()
    if rank == 1:
        how(world)
    else:
        paceline.shutdown()
    paceline.shutdown()  # twice does no harm
    took_s = time.monotonic() - started
    assert not dist.is_initialized()
    return took_s, os.listdir(directory), [thread.name for thread in threading.enumerate()]


def raises_inside(world):
    with pytest.raises(ArithmeticError), world:
        fails()


def leaves_late(world):
    with world:
        time.sleep(1.0)


def exits_with_success(world):
    with contextlib.suppress(SystemExit), world:
        time.sleep(0.2)
        sys.exit(0)


@pytest.mark.parametrize("how", [raises_inside, leaves_late, exits_with_success])
def test_no_way_to_leave_leaves_anything(how):
    for took_s, files, threads in run_ranks(2, leaves, how, join=False):
        assert took_s < 8
        assert files == []
        assert threads == ["MainThread"]


def test_a_normal_exit_waits_for_the_others():
    (rank_0_s, *_), _ = run_ranks(2, leaves, leaves_late, join=False)
    assert rank_0_s > 0.8


def fails_while_others_work(rank, world_size, directory, victim):
    started = time.monotonic()
    try:
        with paceline.init("gloo", f"file://{directory}/f", rank=rank, world_size=world_size, timeout=60):
            if rank == victim:
                started = time.monotonic()
                fails()
            time.sleep(3)
    except ArithmeticError:
        return time.monotonic() - started


@pytest.mark.parametrize("victim", [0, 1])
def test_an_exception_leaves_without_waiting_for_the_others(victim):
    assert run_ranks(2, fails_while_others_work, victim, join=False)[victim] < 2.5


def shuts_down_without(rank, world_size, directory, victim):
    if rank == victim and (pid := os.fork()):
        os.waitpid(pid, 0)
        return None
    world = paceline.init("gloo", f"file://{directory}/f", rank=rank, world_size=world_size, timeout=60)
    world.barrier()
    time.sleep(0.2)  # until all have passed the barrier
    if rank == victim:
        killed()
    time.sleep(0.2)
    started = time.monotonic()
    paceline.shutdown()
    return time.monotonic() - started


@pytest.mark.parametrize("victim", [0, 1])
def test_shutdown_does_not_wait_for_a_rank_that_has_crashed(victim):
    took = run_ranks(3, shuts_down_without, victim, join=False)
    assert all(took_s < 8 for rank, took_s in enumerate(took) if rank != victim)


SCRIPT = """
import os, sys, torch, torch.distributed as dist, paceline
rank, path, lives, end = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
for life in range(lives):
    world = paceline.init("gloo", "file://" + path, rank=rank, world_size=2, timeout=30)
    dist.all_reduce(torch.ones(1))
    world.barrier()
    if life < lives - 1:
        paceline.shutdown()
if end == "fails" and rank == 1:
    raise ArithmeticError("the loss is no number")
elif end == "fails":
    world.barrier()
"""


def outcome_of(end, path, lives=1):
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", SCRIPT, str(rank), str(path), str(lives), end],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=QUIET,
        )
        for rank in (0, 1)
    ]
    try:
        return [(*process.communicate(timeout=60), process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_three_lives_the_last_without_shutdown_write_nothing_to_stderr(tmp_path):
    assert outcome_of("nothing", tmp_path / "f", lives=3) == [("", "", 0)] * 2
    assert list(tmp_path.iterdir()) == []


def test_a_script_that_raises_tells_the_others_why_as_it_ends(tmp_path):
    (_, first, first_code), (_, second, second_code) = outcome_of("fails", tmp_path / "f")
    assert (first_code, second_code) == (1, 1)
    assert "ArithmeticError: the loss is no number" in second
    assert "PeerError: rank 0: rank 1 (pid " in first
    assert "ArithmeticError: the loss is no number" in first


def test_ranks_that_raise_are_not_mistaken_for_success():
    with pytest.raises(RankError, match="the loss is no number"):
        run_ranks(2, lambda world: fails())
