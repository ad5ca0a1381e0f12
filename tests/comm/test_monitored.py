"""``monitored_barrier``: nobody passes it before all have come, and who has not come is named."""

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.errors import CollectiveTimeoutError, PacelineError, PeerError
from support.mortals import Ranks
from support.ranks import run_ranks


def monitored_barrier(timeout_s, **options):
    """The error, as text; None where it passed."""
    try:
        dist.group.WORLD.monitored_barrier(timedelta(seconds=timeout_s), **options)
    except PacelineError as error:
        return f"{type(error).__name__}: {error}"
    return None


def comes_late(world):
    """Rank 2 comes to the first barrier when rank 0 has given it up, and to the second a second after the others."""
    store = dist.distributed_c10d._get_default_store()
    if world.rank == 2:
        store.wait(["given up"])
    first = monitored_barrier(1)
    if world.rank == 0:
        store.set("given up", "")
    if world.rank == 2:
        time.sleep(1)
    came = time.monotonic()
    second = monitored_barrier(10)
    return first, came, second, time.monotonic(), monitored_barrier(10)


def test_a_late_report_of_one_barrier_does_not_count_for_the_next():
    zero, one, two = run_ranks(3, comes_late, backend="shm")
    assert zero[0].startswith("CollectiveTimeoutError: Rank 2 failed to pass monitoredBarrier in 1000 ms. Look where")
    for first, *_ in (one, two):
        assert first.startswith("PeerError: Rank ")
        assert "it gave up, since not all ranks came in time. Rank 0's error names" in first
    for _, _, second, left, third in (zero, one, two):
        assert second is None
        assert left >= two[1]  # nobody has passed before rank 2 had come
        assert third is None


def comes_when_given_up(world):
    """Rank 0 comes to the first barrier when rank 1 has given it up, and both then to another."""
    if world.rank == 0:
        time.sleep(1)
    return monitored_barrier(0.3), monitored_barrier(10)


def test_ranks_that_have_missed_one_another_meet_at_the_next_barrier():
    (first, second), (given_up, after) = run_ranks(2, comes_when_given_up, backend="shm")
    assert first is None  # rank 1 had come, and its report was there
    assert given_up.startswith("PeerError: Rank 1 successfully reached monitoredBarrier")
    assert (second, after) == (None, None)


def loses_two(world, say, wait_all_ranks):
    dist.barrier()
    if world.rank in (1, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.group.WORLD.monitored_barrier(timedelta(seconds=4), wait_all_ranks=wait_all_ranks)
    except (CollectiveTimeoutError, PeerError) as error:
        say("heard", type(error).__name__, str(error))
    try:
        dist.all_reduce(torch.ones(1))
    finally:
        say("ended")


def test_ranks_that_have_died_are_named_by_a_monitored_barrier_with_their_fate():
    for wait_all_ranks, names in ((True, "Ranks 1, 3 "), (False, "Rank 1 ")):
        with Ranks(4, loses_two, wait_all_ranks) as ranks:
            said = [ranks.readers[rank].recv() for rank in (0, 2)]
        assert said[0][:2] == ("heard", "CollectiveTimeoutError")
        assert said[0][2].startswith(f"{names}failed to pass monitoredBarrier in 4000 ms.")
        assert "was killed by SIGKILL" in said[0][2]
        assert said[1][:2] == ("heard", "PeerError")
        assert "it gave up, since not all ranks came in time" in said[1][2]
