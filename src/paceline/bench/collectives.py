"""all_reduce over sizes, beside a copy of as many bytes: what memory allows.

The invariant: the backends and the copy take turns within each round, and a round is over when the slowest rank is.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.bench.joining import gather, joined
from paceline.bench.ranks import Tell
from paceline.bench.results import Collective
from paceline.bench.ways import PATIENCE, Setting

SIZES = (4_000, 32_000, 256_000, 1_000_000, 4_000_000, 16_000_000, 32_000_000)  # bytes
_WARM_UP_ROUNDS, _ROUNDS = 2, 10


@dataclass(frozen=True)
class Job:
    """Over which backends."""

    setting: Setting
    backends: tuple[str, ...]


def measure_collectives(rank: int, job: Job, tell: Tell) -> None:
    """Tell a ``Collective`` for each size and backend."""
    with joined(job.setting) as control:
        groups = {backend: dist.new_group(backend=backend, timeout=PATIENCE) for backend in job.backends}
        for size_bytes in SIZES:
            # Zeros, written so that they are real pages: they stay what they are, however often they are summed.
            x = torch.full((size_bytes // 4,), 0.0, device=job.setting.device)
            copy = torch.full_like(x, 0.0)
            calls: dict[str, Callable[[], object]] = {name: _all_reduce(x, group) for name, group in groups.items()}
            calls["copy"] = lambda to=copy, x=x: to.copy_(x)  # type: ignore[misc]
            # A barrier's own end is no sharper than a small message: several on end.
            medians = _medians(calls, control, max(4, min(20, 20_000_000 // size_bytes)), job.setting.device)
            for backend in job.backends if rank == 0 else ():
                copy_s = medians["copy"]
                tell(Collective(backend, job.setting.num_devices, size_bytes, medians[backend], copy_s))


def _all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    return lambda: dist.all_reduce(x, group=group)


def _medians(
    calls: dict[str, Callable[[], object]], control: dist.ProcessGroup, repeats: int, device: torch.device
) -> dict[str, float]:
    """Seconds of each call, on rank 0; empty on the others."""
    times: list[dict[str, float]] = []
    for _ in range(_WARM_UP_ROUNDS + _ROUNDS):
        seconds = {}
        for name, call in calls.items():
            dist.barrier(control)
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name] = (time.perf_counter() - start) / repeats
        times.append(seconds)
    of_ranks = gather(times, control)
    rounds = [
        {name: max(seconds[name] for seconds in of_round) for name in calls} for of_round in zip(*of_ranks, strict=True)
    ]
    return {name: statistics.median(seconds[name] for seconds in rounds[_WARM_UP_ROUNDS:]) for name in calls if rounds}
