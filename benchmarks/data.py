"""Loading data: paceline's sampler and loader beside torch's.

    python benchmarks/data.py sampler     memory, time to the first index, and time per index; rank 0 of 8
    python benchmarks/data.py loader      samples per second of a loader, both kinds in turns

torch makes a list of all indices; paceline computes them one chunk at a time. torch's sampler is left out where its
list would take tens of gigabytes. Each line of the first table is a process of its own. `one by one` is a loop over
what follows the first index, `whole pass` is all of a pass from its very start, `in batches` is what
`Permutation.permute` takes for 2**20 positions; each for one index. The second table has both kinds in one process, in
turns: the medians, and the median of the ratios of rounds. `in lists` takes 64 indices at a time, as batch samplers do.

`loader`: the median of rounds, in each of which both kinds load one epoch, in changing order; rank 0 of 2. The digits
are a `TensorDataset`, which paceline reads a batch at a time. The memory-mapped set is read sample by sample by both.

Last result (2 cores of an AMD EPYC, Linux 6.18, Python 3.11, torch 2.13.0+cpu, OMP_NUM_THREADS=1, nothing beside it):

       samples             first index     memory  one by one  whole pass  in batches
       1000000  torch         48.54 ms     46 MiB       15 ns      403 ns           -
       1000000  paceline       0.16 ms      2 MiB       32 ns       33 ns        4 ns
       8000000  torch        461.42 ms    367 MiB       18 ns      480 ns           -
       8000000  paceline       0.24 ms      2 MiB       26 ns       26 ns        4 ns
     100000000  torch      10681.67 ms   4589 MiB       16 ns           -           -
     100000000  paceline       0.21 ms      2 MiB       30 ns           -        6 ns
    1000000000  paceline       0.15 ms      2 MiB       27 ns           -        4 ns
 1000000000000  paceline       0.19 ms      2 MiB       30 ns           -       12 ns

       samples                   torch  paceline   ratio
       1000000  one by one       42 ns     25 ns    0.60
       1000000  in lists         44 ns     27 ns    0.65
       8000000  one by one       50 ns     22 ns    0.45
       8000000  in lists         54 ns     26 ns    0.48

                                             torch        paceline   ratio
digits, no workers                     321,835 /s    1,802,529 /s    5.62
digits, 1 worker                        35,753 /s       42,078 /s    1.17
1 GB memory-mapped, no workers         275,610 /s      276,497 /s    1.00
1 GB memory-mapped, 1 worker            65,573 /s       62,923 /s    0.95
"""

import itertools
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import paceline
from paceline.data.permutation import Permutation

KINDS = {"torch": DistributedSampler, "paceline": paceline.DistributedSampler}
MEMORY_MAPPED_BYTES = 1 << 30
SAMPLE_FLOATS = 1024


