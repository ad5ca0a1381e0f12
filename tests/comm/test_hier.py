"""Collectives among ranks of several hosts.

Most tests fork ranks on one machine and tell each that it is on some host, by a layout that has the host of each rank.
The last tests run in network namespaces.
"""

import importlib
import itertools
import json
import os
import pathlib
import re
import signal
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.comm import make_hier
from paceline.comm.hosts.post import Post
from paceline.comm.hosts.transport import Hierarchical
from paceline.comm.memory.transport import SharedMemory
from paceline.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    PacelineError,
    PeerError,
    RendezvousError,
)
from support.battery import applicable, differences
from support.commands import write_script
from support.hosts import hosts, start_ranks
from support.layouts import errors_on_hosts, on_hosts
from support.limits import allow_descriptors
from support.ranks import RankError

LAYOUTS = [(0, 0, 1, 1), (0, 1, 1, 1), (0, 1, 0, 2), (0, 1, 2)]
SOON_S = 5.0  # what takes longer hangs


# -- right -------------------------------------------------------------------------------------------------------------


def failures(world, names):
    found = {name: differences(name, world.rank, world.world_size) for name in names}
    return {name: texts for name, texts in found.items() if texts}


@pytest.fixture(scope="module")
def compiler():
    """What functional collectives and optimizers import: here once, instead of in each rank."""
    importlib.import_module("torch._dynamo")


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_battery_is_passed(layout):
    names = applicable("hier", len(layout))
    assert on_hosts(layout, failures, names) == [{}] * len(layout)


OPERATIONS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
DTYPES = [
    *[torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128],
    *[torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64],
]


def values(rank, dtype, numel, start=0):
    """0 to 2, so that sums and products are exact in every dtype."""
    return ((torch.arange(start, start + numel) * (rank + 1)) % 3).to(dtype)


def reduced(operation, dtype, size, numel, start=0):
    """What all ranks' values come to, in one process."""
    rows = [values(rank, dtype, numel, start) for rank in range(size)]
    if operation in ("SUM", "AVG"):
        wide = torch.complex128 if dtype.is_complex else torch.float64
        total = torch.stack(rows).to(wide).sum(0) / (size if operation == "AVG" else 1)
        return total.to(dtype) if dtype != torch.bool else total.real != 0
    combine = {
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }[operation]
    result = rows[0]
    for row in rows[1:]:
        result = combine(result, row)
    return result


def is_defined(operation, dtype):
    if operation in ("BAND", "BOR", "BXOR"):
        return not (dtype.is_floating_point or dtype.is_complex)
    if operation == "AVG":
        return dtype != torch.bool  # of complex values too
    return not dtype.is_complex or operation == "SUM"


def reduce_in_many_ways(world, numels):
    """The cases in which a reduction was wrong."""
    rank, size = world.rank, world.world_size
    group, wrong = streaming_group(), []
    for numel, dtype, operation in itertools.product(numels, DTYPES, OPERATIONS):
        if not is_defined(operation, dtype) or (numel > 100 and operation in ("PRODUCT", "MIN", "BAND", "BOR")):
            continue
        op, expected = getattr(dist.ReduceOp, operation), reduced(operation, dtype, size, numel)
        t = values(rank, dtype, numel)
        dist.all_reduce(t, op, group=group)
        wrong += [] if torch.equal(t, expected) else [("all_reduce", numel, dtype, operation)]
        t = values(rank, dtype, numel)
        dist.reduce(t, 1, op, group=group)
        wrong += [] if torch.equal(t, expected if rank == 1 else values(rank, dtype, numel)) else ["reduce", dtype]
        pieces = [values(rank, dtype, numel + s, s) for s in range(size)]
        t = torch.zeros(numel + rank, dtype=dtype)
        dist.reduce_scatter(t, pieces, op, group=group)
        expected = reduced(operation, dtype, size, numel + rank, rank)
        wrong += [] if torch.equal(t, expected) else [("reduce_scatter", numel, dtype, operation)]
    return wrong


def streaming_group():
    """A group with small buffers, so that little suffices to stream through them; smallest on the first host."""
    make_hier.BUFFER_BYTES = 1 << (14 + dist.group.WORLD.transport._site.host)
    return dist.new_group(backend="hier")


