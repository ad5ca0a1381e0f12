"""The backend ``mpi``, in jobs that a real ``mpirun`` starts with no other launcher beside it."""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch

import paceline
from paceline.errors import CommunicationError
from support.battery import applicable, differences
from support.commands import start, write_script
from support.ranks import run_ranks

TESTS = pathlib.Path(__file__).parents[1]
MPIRUN = shutil.which("mpirun", path=f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed"),
    pytest.mark.skipif(MPIRUN is None, reason="there is no mpirun"),
]

# Of Open MPI, but for what torch and paceline import: root may run it, with more ranks than cores, and without its TCP
# transport, whose start takes a second.
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_btl": "self,sm",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])),
}


def run(arguments, timeout_s):
    """Run to its end; after ``timeout_s``, mpirun is asked to end it, and the test fails with what it said."""
    process = start(arguments, env=ENVIRONMENT)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            out, err = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        raise AssertionError(f"not done after {timeout_s} s; it said {out!r} and {err!r}") from None
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


# Through files: launchers mix up what ranks print.
PRELUDE = """
import json, pathlib

def tell(rank, *values):
    pathlib.Path(__file__).with_name(f"{rank}.json").write_text(json.dumps(values))
"""


def mpirun(num_ranks, folder, source, *, timeout_s=60):
    """``mpirun -n NUM_RANKS python SCRIPT``, whose ranks may ``tell(rank, ...)`` something."""
    script = write_script(folder, PRELUDE + textwrap.dedent(source))
    return run([MPIRUN, "-n", str(num_ranks), sys.executable, script], timeout_s)


def alone(folder, source, *, timeout_s=60):
    """``python SCRIPT``, which no launcher starts."""
    return run([sys.executable, write_script(folder, PRELUDE + textwrap.dedent(source))], timeout_s)


