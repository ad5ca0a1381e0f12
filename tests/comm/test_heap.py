"""Tensors in shared memory: where they lie, and when their memory is free again."""

import os
import pathlib

import torch
import torch.distributed as dist

from support.ranks import run_ranks


def averages():
    return dist.distributed_c10d._get_default_group().averages()


def allocates(world):
    heap = averages()
    first, second = heap.allocate(1000, torch.float32), heap.allocate(5, torch.float64)
    start = first.start
    first.tensor.fill_(world.rank + 1.0)
    view = first.tensor[10:20]
    del first
    third = heap.allocate(1000, torch.float32)  # the view keeps the first one's memory
    kept = view.tolist()
    del view
    fourth = heap.allocate(1000, torch.float32)
    return start % 4096, second.start - start, third.start - start, fourth.start - start, kept, float(fourth.tensor[0])


def test_memory_is_given_out_again_when_the_last_view_of_it_is_gone():
    for rank, found in enumerate(run_ranks(2, allocates, backend="shm")):
        assert found == (0, 4096, 8192, 0, [rank + 1.0] * 10, 0.0)  # what went back to the kernel reads as zeros


def resident_mib():
    for line in pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Shmem:"):
            return int(line.split()[1]) // 1024
    return None


def allocates_and_frees(world):
    before = resident_mib()
    shared = averages().allocate(16 << 20, torch.float32)
    shared.tensor.fill_(1.0)
    world.barrier()
    full = resident_mib()
    del shared
    averages().allocate(1, torch.float32)  # when the next is asked for, what has died goes back
    world.barrier()
    return full - before, resident_mib() - before


def test_freed_memory_goes_back_to_the_kernel():
    for grown, left in run_ranks(2, allocates_and_frees, backend="shm"):
        assert grown >= 60
        assert left <= 8


def keeps_a_tensor(world):
    shared = averages().allocate(1000, torch.float32)
    shared.tensor.fill_(7.0)
    dist.destroy_process_group()
    return float(shared.tensor.sum()), os.getpid() > 0


def test_a_tensor_outlives_its_group():
    assert run_ranks(2, keeps_a_tensor, backend="shm") == [(7000.0, True)] * 2