@pytest.mark.parametrize("layout", [(0, 0, 1, 1), (0, 1, 1, 2)], ids=str)
def test_every_reduction_of_every_dtype_is_right_at_once_and_in_blocks(layout):
    assert on_hosts(layout, reduce_in_many_ways, [5, 20_001]) == [[]] * len(layout)


def move_in_many_ways(world, numels):
    rank, size = world.rank, world.world_size
    group, wrong = streaming_group(), []
    for numel, dtype in itertools.product(numels, [torch.float32, torch.bool, torch.complex128]):
        for root in range(size):
            t = values(rank, dtype, numel)
            dist.broadcast(t, root, group=group)
            wrong += [] if torch.equal(t, values(root, dtype, numel)) else [("broadcast", numel, dtype, root)]
        for sizes in ([numel] * size, [numel * r // 2 for r in range(size)]):
            outputs = [torch.zeros(n, dtype=dtype) for n in sizes]
            dist.all_gather(outputs, values(rank, dtype, sizes[rank]), group=group)
            expected = [values(r, dtype, n) for r, n in enumerate(sizes)]
            wrong += [] if all(map(torch.equal, outputs, expected)) else [("all_gather", sizes, dtype)]
        outputs = [torch.zeros(numel + 3 * r + rank, dtype=dtype) for r in range(size)]
        inputs = [values(rank, dtype, numel + 3 * rank + s, s) for s in range(size)]
        dist.all_to_all(outputs, inputs, group=group)
        expected = [values(r, dtype, numel + 3 * r + rank, rank) for r in range(size)]
        wrong += [] if all(map(torch.equal, outputs, expected)) else [("all_to_all", numel, dtype)]
    return wrong


@pytest.mark.parametrize("layout", [(0, 0, 1, 1), (0, 1, 1, 2), (0, 1, 2)], ids=str)
def test_everything_that_only_moves_is_right_at_once_and_in_blocks(layout):
    assert on_hosts(layout, move_in_many_ways, [5, 20_001]) == [[]] * len(layout)


def bits_of_noise(world, dtype):
    """The bits of sums and averages of random values, of several sizes, and how far they are from right."""
    group, bits, far = streaming_group(), [], 0.0
    for numel in (100, 20_001):
        rows = [
            torch.randn(numel, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world.world_size)
        ]
        exact = torch.stack(rows).double().sum(0)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            t = rows[world.rank].clone()
            dist.all_reduce(t, op, group=group)
            bits.append(t.view(torch.uint8).numpy().tobytes())
            right = exact / (world.world_size if op == dist.ReduceOp.AVG else 1)
            far = max(far, float(((t.double() - right).abs() / right.abs().clamp(min=1)).max()))
    return bits, far


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [(0, 0, 1, 1), (0, 1, 0, 2, 2)], ids=str)
def test_sums_have_the_same_bits_on_all_ranks_and_are_near(layout, dtype):
    results = on_hosts(layout, bits_of_noise, dtype)
    assert all(bits == results[0][0] for bits, _ in results)
    assert results[0][1] < 8 * torch.finfo(dtype).eps


def average_of_large_halves(world):
    t = torch.full((3,), 60_000.0, dtype=torch.float16)
    dist.all_reduce(t, dist.ReduceOp.AVG)
    return t.tolist()


def test_an_average_of_halves_does_not_overflow():
    assert on_hosts((0, 0, 1), average_of_large_halves) == [[60_000.0] * 3] * 3


def look_at_group(world):
    t = torch.full((3,), world.rank + 1.0)
    dist.all_reduce(t)
    transport = dist.group.WORLD.transport
    return type(transport), dist.get_backend(), transport.name, t.tolist()


def test_ranks_of_one_host_only_share_memory():
    assert on_hosts((0, 0, 0), look_at_group) == [(SharedMemory, "hier", "hier", [6.0] * 3)] * 3


def test_a_world_of_one():
    assert on_hosts((0,), look_at_group) == [(SharedMemory, "hier", "hier", [1.0] * 3)]


def count_lanes(world):
    transport = dist.group.WORLD.transport
    return type(transport), transport.num_lanes, transport.num_local, transport.local.rank


def test_there_are_as_many_lanes_as_ranks_on_the_host_that_has_fewest():
    assert on_hosts((0, 1, 0, 1, 1), count_lanes) == [
        (Hierarchical, 2, 2, 0),
        (Hierarchical, 2, 3, 0),
        (Hierarchical, 2, 2, 1),
        (Hierarchical, 2, 3, 1),
        (Hierarchical, 2, 3, 2),
    ]


# -- wrong -------------------------------------------------------------------------------------------------------------


DIFFERENT = {
    "operation": ["all_reduce", "broadcast"],
    "barrier": ["all_reduce", "barrier"],
    "size": ["100000", "100001"],
    "small and large": ["4", "100000"],
    "dtype": ["float32", "int32"],
    "reduction": ["sum", "max"],
    "root": ["rank 0", "rank 1"],
    "all_gather": ["4", "5"],
    "reduce_scatter": ["12", "15"],
    "gather": ["4", "5"],
    "all_to_all": ["4", "5"],
}


def differ(world):
    """For each case, call what differs on rank 2: what was raised, and a sum after that."""
    odd, size = world.rank == 2, world.world_size
    numel = 5 if odd else 4
    ones = [torch.ones(numel) for _ in range(size)]
    calls = {
        "operation": lambda: dist.broadcast(torch.ones(4), 0) if odd else dist.all_reduce(torch.ones(4)),
        "barrier": lambda: dist.barrier() if odd else dist.all_reduce(torch.ones(100_000)),
        "size": lambda: dist.all_reduce(torch.ones(100_001 if odd else 100_000)),
        "small and large": lambda: dist.all_reduce(torch.ones(100_000 if odd else 4)),
        "dtype": lambda: dist.all_reduce(torch.ones(4, dtype=torch.int32 if odd else torch.float32)),
        "reduction": lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
        "root": lambda: dist.broadcast(torch.ones(4), 1 if odd else 0),
        "all_gather": lambda: dist.all_gather([torch.empty(numel) for _ in range(size)], torch.ones(numel)),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.empty(numel), ones),
        "gather": lambda: dist.gather(torch.ones(numel), [torch.ones(4)] * size if world.rank == 0 else None),
        "all_to_all": lambda: dist.all_to_all([torch.empty(4) for _ in range(size)], ones),
    }
    seen = {}
    for case, call in calls.items():
        with pytest.raises(CollectiveMismatchError) as caught:
            call()
        t = torch.full((40_000,), world.rank + 1.0)
        dist.all_reduce(t)
        seen[case] = str(caught.value), t.unique().tolist()
    return seen


