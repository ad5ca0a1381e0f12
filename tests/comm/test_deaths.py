"""Shared memory when ranks die, stop, fail, leave, differ or fork: the others soon say who and what; nothing stays.

Times are asserted only to tell an error from a hang.
"""

import gc
import itertools
import multiprocessing
import os
import pathlib
import random
import re
import signal
import sys
import time
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

import paceline
from support.commands import run_command, start, write_script
from support.mortals import BACKEND, Error, Ranks
from support.ranks import run_ranks

HANG_S = 5.0  # what takes longer hangs
_FORK = multiprocessing.get_context("fork")


# -- collectives, the i-th of a loop -----------------------------------------------------------------------------------


def all_reduce(rank, size, i, numel, group=None):
    dist.all_reduce(torch.ones(numel), group=group)


def broadcast(rank, size, i, numel, group=None):
    dist.broadcast(torch.ones(numel), i % size, group=group)


def reduce(rank, size, i, numel, group=None):
    dist.reduce(torch.ones(numel), i % size, group=group)


def all_gather(rank, size, i, numel, group=None):
    dist.all_gather([torch.empty(numel) for _ in range(size)], torch.ones(numel), group=group)


def reduce_scatter(rank, size, i, numel, group=None):
    dist.reduce_scatter(torch.empty(numel), [torch.ones(numel) for _ in range(size)], group=group)


def all_to_all(rank, size, i, numel, group=None):
    dist.all_to_all([torch.empty(numel) for _ in range(size)], [torch.ones(numel) for _ in range(size)], group=group)


def gather(rank, size, i, numel, group=None):
    outs = [torch.empty(numel) for _ in range(size)] if rank == i % size else None
    dist.gather(torch.ones(numel), outs, i % size, group=group)


def scatter(rank, size, i, numel, group=None):
    inputs = [torch.ones(numel) for _ in range(size)] if rank == i % size else None
    dist.scatter(torch.empty(numel), inputs, i % size, group=group)


def barrier(rank, size, i, numel, group=None):
    dist.barrier(group)


def messages(rank, size, i, numel, group=None):
    work = dist.isend(torch.ones(numel), (rank + 1) % size, group=group)
    dist.recv(torch.empty(numel), (rank - 1) % size, group=group)
    work.wait()


COLLECTIVES = {
    fn.__name__: fn
    for fn in (
        *[all_reduce, broadcast, reduce, all_gather, reduce_scatter],
        *[all_to_all, gather, scatter, barrier, messages],
    )
}


# -- killed ------------------------------------------------------------------------------------------------------------


def loop(world, say, kind, numel):
    for i in itertools.count():
        COLLECTIVES[kind](world.rank, world.world_size, i, numel)
        if i == 2:
            say("looped")


def kill_one(kind, size, victim, numel, after_s):
    """Kill a rank that loops with the others: how long the last of them took to notice."""
    with Ranks(size, loop, kind, numel) as ranks:
        ranks.hear_all("looped")
        time.sleep(after_s)
        killed_at = ranks.kill(victim)
        errors = {rank: ranks.hear(rank, "raised") for rank in range(size) if rank != victim}
        ranks.end(but=victim)
    for rank, error in errors.items():
        assert error.is_a("PeerError"), f"rank {rank} raised {error}"
        assert error.names(victim), f"rank {rank} does not name rank {victim}: {error.text}"
    return max(error.at for error in errors.values()) - killed_at


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_all_survivors_of_a_killed_rank_raise_and_name_it(kind):
    dice = random.Random(kind)
    for size in (2, 3, 4, 3, 2):
        victim, numel = dice.randrange(size), dice.choice([1, 5_000, 1_000_000])
        assert kill_one(kind, size, victim, numel, dice.uniform(0, 0.03)) < HANG_S


def wait_for_works(world, say):
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(3)] if world.rank != 1 else []
    say("started")
    if world.rank == 1:
        time.sleep(60)
    errors = []
    for work in works:
        try:
            work.wait()
        except Exception as error:
            errors.append(Error.of(error))
    return errors


def test_each_work_that_a_killed_rank_leaves_undone_raises():
    with Ranks(3, wait_for_works) as ranks:
        ranks.hear_all("started")
        ranks.kill(1)
        for rank in (0, 2):
            errors = ranks.hear(rank, "returned")
            assert len(errors) == 3
            assert all(error.is_a("PacelineError") and error.names(1) for error in errors), errors


