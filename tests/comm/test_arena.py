"""The shared memory: without a name, for one user, of a size that fits, and freed."""

import gc
import os
import pathlib
import resource
import shutil
import subprocess
import sys
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.comm.memory.arena import Layout
from paceline.errors import CommunicationError, PeerError
from support.ranks import RankError, expect_errors, run_ranks

MIB = 1 << 20


def test_the_parts_of_a_layout_follow_one_another_and_fill_it():
    layout = Layout(size=3, buffer_bytes=MIB, slot_bytes=MIB // 4, heap_bytes=64 * MIB)
    places = [64, layout.state, layout.calls, layout.sizes, layout.buckets, layout.stream, layout.messages, layout.heap]
    assert places == sorted(set(places))
    assert layout.heap == layout.messages + 3 * 4 * MIB // 4
    assert layout.part_bytes == layout.heap + 64 * MIB
    assert [layout.start(rank) for rank in range(3)] == [0, layout.part_bytes, 2 * layout.part_bytes]
    assert layout.part_bytes % 4096 == 0


def files_of_this_process():
    return [os.readlink(entry) for entry in pathlib.Path("/proc/self/fd").iterdir() if entry.exists()]


def looks_at_its_memory(world):
    lines = [line for line in pathlib.Path("/proc/self/maps").read_text().splitlines() if "memfd:paceline" in line]
    modes = {oct(os.stat(f"/proc/self/fd/{fd}").st_mode & 0o777) for fd in paceline_fds()}
    return len(lines) > 0, modes, sorted(os.listdir("/dev/shm"))


def paceline_fds():
    for entry in os.listdir("/proc/self/fd"):
        try:
            if "memfd:paceline" in os.readlink(f"/proc/self/fd/{entry}"):
                yield int(entry)
        except OSError:
            continue


def test_the_memory_has_no_name_and_only_its_owner_may_open_it():
    before = sorted(os.listdir("/dev/shm"))
    for is_mapped, modes, names in run_ranks(2, looks_at_its_memory, backend="shm"):
        assert is_mapped
        assert modes == {"0o600"}
        assert [name for name in names if "paceline" in name and name not in before] == []


def makes_and_destroys(world):
    def owned():
        gc.collect()
        maps = pathlib.Path("/proc/self/maps").read_text().count("memfd:paceline")
        return len(list(paceline_fds())), maps

    before = owned()
    for _ in range(5):
        group = dist.new_group(backend="shm")
        dist.all_reduce(torch.ones(3), group=group)
        dist.destroy_process_group(group)
        del group
    return before, owned()


def test_a_destroyed_group_gives_back_its_memory_and_descriptors():
    for before, after in run_ranks(2, makes_and_destroys, backend="shm"):
        assert after == before


def sums_under_a_limit(rank, world_size, directory, limit_bytes):
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    with paceline.init("shm", f"file://{directory}/f", rank=rank, world_size=world_size, timeout=20):
        tensor = torch.ones(MIB)
        dist.all_reduce(tensor)
        return float(tensor.sum())


def test_where_address_space_is_limited_the_group_takes_less_of_it():
    own = psutil.Process().memory_info().vms
    assert run_ranks(2, sums_under_a_limit, own + (1 << 30), join=False) == [2.0 * MIB] * 2


def test_where_address_space_is_too_short_the_error_says_what_was_wanted():
    own = psutil.Process().memory_info().vms
    with pytest.raises(RankError, match=r"CommunicationError: rank 0: cannot map \d+ MiB of address space .*ulimit -v"):
        run_ranks(2, sums_under_a_limit, own + 48 * MIB, join=False)


TINY = """
import torch, torch.distributed as dist, paceline, os
assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize <= 1 << 16
with paceline.init("shm") as world:
    tensor = torch.ones(4 << 20)
    dist.all_reduce(tensor)
    print(world.rank, int(tensor[-1]))
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_a_tiny_dev_shm_does_not_matter(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TINY)
    command = f"mount -t tmpfs -o size=64k tmpfs /dev/shm && exec {sys.executable} -m paceline.launch -n 2 {script}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command], stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert sorted(line.removeprefix("[0]: ").removeprefix("[1]: ") for line in done.stdout.splitlines()) == [
        "0 2",
        "1 2",
    ]


def asks_for_too_much(world):
    dist.distributed_c10d._get_default_group().averages().allocate(1 << 50, torch.float32)


def test_what_is_larger_than_the_memory_is_refused_with_its_size():
    for error in expect_errors(2, asks_for_too_much):
        assert error.startswith(f"CommunicationError: {4 * (1 << 50) >> 20} MiB of shared memory are wanted")


def has_no_memory(rank, world_size, directory):
    def refuse(fd, start, length):
        raise OSError(28, "No space left on device")

    if rank == 0:
        os.posix_fallocate = refuse
    paceline.init("shm", f"file://{directory}/f", rank=rank, world_size=world_size, timeout=20)


def test_where_memory_is_refused_all_ranks_say_how_much_was_needed():
    errors = expect_errors(2, has_no_memory, join=False)
    assert "MiB of shared memory are needed, and the system refuses them (No space left on device;" in errors[0]
    assert errors[1].startswith("CommunicationError: rank 1: rank 0 could not make the shared memory:")
    assert "Raise the memory limit" in errors[1]


def sends_where_memory_is_refused(world):
    """Memory for the messages of a pair is asked for with the first one, and only then."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    asked = []

    def refuse(fd, start, length):
        asked.append(length)
        raise OSError(28, "No space left on device")

    granted, os.posix_fallocate = os.posix_fallocate, refuse
    try:
        if world.rank == 0:
            with pytest.raises(CommunicationError, match=r"^1 MiB of shared memory are needed, and the system refuses"):
                dist.send(torch.ones(3), 1, group=group)
        else:
            with pytest.raises(PeerError, match=r"(?s)rank 0 .* failed, .* 1 MiB of shared memory are needed"):
                dist.recv(torch.ones(3), 0, group=group)
    finally:
        os.posix_fallocate = granted
    return asked


def test_memory_for_messages_is_reserved_before_it_is_touched():
    assert run_ranks(2, sends_where_memory_is_refused, backend="shm") == [[MIB], []]


def pretends_to_be_elsewhere(rank, world_size, directory):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update(GROUP_RANK=str(rank), GROUP_WORLD_SIZE="2")
    paceline.init("shm", f"file://{directory}/f", timeout=20)


def test_ranks_of_two_hosts_are_refused_on_both():
    for error in expect_errors(2, pretends_to_be_elsewhere, join=False):
        assert "rank 1 runs on another host (node 1) than rank 0 (node 0)" in error
        assert "Use the backend 'hier'" in error