@pytest.mark.parametrize("layout", [(0, 0, 1), (0, 1, 1)], ids=str)
def test_calls_that_differ_raise_on_all_ranks_which_name_both_sides_and_go_on(layout):
    for seen in on_hosts(layout, differ):
        assert seen.keys() == DIFFERENT.keys()
        for case, (error, sums) in seen.items():
            assert "rank 2" in error, error
            assert "rank 0" in error or "rank 1" in error, error
            assert all(re.search(rf"\b{side}\b", error) for side in DIFFERENT[case]), error
            assert sums == [6.0]


def write_nothing(world):
    """Two calls that differ: what has become of the tensors."""
    large = torch.full((1_000_000 + (world.rank == 2),), float(world.rank))
    outputs = [torch.full((large.numel(),), -1.0) for _ in range(world.world_size)]
    for call in (lambda: dist.all_reduce(large), lambda: dist.all_gather(outputs, large)):
        with pytest.raises(CollectiveMismatchError):
            call()
    return large.unique().tolist(), torch.stack(outputs).unique().tolist()


def test_where_calls_differ_nothing_is_written():
    assert on_hosts((0, 0, 1, 1), write_nothing) == [([float(rank)], [-1.0]) for rank in range(4)]


def messages_differ(world):
    if world.rank == 0:
        dist.send(torch.ones(4), 2)
        return None
    if world.rank == 2:
        with pytest.raises(CollectiveMismatchError) as caught:
            dist.recv(torch.ones(5))
        return str(caught.value)
    return None


def test_a_message_that_does_not_fit_names_its_sender():
    *_, error = on_hosts((0, 0, 1), messages_differ)
    assert "rank 2 waits for 5 elements of float32 with tag 0, but rank 0 sent 4 elements of float32" in error


# -- gone --------------------------------------------------------------------------------------------------------------