def measure_sampler(kind: str, size: int) -> None:
    make = KINDS[kind]
    deque(make(range(10_000), num_replicas=8, rank=0), maxlen=0)  # imports and first-use costs
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    indices = iter(make(range(size), num_replicas=8, rank=0))
    next(indices)
    first_s = time.perf_counter() - start
    count = min(size // 8, 1_000_000) - 1
    start = time.perf_counter()
    for _ in itertools.islice(indices, count):
        pass
    loop_s = time.perf_counter() - start
    memory_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024
    batch_s = float("nan")
    if kind == "paceline":
        permutation, positions = Permutation(size, seed=0, epoch=1), np.arange(1 << 20) % size
        batch_s = min(seconds(lambda: permutation.permute(positions)) for _ in range(5)) / (1 << 20)
    whole_s = first_s + loop_s if count + 1 == size // 8 else float("nan")
    print(json.dumps([first_s * 1e3, memory_mib, loop_s / count * 1e9, whole_s / (count + 1) * 1e9, batch_s * 1e9]))


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare_samplers() -> None:
    columns = "".join(f"{name:>12}" for name in ("one by one", "whole pass", "in batches"))
    print(f"{'samples':>14}  {'':8}{'first index':>14}{'memory':>11}{columns}")
    for size in (10**6, 8 * 10**6, 10**8, 10**9, 10**12):
        for kind in KINDS:
            if kind == "torch" and size > 10**8:
                continue
            command = [sys.executable, __file__, "one", kind, str(size)]
            found = json.loads(subprocess.check_output(command, text=True))
            times = "".join(f"{'-' if value != value else f'{value:.0f} ns':>12}" for value in found[2:])
            print(f"{size:14}  {kind:8}{found[0]:11.2f} ms{found[1]:7.0f} MiB{times}")


def compare_indices(num_rounds: int) -> None:
    """One by one, interleaved: what disturbs one kind disturbs the other."""
    print(f"\n{'samples':>14}  {'':12}{'torch':>10}{'paceline':>10}{'ratio':>8}")
    for size in (10**6, 8 * 10**6):
        samplers: dict[str, Any] = {kind: make(range(size), num_replicas=8, rank=0) for kind, make in KINDS.items()}
        for name, take in (("one by one", one_by_one), ("in lists", in_lists)):
            times: dict[str, list[float]] = {kind: [] for kind in samplers}
            for number in range(num_rounds):
                for kind in sorted(samplers, reverse=number % 2 == 0):
                    samplers[kind].set_epoch(number)
                    indices = iter(samplers[kind])
                    next(indices)
                    times[kind].append(
                        seconds(lambda take=take, indices=indices: take(indices)) / (size // 8 - 1) * 1e9
                    )
            ratio = statistics.median(b / a for a, b in zip(times["torch"], times["paceline"], strict=True))
            medians = "".join(f"{statistics.median(found):7.0f} ns" for found in times.values())
            print(f"{size:14}  {name:12}{medians}{ratio:8.2f}")


def one_by_one(indices: Iterable[int]) -> None:
    for _ in indices:
        pass


def in_lists(indices: Iterator[int]) -> None:
    while [*itertools.islice(indices, 64)]:
        pass


class MemoryMapped(Dataset[torch.Tensor]):
    """Rows of a file, read when they are asked for."""

    def __init__(self, path: str) -> None:
        self.rows = np.memmap(path, np.float32, "r").reshape(-1, SAMPLE_FLOATS)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.array(self.rows[index]))


def compare_loaders(num_rounds: int) -> None:
    from sklearn.datasets import load_digits

    source = load_digits()
    digits = TensorDataset(torch.tensor(source.images, dtype=torch.float32), torch.tensor(source.target))
    print(f"{'':34}{'torch':>16}{'paceline':>16}{'ratio':>8}")
    with tempfile.NamedTemporaryFile(dir=pathlib.Path(__file__).parent) as file:
        write_samples(file.name)
        for name, dataset, batch_size, num_workers, num_epochs in (
            ("digits, no workers", digits, 48, 0, 40),
            ("digits, 1 worker", digits, 48, 1, 20),
            ("1 GB memory-mapped, no workers", MemoryMapped(file.name), 64, 0, 1),
            ("1 GB memory-mapped, 1 worker", MemoryMapped(file.name), 64, 1, 1),
        ):
            sampler = DistributedSampler(dataset, 2, 0)
            loaders: dict[str, Any] = {
                "torch": DataLoader(
                    dataset, batch_size, sampler=sampler, num_workers=num_workers, persistent_workers=num_workers > 0
                ),
                "paceline": paceline.DataLoader(
                    dataset,
                    batch_size,
                    shuffle=True,
                    num_replicas=2,
                    rank=0,
                    num_workers=num_workers,
                    persistent_workers=num_workers > 0,
                ),
            }
            times: dict[str, list[float]] = {kind: [] for kind in loaders}
            for number in range(num_rounds + 1):
                for kind in sorted(loaders, reverse=number % 2 == 0):
                    times[kind].append(load(loaders[kind], range(number * num_epochs, (number + 1) * num_epochs)))
            rates = {kind: num_epochs * len(sampler) / statistics.median(found[1:]) for kind, found in times.items()}
            ratio = statistics.median(a / b for a, b in zip(times["torch"][1:], times["paceline"][1:], strict=True))
            print(f"{name:34}{rates['torch']:12,.0f} /s{rates['paceline']:13,.0f} /s{ratio:8.2f}")


def load(loader: Any, epochs: Iterable[int]) -> float:
    """Seconds for some epochs, each in an order of its own."""
    start = time.perf_counter()
    for epoch in epochs:
        loader.sampler.set_epoch(epoch)
        deque(loader, maxlen=0)
    return time.perf_counter() - start


def write_samples(path: str) -> None:
    block = np.random.default_rng(0).random((1024, SAMPLE_FLOATS), np.float32)
    with open(path, "wb") as file:
        file.writelines(block.tobytes() for _ in range(MEMORY_MAPPED_BYTES // block.nbytes))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    what = sys.argv[1]
    if what == "one":
        measure_sampler(sys.argv[2], int(sys.argv[3]))
    elif what == "sampler":
        compare_samplers()
        compare_indices(int(sys.argv[2]) if len(sys.argv) > 2 else 9)
    else:
        compare_loaders(int(sys.argv[2]) if len(sys.argv) > 2 else 9)
