"""Groups that cannot be made: all ranks say why, at once."""

import re
import resource
import time
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.errors import CommunicationError
from support.limits import allow_descriptors
from support.ranks import run_ranks

MIB = 1 << 20


def cannot_map(rank, world_size, directory):
    """Rank 1 has no address space for the memory, and lives on."""
    if rank == 1:
        limit = psutil.Process().memory_info().vms + 48 * MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    started = time.monotonic()
    with pytest.raises(CommunicationError) as raised:
        paceline.init("shm", f"file://{directory}/f", rank=rank, world_size=world_size, timeout=20)
    took_s = time.monotonic() - started
    time.sleep(3.0 if rank == 1 else 0.0)
    return str(raised.value), took_s


def test_where_one_rank_cannot_map_the_memory_all_raise_at_once():
    (zero, took_s), (one, _), (two, took_too) = run_ranks(3, cannot_map, join=False)
    assert one.startswith("rank 1: cannot map ")
    assert "Is it limited by `ulimit -v`? Raise the limit." in one
    assert zero.startswith("rank 0: rank 1 could not map the shared memory: rank 1: cannot map ")
    assert two.startswith("rank 2: rank 1 could not map the shared memory: rank 1: cannot map ")
    assert max(took_s, took_too) < 2.5


def has_few_descriptors(world, short, num_more):
    dist.barrier()
    if world.rank == short:
        allow_descriptors(num_more)
    try:
        group = dist.new_group(timeout=timedelta(seconds=20))
    except CommunicationError as error:
        return str(error)
    if world.rank == 1:
        time.sleep(0.5)
    t = torch.ones(1)
    dist.all_reduce(t, group=group)
    return t.item()


HINT = r"\(Too many open files\)\. This process has as many files and sockets open as it may\. .*`ulimit -n`"


@pytest.mark.parametrize(
    ("short", "num_more", "own", "others"),
    [
        (0, 0, "rank 0: cannot make the shared memory " + HINT, "rank 1: rank 0 could not make the shared memory: "),
        (0, 1, "rank 0: cannot make the shared memory " + HINT, "rank 1: rank 0 could not make the shared memory: "),
        (1, 0, "rank 1: cannot open the memory that rank 0 shares, /proc/.* " + HINT, "rank 0: rank 1 could not map "),
        (1, 1, r"rank 1: cannot map \d+ MiB of address space " + HINT, "rank 0: rank 1 could not map the shared "),
    ],
)
def test_where_a_rank_may_open_no_more_files_all_say_so(short, num_more, own, others):
    texts = run_ranks(2, has_few_descriptors, short, num_more, backend="shm")
    assert re.match(own, texts[short]), texts
    assert texts[1 - short].startswith(others), texts
    assert "ulimit -n" in texts[1 - short]


@pytest.mark.parametrize("short", [0, 1])
def test_two_descriptors_are_enough_for_a_group(short):
    assert run_ranks(2, has_few_descriptors, short, 2, backend="shm") == [2.0, 2.0]