def lose(world, victim, how, call):
    """Loop until a rank is gone: the error of the others, once they have all seen it."""
    calls = {
        "small": lambda: dist.all_reduce(torch.ones(10)),
        "large": lambda: dist.all_reduce(torch.ones(500_000)),
        "broadcast": lambda: dist.broadcast(torch.ones(500_000), 0),
        "exchange": lambda: dist.all_to_all([torch.ones(9) for _ in range(4)], [torch.ones(9) for _ in range(4)]),
        "barrier": lambda: dist.barrier(),
        "message": lambda: pass_on(world),
    }
    for _ in range(3):
        calls[call]()
    if world.rank == victim:
        time.sleep(0.1)
        how()
    started = time.monotonic()
    try:
        for _ in range(1000):
            calls[call]()
    except PeerError as error:
        assert time.monotonic() - started < SOON_S
        return str(error)
    raise AssertionError("nothing was raised")


def pass_on(world):
    work = dist.isend(torch.ones(100_000), (world.rank + 1) % world.world_size)
    dist.recv(torch.ones(100_000), (world.rank - 1) % world.world_size)
    work.wait()


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("call", "layout", "victim"),
    [
        ("small", (0, 0, 1, 1), 3),
        ("small", (0, 1, 1, 1), 1),
        ("large", (0, 0, 1, 1), 0),
        ("large", (0, 0, 1, 2), 3),
        ("broadcast", (0, 0, 1, 1), 2),
        ("exchange", (0, 0, 1, 2), 1),
        ("barrier", (0, 1, 1, 1), 3),
        ("message", (0, 0, 1, 1), 2),
    ],
    ids=str,
)
def test_all_survivors_of_a_killed_rank_raise_soon_and_name_it(call, layout, victim):
    survivors = [rank for rank in range(4) if rank != victim]
    with pytest.raises(RankError) as caught:
        on_hosts(layout, lose_and_tell, victim, call)
    told = told_by(caught.value)
    assert sorted(told) == list(range(4)), caught.value
    assert "died with exit code -9" in told[victim]
    for rank in survivors:
        assert "Told: " in told[rank], told[rank]
        assert names(told[rank].partition("Told: ")[2], victim), told[rank]


def lose_and_tell(world, victim, call):
    """Fail with what was raised: of ranks that do not fail, nobody hears when another has."""
    raise AssertionError(f"Told: {lose(world, victim, kill, call)}")


def told_by(error):
    """What ``RankError`` says, by rank."""
    parts = re.split(r"^--- rank (\d+): ", str(error), flags=re.MULTILINE)
    return {int(rank): text for rank, text in zip(parts[1::2], parts[2::2], strict=True)}


def names(text, rank):
    """Whether ``text`` speaks of ``rank``, alone or in a list such as ``ranks 1, 2 and 3``."""
    return bool(re.search(rf"\branks? (\d+(, | and ))*{rank}\b", text))


def fail_with_a_reason(world):
    dist.barrier()
    if world.rank == 3:
        raise ValueError("the disk is full")
    dist.all_reduce(torch.ones(10))


def test_last_words_reach_the_other_hosts():
    errors = errors_on_hosts((0, 0, 1, 1), fail_with_a_reason)
    for error in errors[:3]:
        assert error.startswith("PeerError: "), error
        assert "the disk is full" in error, error


def leave_early(world):
    dist.all_reduce(torch.ones(10))
    if world.rank != 2:
        dist.all_reduce(torch.ones(10))
    raise AssertionError("left")


def test_a_rank_that_leaves_early_is_named():
    first, second, _ = errors_on_hosts((0, 0, 1), leave_early)
    for error in (first, second):
        assert error.startswith("PeerError: "), error
        assert names(error, 2), error


def leave_in_silence(world):
    dist.all_reduce(torch.ones(10))
    if world.rank != 2:
        try:
            dist.all_reduce(torch.ones(10))
        except PeerError as error:
            raise AssertionError(f"Told: {error}") from None


def test_a_rank_that_ends_too_early_is_said_to_have_left():
    with pytest.raises(RankError) as caught:
        on_hosts((0, 0, 1), leave_in_silence)
    told = told_by(caught.value)
    assert sorted(told) == [0, 1]
    for text in told.values():
        assert "rank 2 has left the group. All ranks must call collectives equally often before they end." in text


def be_slow_to_join(world):
    if world.rank == 1:
        make_hier.Post = lambda rank: time.sleep(3) or Post(rank)
    try:
        dist.new_group(timeout=timedelta(seconds=1), backend="hier")
    except (RendezvousError, CommunicationError) as error:
        return str(error)
    return None


