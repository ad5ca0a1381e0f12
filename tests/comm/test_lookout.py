"""Who is found gone, how soon and as what, and who is not: whatever else is under way, or short, here."""

import os
import re
import sys
import time

import pytest
import torch
import torch.distributed as dist

from paceline.comm.memory.signals import STATE
from paceline.errors import PeerError
from support.limits import allow_descriptors
from support.mortals import Ranks
from support.ranks import run_ranks

SOON_S = 2.0  # it takes half a second where the machine has nothing else to do


def expects_of_two(world, say):
    dist.barrier()
    if world.rank == 0:
        _first, second = [dist.irecv(torch.zeros(1), peer).get_future() for peer in (1, 2)]
        say("waits")
        second.wait()
    say("waits")
    time.sleep(60)


def test_a_killed_rank_is_named_though_another_message_is_awaited_before_its_own():
    with Ranks(3, expects_of_two) as ranks:
        ranks.hear_all("waits")
        killed_at = ranks.kill(2)
        error = ranks.hear(0, "raised")
        assert error.names(2), error
        assert "SIGKILL" in error.text
        assert error.at - killed_at < SOON_S


def waits_beside_traffic(world, say):
    """Whenever rank 0 looks whether rank 1 has come, something else has just ended."""
    dist.barrier()
    dist.distributed_c10d._get_default_group().engine.also_advance(lambda: True)
    say("waits")
    dist.barrier() if world.rank == 0 else time.sleep(60)


def test_a_killed_rank_is_named_by_who_waits_for_it_beside_what_ends_all_the_time():
    with Ranks(2, waits_beside_traffic) as ranks:
        ranks.hear_all("waits")
        killed_at = ranks.kill(1)
        error = ranks.hear(0, "raised")
        assert error.names(1), error
        assert error.at - killed_at < SOON_S


def becomes_another_program(world, say, program):
    dist.barrier()
    say("starts")
    if world.rank == 1:
        os.execv(program[0], program)
    dist.barrier()


@pytest.mark.parametrize(
    "program", [["/bin/sleep", "60"], [sys.executable, "-c", "import time; time.sleep(60)"]], ids=["other", "same"]
)
def test_a_rank_that_becomes_another_program_is_named(program):
    with Ranks(3, becomes_another_program, program) as ranks:
        ranks.hear_all("starts")
        started = time.monotonic()
        for rank in (0, 2):
            error = ranks.hear(rank, "raised")
            assert error.is_a("PeerError")
            assert error.names(1), error
            assert re.search(r"has become another program by exec \(/\S+\), and so has left the group", error.text)
            assert error.at - started < SOON_S


def leaves_and_exits(world, say, status):
    dist.barrier()
    if world.rank == 1:
        dist.destroy_process_group()
        os._exit(status)
    dist.barrier()


@pytest.mark.parametrize(("status", "how"), [(3, " and exited with status 3"), (0, "")])
def test_a_rank_that_leaves_and_exits_is_named_with_its_status(status, how):
    with Ranks(2, leaves_and_exits, status) as ranks:
        error = ranks.hear(0, "raised")
        assert re.search(rf"rank 1 \(pid \d+\) has left the group{how}\. All ranks must call", error.text), error


def has_no_descriptors(world):
    """Rank 0 may open no more files when rank 1 comes late."""
    dist.barrier()
    if world.rank == 1:
        time.sleep(0.7)
    else:
        allow_descriptors(0)
        with pytest.raises(OSError, match="Too many open files"):
            os.open("/dev/null", os.O_RDONLY)
    t = torch.ones(1)
    dist.all_reduce(t)
    return t.item()


def test_a_rank_that_may_open_no_more_files_takes_nobody_for_dead():
    assert run_ranks(2, has_no_descriptors, backend="shm") == [2.0, 2.0]


def speaks_before_it_rings(world):
    """Rank 1's state can be seen before it has rung: its last words may not be there yet."""
    transport = dist.distributed_c10d._get_default_group().transport
    start = transport.arena.layout.start(1) + transport.arena.layout.state
    found = []
    if world.rank == 1:
        transport.arena.words[start // 8] = 2
    world.barrier()
    if world.rank == 0:
        transport.poll()
        transport.check_peers([1])
    world.barrier()
    if world.rank == 1:
        transport.arena.memory[start + 8 : start + 13] = b"alas\0"
        transport.signals.tell_all(STATE)
    world.barrier()
    if world.rank == 0:
        transport.poll()
        with pytest.raises(PeerError, match=r"rank 1 \(pid \d+\) failed, and takes part in this group no more:\nalas"):
            transport.check_peers([1])
        found.append("alas")
    world.barrier()  # it leaves after that
    return found


def test_last_words_are_read_once_the_rank_has_rung():
    assert run_ranks(2, speaks_before_it_rings, backend="shm") == [["alas"], []]


class Interruption(Exception):  # noqa: N818
    pass


def interrupts(frame, event, _):
    """As a signal's handler would: raise in the middle of a look for news, when a token has been taken."""
    if frame.f_code.co_name != "poll" or not frame.f_code.co_filename.endswith("signals.py"):
        return None
    lines = []

    def raises(frame, event, _):
        lines.append(event)
        if lines.count("line") == 3:  # in the loop that takes tokens
            sys.settrace(None)
            raise Interruption("alarm")
        return raises

    return raises


def is_interrupted(world, say):
    dist.barrier()
    if world.rank == 0:
        time.sleep(0.5)  # rank 1 has come then
        sys.settrace(interrupts)
    say("starts")
    try:
        dist.all_reduce(torch.ones(1))
    except Interruption:
        say("interrupted")
        time.sleep(60)


def test_a_look_for_news_that_is_interrupted_ends_the_group_on_all_ranks():
    with Ranks(2, is_interrupted) as ranks:
        ranks.hear_all("starts")
        started = time.monotonic()
        ranks.hear(0, "interrupted")
        error = ranks.hear(1, "raised")
        assert error.names(0), error
        assert "interrupted by Interruption" in error.text
        assert error.at - started < SOON_S