def told(folder):
    """What the ranks told, in their order."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def told_by_job(num_ranks, folder, source):
    """What the ranks of a job told that must go well."""
    done = mpirun(num_ranks, folder, source)
    assert done.returncode == 0, done.stderr
    return told(folder)


# -- what every backend must do ----------------------------------------------------------------------------------------


# torch itself refuses use_local_synchronization for what is called mpi.
REFUSED = {"a_group_that_only_its_members_make"}


def failures(*_):
    """The checks of the battery that fail in a world of one, with what they say."""
    os.environ |= WITHOUT_SHARED_MEMORY
    with paceline.init("mpi") as world:
        found = {name: differences(name, world.rank, world.world_size) for name in applicable("mpi", world.world_size)}
    return {name: texts for name, texts in found.items() if texts}


def test_the_battery_is_passed_by_one_rank():
    assert run_ranks(1, failures, join=False, timeout_s=60) == [{}]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_battery_is_passed_and_what_streams_also_in_small_messages(tmp_path, world_size):
    source = f"""
        import paceline
        from support.battery import applicable, differences

        def run(names):
            for name in names:
                found = differences(name, world.rank, world.world_size)
                assert not found, (name, found)

        with paceline.init("mpi", timeout=60) as world:
            names = [name for name in applicable("mpi", world.world_size) if name not in {REFUSED}]
            run(names)
            from paceline.comm.mpi import transport, wire

            wire._MESSAGE_BYTES, transport._BLOCK_BYTES = 500_000, 1_000_000
            run(name for name in names if name.startswith("large_"))
            world.barrier()
            world.print("passed", world.world_size)
    """
    done = mpirun(world_size, tmp_path, source, timeout_s=180)
    assert (done.returncode, done.stdout.split()) == (0, ["passed", str(world_size)]), done.stderr


def test_two_ranks_train_as_one_process_does_in_both_wrappers(tmp_path):
    source = """
        import torch, torch.distributed as dist, paceline

        world = paceline.init("mpi")
        trained = []
        for wrapper in (torch.nn.parallel.DistributedDataParallel, paceline.DistributedDataParallel):
            torch.manual_seed(world.rank)  # rank 0's weights are what all begin with
            model = wrapper(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            data = torch.linspace(-1, 1, 24).view(8, 3)  # the global batch
            for _ in range(5):
                optimizer.zero_grad()
                model(data[world.rank :: 2]).square().mean().backward()
                optimizer.step()
            trained.append(torch.cat([p.detach().flatten() for p in model.parameters()]).tolist())
        tell(world.rank, *trained)
    """
    first, second = told_by_job(2, tmp_path, source)
    assert first == second
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 24).view(8, 3)).square().mean().backward()
        optimizer.step()
    alone = torch.cat([p.detach().flatten() for p in model.parameters()])
    for trained in first:
        torch.testing.assert_close(torch.tensor(trained), alone)


# -- what c10d sees ----------------------------------------------------------------------------------------------------


def test_torch_alone_finds_the_backend_under_mpirun(tmp_path):
    source = """
        import sys
        from datetime import timedelta
        import torch, torch.distributed as dist

        assert "mpi4py" not in sys.modules
        seen = [dist.is_mpi_available()]
        dist.init_process_group("mpi", timeout=timedelta(seconds=7))
        rank, size = dist.get_rank(), dist.get_world_size()
        seen += [dist.get_backend(), size, dist.group.WORLD.options._timeout.total_seconds()]
        group = dist.new_group([2, 0], timeout=timedelta(seconds=8))
        if rank != 1:
            t = torch.tensor([rank])
            dist.all_reduce(t, group=group)
            seen += [dist.get_rank(group), group.options._timeout.total_seconds(), t.item()]
        tell(rank, *seen)
    """
    begin = [True, "mpi", 3, 7.0]
    assert told_by_job(3, tmp_path, source) == [[*begin, 0, 8.0, 2], begin, [*begin, 1, 8.0, 2]]


def test_worlds_follow_one_another_and_other_backends_stand_beside_them(tmp_path):
    source = """
        import sys, torch, torch.distributed as dist, paceline

        def total(group=None):
            t = torch.tensor([world.rank + 1])
            dist.all_reduce(t, group=group)
            world.barrier()
            return t.item()

        with paceline.init() as world:  # what it does elsewhere, too
            seen = [world.backend == "mpi" or "mpi4py" in sys.modules, total()]
        for _ in range(2):
            with paceline.init("mpi") as world:
                seen.append(total())
        dist.init_process_group("mpi")
        world = paceline.init()  # takes over what torch has made
        seen += [total(), total(dist.new_group(backend="gloo"))]
        tell(world.rank, *seen, world.backend, world.local_rank, world.local_world_size)
    """
    begin = [False, 3, 3, 3, 3, 3, "mpi"]
    assert told_by_job(2, tmp_path, source) == [[*begin, 0, 2], [*begin, 1, 2]]


def test_without_a_launcher_it_is_a_world_of_one(tmp_path):
    source = """
        import torch, torch.distributed as dist, paceline

        assert not dist.is_mpi_available()  # who takes MPI where there is some should not, here
        world = paceline.init("mpi")
        t = torch.tensor([3.0])
        dist.all_reduce(t)
        tell(world.rank, world.world_size, t.item())
    """
    done = alone(tmp_path, source)
    assert (done.returncode, told(tmp_path)) == (0, [[1, 3.0]]), done.stderr


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_mismatch_is_told_on_all_ranks_and_the_group_goes_on(tmp_path):
    source = """
        import torch, torch.distributed as dist
        from paceline.errors import CollectiveMismatchError

        dist.init_process_group("mpi")
        rank = dist.get_rank()
        large = torch.zeros(99999)
        texts = []
        for call in (
            lambda: dist.all_reduce(large[: 4 if rank else 3]),
            lambda: dist.all_reduce(large) if rank else dist.broadcast(large, 0),
            lambda: dist.all_reduce(large if rank else large.double()),
            lambda: dist.broadcast(large, rank),
            lambda: dist.all_to_all_single(large[:5], large[:5], [2, 3], [2, 3] if rank else [1, 4]),
            lambda: dist.recv(large[:5], 0) if rank else dist.send(large, 1),
        ):
            try:
                call()
                texts.append("")
            except CollectiveMismatchError as error:
                texts.append(str(error))
        t = torch.tensor([rank + 1])
        dist.all_reduce(t)
        tell(rank, t.item(), texts)
    """
    (total, first), (other_total, second) = told_by_job(2, tmp_path, source)
    assert (total, other_total) == (3, 3)
    end = ". All ranks must call the same collectives in the same order, with tensors of the same size and dtype."
    for number, (mine, theirs) in enumerate(
        [
            ("all_reduce(sum, of 3 elements, float32)", "all_reduce(sum, of 4 elements, float32)"),
            ("broadcast(from rank 0, of 99999 elements, float32)", "all_reduce(sum, of 99999 elements, float32)"),
            ("all_reduce(sum, of 99999 elements, float64)", "all_reduce(sum, of 99999 elements, float32)"),
            (
                "broadcast(from rank 0, of 99999 elements, float32)",
                "broadcast(from rank 1, of 99999 elements, float32)",
            ),
        ]
    ):
        assert without_places(first[number]) == f"rank 0 called {mine} HERE, but rank 1 called {theirs} HERE{end}"
        assert without_places(second[number]) == f"rank 1 called {theirs} HERE, but rank 0 called {mine} HERE{end}"
    for texts in (first, second):
        assert without_places(texts[4]) == (
            "all_to_all: rank 0 has 1 elements for rank 0, which expects 2. Sizes must be the same on both sides. This "
            "rank's call is HERE."
        )
    assert first[5] == ""
    assert second[5] == (
        "rank 1 waits for 5 elements of float32 with tag 0, but rank 0 sent 99999 elements of float32. Send and "
        "receive tensors of the same size and dtype."
    )


def test_lists_and_sparse_tensors_that_differ_are_refused_on_all_ranks_and_nothing_is_written(tmp_path):
    source = """
        import torch.distributed as dist
        from support.mismatches import messages_of_another_dtype, mismatches

        dist.init_process_group("mpi")
        rank = dist.get_rank()
        tell(rank, mismatches(rank, 2), *messages_of_another_dtype(rank))
    """
    first, (wrong, error, received) = told_by_job(2, tmp_path, source)
    assert first == [[], "", [-1.0] * 4]
    assert (wrong, received) == ([], [-1.0] * 4)
    assert "rank 1 waits for 4 elements of float32 with tag 0, but rank 0 sent 4 elements of int32" in error


def without_places(text):
    return re.sub(r"at \S+script\.py:\d+", "HERE", text)


def test_an_exception_in_one_rank_ends_the_job_and_who_waits_for_it_says_why(tmp_path):
    source = """
        import time, torch, torch.distributed as dist

        dist.init_process_group("mpi")
        rank = dist.get_rank()
        t = torch.zeros(1)
        dist.all_reduce(t)
        if rank == 1:
            raise KeyError("broken")
        if rank == 2:
            time.sleep(1000)
        try:
            dist.all_reduce(t)
        except RuntimeError as error:
            tell(rank, type(error).__name__, str(error))
            raise
    """
    done = mpirun(3, tmp_path, source)
    assert done.returncode not in (0, None)
    assert "KeyError: 'broken'" in done.stderr
    (kind, text), *others = told(tmp_path)
    assert kind == "PeerError"
    assert text.startswith("rank 0: rank 1 failed, and takes part in this group no more:\nTraceback")
    assert text.endswith("KeyError: 'broken'")
    assert not others


def test_what_a_rank_sent_before_it_left_arrives_and_then_it_is_missed(tmp_path):
    source = """
        import torch, torch.distributed as dist

        dist.init_process_group("mpi")
        rank = dist.get_rank()
        t = torch.full((100_000,), rank + 1)
        dist.all_reduce(t)
        if rank == 1:
            dist.send(t, 0)
            raise SystemExit
        texts = []
        for receive in (lambda: dist.recv(t, 1), lambda: dist.recv(t)):
            try:
                receive()
                texts.append(f"received {t[0]}")
            except RuntimeError as error:
                texts.append(f"{type(error).__name__}: {error}")
        tell(rank, *texts)
        raise SystemExit(5)
    """
    assert mpirun(2, tmp_path, source).returncode == 5
    assert told(tmp_path) == [
        [
            "received 3",
            "PeerError: rank 0: rank 1 has left the group. All ranks must call collectives equally often before they "
            "end.",
        ]
    ]


def test_a_deadline_names_who_did_not_come(tmp_path):
    source = """
        import time, torch, torch.distributed as dist
        from datetime import timedelta

        dist.init_process_group("mpi", timeout=timedelta(seconds=60))
        rank, texts = dist.get_rank(), []
        group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
        dist.barrier(group)
        if rank == 0:
            try:
                dist.all_reduce(torch.zeros(1 << 20), group=group)
            except TimeoutError as error:
                texts.append(str(error))
        dist.barrier()
        if rank == 0:
            try:
                dist.new_group([0, 1], timeout=timedelta(seconds=1))
            except RuntimeError as error:
                texts.append(str(error))
        dist.barrier()
        tell(rank, *texts)
        dist.barrier()
        raise SystemExit(5)  # a group that is not made is waited for as long as MPI runs
    """
    assert mpirun(2, tmp_path, source).returncode not in (0, None)
    (late, unmade), nothing = told(tmp_path)
    assert without_places(late).startswith("rank 0: all_reduce(sum, of 1048576 elements, float32) HERE, call number 2 ")
    assert ": rank 1 has not come to it" in late
    assert unmade == (
        "rank 0: not all ranks came to make the group of ranks 0, 1 within 1 s. All must call init_process_group and "
        "new_group alike."
    )
    assert nothing == []


# Open MPI's, which a process that ends without its exit handlers, as forked ranks do, would leave behind.
WITHOUT_SHARED_MEMORY = {"OMPI_MCA_btl": "self"}


def refusals(*_):
    """What a process that no launcher has started is told."""
    os.environ |= WITHOUT_SHARED_MEMORY
    texts = []

    def attempt(**arguments):
        try:
            paceline.init("mpi", **arguments)
        except paceline.errors.PacelineError as error:
            texts.append(f"{type(error).__name__}: {error}")

    os.environ |= {"RANK": "1", "WORLD_SIZE": "2"}
    attempt()
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    attempt(rank=1, world_size=2)
    attempt(rank=0, world_size=1, init_method="tcp://127.0.0.1:29500")
    with paceline.init("mpi"):
        pass
    reader, writer = os.pipe()
    if os.fork() == 0:
        attempt()
        os.write(writer, texts[-1].encode())
        os._exit(0)
    texts.append(os.read(reader, 1000).decode())
    os.wait()
    return texts


def test_what_cannot_be_is_said():
    advice = "as in `mpirun -n 4 python script.py`."
    assert run_ranks(1, refusals, join=False) == [
        [
            "CommunicationError: this process is rank 1 of 2 by its environment (torchrun), but rank 0 of 1 to MPI. "
            f"Start the job with MPI's own launcher and no other, {advice}",
            "WorldError: rank=1, world_size=2: to MPI, this is rank 0 of 1. Leave both out; MPI's launcher sets them, "
            f"{advice}",
            "WorldError: init_method='tcp://127.0.0.1:29500': over MPI, ranks find each other by themselves. Leave it "
            "out.",
            "CommunicationError: this process was forked from one that uses MPI, and cannot use it itself. Make groups "
            "in the ranks only.",
        ]
    ]


def without_library(*_):
    os.environ["MPI4PY_LIBMPI"] = "/nowhere"
    os.environ.pop("MPI4PY_MPIABI", None)
    with pytest.raises(CommunicationError) as error:
        paceline.init("mpi")
    return str(error.value)


def without_threads(*_):
    os.environ |= WITHOUT_SHARED_MEMORY
    importlib.import_module("mpi4py").rc.thread_level = "single"
    with pytest.raises(CommunicationError) as error:
        paceline.init("mpi")
    return str(error.value)


def test_what_mpi_lacks_is_said():
    assert run_ranks(1, without_library, join=False) == [
        "the backend 'mpi' needs mpi4py and an MPI library (cannot load MPI library). Install both with `pip install "
        "'paceline[mpi]'`, or mpi4py alone where the system has an MPI of its own."
    ]
    assert run_ranks(1, without_threads, join=False) == [
        "MPI was started for fewer threads than the backend 'mpi' needs, MPI_THREAD_MULTIPLE. Leave mpi4py.rc as it "
        "is, or use an MPI library that was built with threads."
    ]


def test_without_mpi4py_it_is_said_how_to_install_it(tmp_path):
    source = """
        import sys

        sys.modules["mpi4py"] = None  # cannot be found
        import paceline, torch.distributed as dist

        try:
            paceline.init("mpi")
        except paceline.errors.WorldError as error:
            print(error)
        try:
            dist.init_process_group("mpi")
        except RuntimeError as error:
            print(error)
    """
    ours, torchs = alone(tmp_path, source).stdout.splitlines()
    assert ours == (
        "backend='mpi': mpi4py is not installed. `pip install 'paceline[mpi]'` installs it and Open MPI; where the "
        "system has an MPI of its own, `pip install mpi4py` suffices."
    )
    assert torchs.startswith("Distributed package doesn't have MPI built in.")