def test_a_rank_that_cannot_be_reached_yet_is_named():
    first, second, third = on_hosts((0, 1, 2), be_slow_to_join)
    assert second.startswith("rank 1: rank 0 cannot take part: rank 0: rank 1 did not say where to reach it")
    assert first == "rank 0: rank 1 did not say where to reach it before the deadline."
    assert third == "rank 2: rank 1 did not say where to reach it before the deadline."


def has_few_descriptors(world, num_more):
    """Rank 1 has enough of them for the memory of its host, and none for sockets, or for neither; it lives on."""
    world.barrier()
    if world.rank == 1:
        allow_descriptors(num_more)
    started = time.monotonic()
    with pytest.raises(CommunicationError) as raised:
        dist.new_group(timeout=timedelta(seconds=20))
    took_s = time.monotonic() - started
    time.sleep(2.0 if world.rank == 1 else 0.0)
    return str(raised.value), took_s


@pytest.mark.parametrize(("num_more", "what"), [(0, "open the memory"), (2, "open sockets for other hosts")])
def test_where_one_rank_may_open_no_more_files_all_raise_at_once(num_more, what):
    found = on_hosts([0, 0, 1], has_few_descriptors, num_more)
    for rank, (text, took_s) in enumerate(found):
        assert text.startswith(f"rank {rank}: ")
        assert f"rank 1: cannot {what}" in text
        assert "ulimit -n" in text
        assert rank == 1 or took_s < SOON_S


def come_too_late(world, late):
    group = dist.new_group(timeout=timedelta(seconds=1), backend="hier")
    dist.all_reduce(torch.ones(10), group=group)
    if world.rank == late:
        time.sleep(2.5)
    dist.all_reduce(torch.ones(10), group=group)


@pytest.mark.parametrize("late", [0, 1, 3])
def test_a_rank_that_does_not_come_is_named_on_all_hosts(late):
    errors = errors_on_hosts((0, 0, 1, 1), come_too_late, late)
    for rank in {0, 1, 2, 3} - {late}:
        assert re.match("CollectiveTimeoutError|PeerError", errors[rank]), errors[rank]
        assert names(errors[rank].partition("was not done")[2], late), errors[rank]
    assert sum(error.startswith(CollectiveTimeoutError.__name__) for error in errors) >= 1


def part_in_turn(world):
    """Each rank leaves as soon as it can; nobody is missed."""
    for numel in (10, 200_000):
        group = dist.new_group(backend="hier")
        for i in range(10):
            dist.broadcast(torch.ones(numel), i % world.world_size, group=group)
            dist.reduce(torch.ones(numel), i % world.world_size, group=group)
            dist.all_to_all_single(torch.ones(numel * 4), torch.ones(numel * 4), group=group)
        dist.destroy_process_group(group)
    return True


def test_ranks_may_leave_right_after_a_collective():
    assert on_hosts((0, 0, 1, 1), part_in_turn) == [True] * 4


def leave_a_child(world):
    dist.barrier()
    if world.rank == 1:
        if os.fork() == 0:
            time.sleep(SOON_S + 2)
            os._exit(0)
        kill()
    return lose_and_tell(world, 1, "small")


def test_a_killed_rank_is_missed_though_its_child_lives_on():
    with pytest.raises(RankError) as caught:
        on_hosts((0, 1), leave_a_child)
    assert names(told_by(caught.value)[0].partition("Told: ")[2], 1), caught.value


# -- messages ----------------------------------------------------------------------------------------------------------


def overtake(world):
    """A large message that nobody asks for yet keeps nothing else waiting."""
    rank, numel = world.rank, 3_000_000
    if rank == 0:
        works = [dist.isend(torch.full((numel,), 1.0), 2, tag=1), dist.isend(torch.full((3,), 2.0), 2, tag=2)]
    dist.barrier()
    t = torch.full((100_000,), rank + 1.0)
    dist.all_reduce(t)
    small, large = torch.zeros(3), torch.zeros(numel)
    if rank == 2:
        assert dist.recv(small, tag=2) == 0  # from any source
        assert dist.recv(large, 0, tag=1) == 0
    if rank == 0:
        for work in works:
            work.wait()
    return t[0].item(), small.unique().tolist(), large.unique().tolist()


def test_a_message_that_nobody_takes_holds_up_nothing_else():
    assert on_hosts((0, 0, 1), overtake)[2] == (6.0, [2.0], [1.0])


# -- averages of gradients ---------------------------------------------------------------------------------------------


