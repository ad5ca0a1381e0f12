"""What drift detection costs a training step, on the models of ddp_step.py.

    OMP_NUM_THREADS=1 paceline run -n 2 benchmarks/drift.py [--rounds 60]

Two steps, with and without it, differ by less than one step differs from the next. So its own time is taken within
steps, where the caches hold what the step has left in them: sampling the weights, and the digest of the samples.
The median of the steps, and the mean of what drift detection takes, since some rounds take more of it; on rank 0.

The last result, with its machine, is in docs/performance.md.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from ddp_step import MODELS, paceline_over, step_of

import paceline
from paceline.parallel.replicas.drift import DriftWatch

WARM_UP_ROUNDS = 10


class Stopwatch:
    """Adds up the seconds that some methods take."""

    def __init__(self) -> None:
        self.total_s = 0.0

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args)
            finally:
                self.total_s += time.perf_counter() - start

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=64)
    options = parser.parse_args()
    watch = Stopwatch()
    for name in ("look", "digest"):
        setattr(DriftWatch, name, watch.around(getattr(DriftWatch, name)))
    with paceline.init("gloo", device="cpu") as world:
        world.print(f"{'':18}{'step, ms':>10}{'drift, ms':>11}{'share':>9}")
        for name, build in MODELS.items():
            model, x = build()
            step = step_of(paceline_over("shm", model), x)
            steps, drifts = [], []
            for _ in range(WARM_UP_ROUNDS + options.rounds):
                dist.barrier()
                watch.total_s, start = 0.0, time.perf_counter()
                step()
                steps.append((time.perf_counter() - start) * 1e3)
                drifts.append(watch.total_s * 1e3)
            step_ms, drift_ms = statistics.median(steps[WARM_UP_ROUNDS:]), statistics.mean(drifts[WARM_UP_ROUNDS:])
            world.print(f"{name:18}{step_ms:10.1f}{drift_ms:11.3f}{drift_ms / step_ms:9.2%}", flush=True)


if __name__ == "__main__":
    main()
