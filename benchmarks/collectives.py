"""One collective on ordinary float32 tensors in memory, over several backends in turns.

    OMP_NUM_THREADS=1 paceline run -n 2 benchmarks/collectives.py [--backends gloo shm] [--rounds 30] [--load 2]

The backends take turns within each round, so that all see the same machine. A round starts at a barrier, calls the
collective 4 to 20 times on end (a barrier's own end is no sharper than a small message), and is over when the slowest
rank is. Medians over the rounds; a ratio is the median of each round's own. A size is that of each rank's tensor, which
broadcast sends, all_gather contributes and reduce_scatter splits; 1 MB is 10^6 bytes.

``--load N`` keeps N processes computing beside the ranks: what a backend costs where cores are short.

The last result, with its machine, is in docs/performance.md.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

import paceline

SIZES = {
    "4 kB": 4_000,
    "64 kB": 64_000,
    "256 kB": 256_000,
    "1 MB": 1_000_000,
    "8 MB": 8_000_000,
    "25 MB": 25_000_000,
    "32 MB": 32_000_000,
}
WARM_UP_ROUNDS = 3


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    return lambda: dist.all_reduce(x, group=group)


def broadcast(x: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    return lambda: dist.broadcast(x, 0, group=group)


def all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    out = torch.full((group.size() * x.numel(),), 0.0)
    return lambda: dist.all_gather_single(out, x, group=group)


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    out = torch.full((x.numel() // group.size(),), 0.0)
    whole = x[: out.numel() * group.size()]
    return lambda: dist.reduce_scatter_single(out, whole, group=group)


OPS = {op.__name__: op for op in (all_reduce, broadcast, all_gather, reduce_scatter)}


def take_turns(calls: dict[str, Callable[[], object]], rounds: int, repeats: int = 1) -> dict[str, list[float]]:
    """Seconds of each call, by round: from a barrier to the end of the slowest rank's, divided by ``repeats``."""
    times = torch.zeros(WARM_UP_ROUNDS + rounds, len(calls), dtype=torch.float64)
    for number in range(len(times)):
        for position, call in enumerate(calls.values()):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            times[number, position] = (time.perf_counter() - start) / repeats
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return dict(zip(calls, times[WARM_UP_ROUNDS:].T.tolist(), strict=True))


def ratio(these: list[float], those: list[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """``count`` processes that compute until the block is over, or until this process is gone."""
    # They leave Ctrl-C to this process.
    source = f"""
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
while os.getppid() == {os.getpid()}:
    sum(range(100_000))
"""
    burners = [subprocess.Popen([sys.executable, "-c", source]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["gloo", "shm"])
    parser.add_argument("--op", choices=OPS, default="all_reduce")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--load", type=int, default=0, metavar="N", help="busy processes beside the ranks")
    options = parser.parse_args()
    first, *others = options.backends
    with paceline.init("gloo", device="cpu") as world, busy_cores(options.load if world.is_main else 0):
        world.print(f"{options.op}, {world.world_size} ranks, {options.load} busy processes, torch {torch.__version__}")
        heads = [*options.backends, *(f"{first} / {other}" for other in others)]
        world.print(f"{'ms':10}{''.join(f'{head:>14}' for head in heads)}")
        groups = {backend: dist.new_group(backend=backend) for backend in options.backends}
        for name, size_bytes in SIZES.items():
            # Zeros, written so that they are real pages: they stay what they are, however often they are summed.
            x = torch.full((size_bytes // 4,), 0.0)
            calls = {backend: OPS[options.op](x, group) for backend, group in groups.items()}
            times = take_turns(calls, options.rounds, repeats=max(4, min(20, 20_000_000 // size_bytes)))
            medians = [f"{statistics.median(times[backend]) * 1e3:14.3f}" for backend in options.backends]
            ratios = [f"{ratio(times[first], times[other]):14.1f}" for other in others]
            world.print(f"{name:10}{''.join(medians + ratios)}", flush=True)


if __name__ == "__main__":
    main()