def wait_for_future(world, say):
    dist.barrier()
    future = dist.all_reduce(torch.ones(1000), async_op=True).get_future() if world.rank != 1 else None
    say("started")
    if future is None:
        time.sleep(60)
    future.wait()


def test_a_future_that_a_killed_rank_leaves_undone_raises():
    with Ranks(3, wait_for_future) as ranks:
        ranks.hear_all("started")
        ranks.kill(1)
        for rank in (0, 2):
            error = ranks.hear(rank, "raised")
            assert error.names(1), error
            assert "SIGKILL" in error.text, error


def poll_work(world, say):
    dist.barrier()
    work = dist.all_reduce(torch.ones(1000), async_op=True) if world.rank != 1 else None
    say("started")
    if work is None:
        time.sleep(60)
    deadline = time.monotonic() + HANG_S
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.001)
    say("polled", work.is_completed())
    work.wait()


def test_a_work_that_a_killed_rank_leaves_undone_is_completed_for_who_polls():
    with Ranks(2, poll_work) as ranks:
        ranks.hear_all("started")
        ranks.kill(1)
        assert ranks.hear(0, "polled") is True
        assert ranks.hear(0, "raised").names(1)


def leave_a_child(world, say):
    dist.barrier()
    if world.rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        say("forked", child)
    dist.barrier() if world.rank != 1 else time.sleep(60)


def test_a_killed_rank_is_missed_though_its_child_lives_on():
    with Ranks(3, leave_a_child) as ranks:
        child = ranks.hear(1, "forked")
        try:
            killed_at = ranks.kill(1)
            for rank in (0, 2):
                error = ranks.hear(rank, "raised")
                assert error.is_a("PeerError"), error
                assert error.names(1), error
                assert error.at - killed_at < HANG_S
        finally:
            os.kill(child, signal.SIGKILL)


# -- silent ------------------------------------------------------------------------------------------------------------


