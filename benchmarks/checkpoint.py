"""For how long a checkpoint stops training: written before going on, and beside it.

    python benchmarks/checkpoint.py [--mib 1024] [--rounds 5] [--directory .]

One process, a state of tensors of 4 MiB. *stop* is how long ``Checkpointer.save`` takes to return, *written* how long
until the checkpoint is durable. The first asynchronous one also makes the memory that the copies are kept in, so it is
given by itself. torch.save, which makes nothing durable and has no checksum, is beside them.

Last result (2 cores of an AMD EPYC, Linux 6.18, Python 3.11, torch 2.13 CPU, idle but for this):

                                  stop     worst   written
    torch.save                  0.979s    2.670s    0.979s
    synchronous                 3.080s    6.426s    3.080s
    asynchronous, the first     0.630s    0.630s    4.251s
    asynchronous                0.116s    0.174s    1.728s
    an asynchronous one stops training for 3.8% of the time of a synchronous one
"""

import argparse
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch

import paceline


class Tensors:
    """A state of so many MiB."""

    def __init__(self, mib: int) -> None:
        self.state = {str(number): torch.randn(1 << 20) for number in range(mib // 4)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.state = state


def times(checkpoints: paceline.Checkpointer) -> tuple[float, float]:
    """How long training stops for a checkpoint, and how long until it is written, in seconds."""
    start = time.perf_counter()
    checkpoints.num_steps += 1
    checkpoints.save()
    stopped_s = time.perf_counter() - start
    checkpoints.wait()
    return stopped_s, time.perf_counter() - start


def line(name: str, found: list[tuple[float, float]]) -> str:
    stops, written = zip(*found, strict=True)
    return f"{name:24} {statistics.median(stops):8.3f}s {max(stops):8.3f}s {statistics.median(written):8.3f}s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=".")
    options = parser.parse_args()
    state = Tensors(options.mib)
    torchs, now, beside = [], [], []
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        synchronous = paceline.Checkpointer(Path(folder, "sync"), every=1, keep=1, async_=False, state=state)
        asynchronous = paceline.Checkpointer(Path(folder, "async"), every=1, keep=1, state=state)
        first = [times(asynchronous)]
        for _ in range(options.rounds):
            start = time.perf_counter()
            torch.save(state.state_dict(), Path(folder, "torch.pt"))
            torchs.append((time.perf_counter() - start,) * 2)
            now.append(times(synchronous))
            beside.append(times(asynchronous))
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"{options.mib} MiB, {options.rounds} rounds, {cores} cores, {platform.machine()}, load {load:.1f}")
    print(f"{'':24} {'stop':>9} {'worst':>9} {'written':>9}")
    print(line("torch.save", torchs))
    print(line("synchronous", now))
    print(line("asynchronous, the first", first))
    print(line("asynchronous", beside))
    share = statistics.median(stop for stop, _ in beside) / statistics.median(stop for stop, _ in now)
    print(f"an asynchronous one stops training for {share:.1%} of the time of a synchronous one")


if __name__ == "__main__":
    main()
