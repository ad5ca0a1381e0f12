"""The most memory that each device holds, in fresh ranks for each way, since a process seldom gives back what it had.

[Note: whose bytes] On GPUs torch's allocator is asked. On CPUs it is what a rank's process has grown by since before
its model was made: the highest RSS in five steps, after five others in which buckets find their places. A page that
ranks share is in the RSS of each; so what they share at the end of a step counts by its PSS there, divided by their
number. The replicas of a DataParallel share a process: of them the storages of tensors are counted, each replica's own.

The invariant: what Python, torch and the user's module take is not counted.
"""

import contextlib
import ctypes
import pathlib
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from paceline.bench.joining import gather, joined
from paceline.bench.ranks import Tell
from paceline.bench.recipe import Recipe
from paceline.bench.results import DATA_PARALLEL
from paceline.bench.steps import run_step
from paceline.bench.ways import Setting, Trainee, build
from paceline.parallel import DataParallel

_STEPS = 5


@dataclass(frozen=True)
class Job:
    """One way."""

    recipe: Recipe
    setting: Setting
    way: str


def measure_memory(_: int, job: Job, tell: Tell) -> None:
    """Tell the bytes of each device, in their order; nothing where this system does not say."""
    with joined(job.setting) as control:
        job.recipe.load()
        if job.way == DATA_PARALLEL:
            tell(_of_replicas(job))
        elif job.setting.device_type == "cuda":
            tell(tuple(gather(_of_allocator(job), control)))
        else:
            grown = gather(_of_process(job, control), control)
            tell(() if None in grown else tuple(grown))


def _of_replicas(job: Job) -> tuple[int, ...]:
    trainee = build(job.way, job.recipe, job.setting)
    assert isinstance(trainee.model, DataParallel)
    _run_steps(trainee)
    with trainee.model.measure_bytes() as peaks:
        _run_steps(trainee)
    return tuple(peaks.get(index, 0) for index in range(job.setting.num_devices))


def _of_allocator(job: Job) -> int:
    trainee = build(job.way, job.recipe, job.setting)
    _run_steps(trainee)
    torch.cuda.reset_peak_memory_stats()
    _run_steps(trainee)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _of_process(job: Job, control: dist.ProcessGroup) -> int | None:
    """[Note: whose bytes]"""
    _load_what_steps_need()
    try:
        _forget_peak()
        before = _kib_of_process()
        trainee = build(job.way, job.recipe, job.setting)
        _run_steps(trainee)
        _forget_peak()
        _run_steps(trainee)
        dist.barrier(control)  # all ranks hold what they share while one looks
        after = _kib_of_process()
        dist.barrier(control)
    except OSError:
        return None
    shared_by_others = after["Rss"] - after["Pss"]
    return (after["VmHWM"] - shared_by_others - before["Pss"]) * 1024


def _run_steps(trainee: Trainee) -> None:
    torch.set_num_threads(trainee.threads)
    for _ in range(_STEPS):
        run_step(trainee, time.perf_counter)


def _load_what_steps_need() -> None:
    """What torch sets up in its first step."""
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    net(torch.ones(1, 1)).sum().backward()
    optimizer.step()


def _forget_peak() -> None:
    """Give back what is free, which the C library keeps for later, and let the peak start anew."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def _kib_of_process() -> dict[str, int]:
    rollup = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) for line in (*rollup, *status) if line.endswith(" kB")}