def stall(world, say, kind):
    """Three sums in a group with a timeout of a second; before the fourth call, rank 1 is stopped."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    for _ in range(3):
        dist.all_reduce(torch.ones(7), group=group)
    if world.rank == 1:
        say("stopping")
        os.kill(os.getpid(), signal.SIGSTOP)
    COLLECTIVES[kind](world.rank, world.world_size, 1, 1234, group)  # the root is rank 1
    say("went on")  # what it needed may have been there
    dist.all_reduce(torch.ones(7), group=group)


@pytest.mark.parametrize(
    ("kind", "operation", "size"),
    [
        ("all_reduce", "all_reduce", "1234"),
        ("all_gather", "all_gather", "1234"),
        ("broadcast", "broadcast", "1234"),
        ("reduce_scatter", "reduce_scatter", "3702"),
        ("barrier", "barrier", ""),
    ],
)
def test_a_silent_rank_is_named_after_the_timeout_with_the_call_and_its_line(kind, operation, size):
    with Ranks(3, stall, kind) as ranks:
        ranks.hear(1, "stopping")
        started = time.monotonic()
        for rank in (0, 2):
            error = ranks.hear(rank, "raised")
            for name in ("CollectiveTimeoutError", "PacelineError", "TimeoutError", "RuntimeError"):
                assert error.is_a(name), error
            assert error.names(1), error
            assert operation in error.text
            assert re.search(r"\bnumber 4\b", error.text), error
            if size:
                assert "float32" in error.text
                assert re.search(rf"\b{size}\b", error.text), error
            line = int(re.search(rf"{re.escape(__file__)}:(\d+)", error.text)[1])
            assert line in {line for *_, line in COLLECTIVES[kind].__code__.co_lines()}
            assert 0.5 < error.at - started < 1 + HANG_S
        os.kill(ranks.pid(1), signal.SIGCONT)
        ranks.hear(1, "went on")
        late = ranks.hear(1, "raised")  # it comes back to a group that has been given up
        assert late.is_a("PeerError"), late
        assert late.names(0) or late.names(2), late
        assert "after 1 s" in late.text, late
        ranks.end(but=None)


def receive_from_silence(world, say):
    group = dist.new_group(timeout=timedelta(seconds=1))
    if world.rank == 0:
        dist.recv(torch.zeros(1234), 1, group=group, tag=6)
    else:
        time.sleep(60)


def test_a_message_that_does_not_come_is_named_after_the_timeout():
    with Ranks(2, receive_from_silence) as ranks:
        error = ranks.hear(0, "raised")
        assert error.is_a("CollectiveTimeoutError"), error
        assert error.names(1), error
        for word in ("recv", "1234", "float32", "tag 6", f"{__file__}:"):
            assert word in error.text, error


def wait_a_little(world):
    """Rank 1 comes when the others have waited shortly; then these wait as long as it takes."""
    store = dist.distributed_c10d._get_default_store()
    if world.rank == 1:
        store.wait(["waited/0", "waited/2"])
    t = torch.ones(10)
    work = dist.all_reduce(t, async_op=True)
    error = None
    if world.rank != 1:
        store.set(f"called/{world.rank}", "")
        store.wait(["called/0", "called/2"])
        try:
            work.wait(timedelta(seconds=0.1))
        except Exception as too_late:
            error = Error.of(too_late)
        store.set(f"waited/{world.rank}", "")
    return error, work.wait(), t.tolist()


def test_a_wait_with_a_short_timeout_may_be_repeated():
    for rank, (error, is_done, values) in enumerate(run_ranks(3, wait_a_little, backend=BACKEND)):
        assert rank == 1 or error.is_a("CollectiveTimeoutError")
        assert rank == 1 or "was not done after 0.1 s, the timeout of this wait: rank 1 has not come" in error.text
        assert is_done is True
        assert values == [3.0] * 10


def compute_and_come_late(world):
    group = dist.new_group(timeout=timedelta(seconds=20))
    time.sleep(0.7 * world.rank)
    t = torch.ones(1)
    dist.all_reduce(t, group=group)
    return t.item()


def test_a_rank_that_is_only_late_is_waited_for():
    assert run_ranks(3, compute_and_come_late, backend=BACKEND) == [3.0] * 3


# -- failed, or gone ---------------------------------------------------------------------------------------------------


def lose_one(world, say, how):
    dist.all_reduce(torch.ones(3))
    if world.rank == 1:
        if how == "raises":
            raise ValueError("the disk is full")
        if how == "destroys":
            dist.destroy_process_group()
            time.sleep(30)
        if how == "sys.exit":
            sys.exit(3)
        if how == "os._exit":
            os._exit(7)
        return
    dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raises", r"ValueError: the disk is full"),
        pytest.param("returns", r"\bleft\b", marks=pytest.mark.slow),  # shutdown() waits ten seconds for the others
        ("destroys", r"\bleft\b"),
        ("sys.exit", r""),
        ("os._exit", r"status 7"),
    ],
)
def test_a_rank_that_ends_while_others_wait_is_named_with_the_reason(how, expected):
    with Ranks(3, lose_one, how) as ranks:
        for rank in (0, 2):
            error = ranks.hear(rank, "raised", timeout_s=20)
            assert error.is_a("PeerError"), error
            assert error.names(1), error
            assert re.search(expected, error.text), error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "expected"), [("raise ValueError('the disk is full')", "the disk is full"), ("", r"\bleft\b")]
)
def test_a_script_that_ends_while_another_waits_is_named_with_the_reason(last, expected, tmp_path):
    script = write_script(
        tmp_path,
        f"""
        import sys, torch, paceline
        import torch.distributed as dist
        world = paceline.init("{BACKEND}", sys.argv[1], rank=int(sys.argv[2]), world_size=2, timeout=30)
        dist.all_reduce(torch.ones(3))
        if world.rank == 0:
            dist.all_reduce(torch.ones(3))
        else:
            pass
            {last}
        """,
    )
    command = [sys.executable, script, (tmp_path / "rendezvous").as_uri()]
    other = start([*command, "1"])
    try:
        done = run_command([*command, "0"])
        assert done.returncode != 0
        assert "PeerError" in done.stderr
        assert re.search(r"rank 1\b", done.stderr), done.stderr
        assert re.search(expected, done.stderr), done.stderr
    finally:
        other.kill()
        other.communicate()


# -- different ---------------------------------------------------------------------------------------------------------


def differ(world, case, is_async):
    """Call what differs on rank 1: what was raised, and a sum after that."""
    odd = world.rank == 1
    options = {"async_op": is_async}
    calls = {
        "operation": lambda: dist.broadcast(torch.ones(4), 0, **options) if odd else dist.all_reduce(torch.ones(4)),
        "barrier": lambda: dist.barrier(**options) if odd else dist.all_reduce(torch.ones(4), **options),
        "size": lambda: dist.all_reduce(torch.ones(5 if odd else 4), **options),
        "large size": lambda: dist.all_reduce(torch.ones(3_000_001 if odd else 3_000_000), **options),
        "size of nothing": lambda: dist.all_reduce(torch.ones(0 if odd else 4), **options),
        "dtype": lambda: dist.all_reduce(torch.ones(4).to(torch.float64 if odd else torch.float32), **options),
        "reduction": lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM, **options),
        "root": lambda: dist.broadcast(torch.ones(4), 2 if odd else 0, **options),
        "size of a broadcast": lambda: dist.broadcast(torch.ones(5 if odd else 4), 0, **options),
        "size of a reduce": lambda: dist.reduce(torch.ones(5 if odd else 4), 0, **options),
        "size of an all_gather": lambda: dist.all_gather(
            [torch.empty(5 if odd else 4) for _ in range(3)], torch.ones(5 if odd else 4), **options
        ),
        "size of a reduce_scatter": lambda: dist.reduce_scatter(
            torch.empty(5 if odd else 4), [torch.ones(5 if odd else 4) for _ in range(3)], **options
        ),
        "size of an all_to_all": lambda: dist.all_to_all(
            [torch.empty(4) for _ in range(3)], [torch.ones(5 if odd and r == 0 else 4) for r in range(3)], **options
        ),
        "size of a gather": lambda: dist.gather(
            torch.ones(5 if odd else 4), [torch.ones(4) for _ in range(3)] if world.rank == 0 else None, **options
        ),
        "size of a scatter": lambda: dist.scatter(
            torch.ones(5 if odd else 4), [torch.ones(4) for _ in range(3)] if world.rank == 0 else None, **options
        ),
    }
    error = None
    try:
        work = calls[case]()
        if work is not None:
            work.wait()
    except Exception as raised:
        error = Error.of(raised)
    t = torch.full((1000,), world.rank + 1.0)
    dist.all_reduce(t)
    return error, t.unique().tolist()


MISMATCHES = [
    ("operation", ["all_reduce", "broadcast"]),
    ("barrier", ["all_reduce", "barrier"]),
    ("size", ["4", "5"]),
    ("large size", ["3000000", "3000001"]),
    ("size of nothing", ["0", "4"]),
    ("dtype", ["float32", "float64"]),
    ("reduction", ["sum", "max"]),
    ("root", ["rank 0", "rank 2"]),
    ("size of a broadcast", ["4", "5"]),
    ("size of a reduce", ["4", "5"]),
    ("size of an all_gather", ["4", "5"]),
    ("size of a reduce_scatter", ["4|12", "5|15"]),
    ("size of an all_to_all", ["4", "5"]),
    ("size of a gather", ["4", "5"]),
    ("size of a scatter", ["4", "5"]),
]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("case", "sides"), MISMATCHES, ids=[case for case, _ in MISMATCHES])
def test_calls_that_differ_raise_on_all_ranks_which_name_both_sides_and_go_on(case, sides, is_async):
    for error, sums in run_ranks(3, differ, case, is_async, backend=BACKEND):
        assert error is not None, "a rank has raised nothing"
        assert error.is_a("CollectiveMismatchError"), error
        assert error.is_a("RuntimeError"), error
        assert error.names(1), error
        assert error.names(0) or error.names(2), error
        for side in sides:
            assert re.search(rf"\b({side})\b", error.text), error
        assert sums == [6.0]


def messages_differ(world, case):
    if world.rank == 0:
        dist.send(torch.ones(4), 1)
        error = None
    else:
        try:
            dist.recv(torch.zeros(5) if case == "size" else torch.zeros(4, dtype=torch.float64), 0)
            error = None
        except Exception as raised:
            error = Error.of(raised)
    t = torch.ones(1)
    dist.all_reduce(t)
    return error, t.item()


@pytest.mark.parametrize(("case", "sides"), [("size", ["4", "5"]), ("dtype", ["float32", "float64"])])
def test_a_message_that_does_not_fit_raises_where_it_is_received(case, sides):
    (_, first), (error, second) = run_ranks(2, messages_differ, case, backend=BACKEND)
    assert error.is_a("CollectiveMismatchError"), error
    assert error.names(0), error
    assert all(re.search(rf"\b{side}\b", error.text) for side in sides), error
    assert (first, second) == (2.0, 2.0)


# -- for long ----------------------------------------------------------------------------------------------------------


def private_belongings():
    gc.collect()
    memory = psutil.Process().memory_info()
    return {
        "bytes": memory.rss - memory.shared,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "tensors": sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects()),
    }


def mix(world, i):
    """Ten collectives."""
    rank, size, numel = world.rank, world.world_size, (1, 100, 5000)[i % 3]
    for fn in (all_reduce, broadcast, all_gather, reduce_scatter, all_to_all, messages, barrier):
        fn(rank, size, i, numel)
    works = [dist.all_reduce(torch.ones(numel), async_op=True) for _ in range(2)]
    works[1].get_future().then(lambda future: future.value()[0].sum()).wait()
    works[0].wait()
    objects = [None] * size
    dist.all_gather_object(objects, i)


def go_on(world, rounds):
    for i in range(400):
        mix(world, i)
    before = private_belongings()
    for i in range(rounds):
        mix(world, i)
    return before, private_belongings()


def test_ten_thousand_collectives_leave_nothing():
    for before, after in run_ranks(2, go_on, 1000, backend=BACKEND, timeout_s=100):
        grown = {name: after[name] - before[name] for name in before}
        assert grown["bytes"] < 3 * 2**20, grown
        assert grown["descriptors"] <= 0, grown
        assert grown["tensors"] < 10, grown  # what was called last may still be held
        assert grown["threads"] <= 1, grown  # a second one drives while the first calls back: once, not each time


def come_and_go(rank, size, directory, way):
    seen = []
    for number in range(20):
        uri = pathlib.Path(directory, str(number)).as_uri()
        t = torch.full((10,), rank + 1.0)
        if way == "torch":
            dist.init_process_group(BACKEND, init_method=uri, rank=rank, world_size=size)
            dist.all_reduce(t)
            dist.destroy_process_group()
        else:
            with paceline.init(BACKEND, uri, rank=rank, world_size=size, timeout=20):
                dist.all_reduce(t)
        seen.append((t.tolist(), private_belongings() if number in (4, 19) else None))
    return seen


@pytest.mark.parametrize("way", ["torch", "paceline"])
def test_a_process_joins_and_leaves_twenty_worlds(way):
    for seen in run_ranks(3, come_and_go, way, join=False):
        assert [values for values, _ in seen] == [[6.0] * 10] * 20
        (_, early), (_, late) = seen[4], seen[-1]
        for name in ("descriptors", "threads", "tensors"):
            assert late[name] <= early[name], (early, late)


def pairs(world):
    """Each pair of ranks is a group; all groups sum at once, each rank starting with another one."""
    everyone = range(world.world_size)
    counts = []
    for _ in range(3):
        groups = {pair: dist.new_group(pair) for pair in itertools.combinations(everyone, 2)}
        mine = [pair for pair in groups if world.rank in pair]
        sums = {pair: torch.full((50_000,), world.rank + 1.0) for pair in mine}
        works = [dist.all_reduce(sums[pair], group=groups[pair], async_op=True) for pair in mine]
        t = torch.full((10,), world.rank + 1.0)
        dist.all_reduce(t)
        for work in works[world.rank :] + works[: world.rank]:
            work.wait()
        assert {pair: t.unique().tolist() for pair, t in sums.items()} == {(a, b): [a + b + 2.0] for a, b in mine}
        assert t.unique().tolist() == [10.0]
        for pair in mine:
            dist.destroy_process_group(groups[pair])
        counts.append(private_belongings())
    return counts


def test_several_groups_work_at_once_and_give_back_what_they_had():
    for _, second, third in run_ranks(4, pairs, backend=BACKEND):
        assert third["descriptors"] <= second["descriptors"]
        assert third["threads"] <= second["threads"]


def keep_to_ones_own(world, say, value):
    say("joined")
    for i in range(300):
        t = torch.full((1 + i * 50,), value)
        dist.all_reduce(t)
        if t.unique().tolist() != [3 * value]:
            return f"round {i}: {t.unique().tolist()}"
    return "right"


def test_two_jobs_on_one_machine_never_meet():
    with Ranks(3, keep_to_ones_own, 1.0) as first, Ranks(3, keep_to_ones_own, 10.0) as second:
        for ranks in (first, second):
            ranks.hear_all("joined")
        for ranks in (first, second):
            assert ranks.hear_all("returned") == ["right"] * 3


def test_a_death_in_one_job_does_not_disturb_another():
    with Ranks(3, loop, "all_reduce", 1000) as first, Ranks(3, keep_to_ones_own, 10.0) as second:
        first.hear_all("looped")
        first.kill(0)
        assert all(first.hear(rank, "raised").names(0) for rank in (1, 2))
        second.hear_all("joined")
        assert second.hear_all("returned") == ["right"] * 3