def train(world, dtype):
    """A few steps on this rank's part of the batch: the parameters, and whether gradients were averaged in memory."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.ReLU(), torch.nn.Linear(300, 7)).to(dtype)
    wrapped = paceline.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(3, 20, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    for batch in data:
        optimizer.zero_grad()
        wrapped(batch.chunk(world.world_size)[world.rank]).square().mean().backward()
        optimizer.step()
    averages = wrapped._reducer._channels.averages if world.world_size > 1 else None
    return [p.detach().clone() for p in model.parameters()], averages is not None


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("layout", [(0, 0, 1, 1), (0, 1, 0, 2)], ids=str)
def test_training_over_hosts_is_training_in_one_process(layout):
    (expected, _), *_ = on_hosts((0,), train, torch.float64)
    for parameters, has_averages in on_hosts(layout, train, torch.float64):
        assert has_averages
        for one, other in zip(parameters, expected, strict=True):
            torch.testing.assert_close(one, other)


def break_a_sum(world):
    store = dist.PrefixStore("sums", dist.distributed_c10d._get_default_store())
    across = dist.group.WORLD.transport.open_across(store, 20.0)
    share = torch.full((1000,), world.rank + 1.0)
    work = across(share)
    assert work.wait()
    assert share.unique().tolist() == [3.0]
    if world.rank == 1:
        across(share)  # which no other host starts
        across.close()
        dist.barrier()
        return None
    time.sleep(0.2)
    with pytest.raises(PeerError) as caught:
        across(share).wait()
    dist.barrier()
    return str(caught.value)


def test_a_sum_over_hosts_that_breaks_says_with_whom():
    error, _ = on_hosts((0, 1), break_a_sum)
    assert error.startswith("the connection to rank 1 broke while a sum over hosts was under way: "), error


def die_while_training(world, victim):
    model = torch.nn.Linear(1000, 1000)
    wrapped = paceline.DistributedDataParallel(model)
    started = time.monotonic()
    try:
        for i in range(1000):
            if i == 3 and world.rank == victim:
                kill()
            wrapped(torch.ones(2, 1000)).sum().backward()
    except PacelineError as error:
        assert time.monotonic() - started < 2 * SOON_S
        raise AssertionError(f"Told: {error}") from None


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_dies_while_others_average_is_named(victim):
    with pytest.raises(RankError) as caught:
        on_hosts((0, 0, 1, 1), die_while_training, victim)
    told = told_by(caught.value)
    for rank in {0, 1, 2, 3} - {victim}:
        assert names(told[rank].partition("Told: ")[2], victim), told[rank]


# -- on several hosts --------------------------------------------------------------------------------------------------

SCRIPT = f"""
import hashlib, json, sys
sys.path.insert(0, {str(pathlib.Path(__file__).parents[1])!r})
import torch, torch.distributed as dist, paceline
from paceline.comm.hosts.transport import Hierarchical
from support.battery import differences
with paceline.init("hier", timeout=30) as world:
    assert isinstance(dist.group.WORLD.transport, Hierarchical)
    names = ["all_reduce_sums", "reduce_to_each_root", "broadcast_from_each_root", "all_gather_into_a_list"]
    names += ["reduce_scatter_from_a_list", "gather_to_each_root", "all_to_all_of_lists", "recv_from_anybody"]
    names += ["barrier_holds_until_all_have_come", "large_tensors", "sums_have_the_same_bits_everywhere_and_each_time"]
    found = {{name: texts for name in names if (texts := differences(name, world.rank, world.world_size))}}
    torch.manual_seed(world.rank)
    model = paceline.DistributedDataParallel(torch.nn.Linear(500, 500))
    model(torch.ones(1, 500) * world.rank).sum().backward()
    gradient = model.module.weight.grad
    digest = hashlib.sha256(torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes())
    print(json.dumps([found, digest.hexdigest(), gradient.unique().tolist()]))
"""


def test_on_two_hosts(tmp_path):
    script = write_script(tmp_path, SCRIPT)
    with hosts(2, rate="10gbit") as both:
        ranks = start_ranks(both, 2, [sys.executable, str(script)])
        outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, [err for _, err in outputs]
    told = [json.loads(out) for out, _ in outputs]
    assert [found for found, _, _ in told] == [{}] * 4
    assert len({digest for _, digest, _ in told}) == 1
    assert [gradient for *_, gradient in told] == [[1.5]] * 4  # (0 + 1 + 2 + 3) / 4
