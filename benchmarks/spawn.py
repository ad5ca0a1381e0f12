"""How long it takes to spawn ranks from a script: 8 that meet over Gloo, reduce one number and end.

    OMP_NUM_THREADS=1 python benchmarks/spawn.py [--ranks 8] [--rounds 5]

Runs ``torch.multiprocessing.spawn`` and ``paceline.spawn`` in turns, each in a fresh interpreter that has imported
torch, and prints the medians. *again* is a second call in the same process, which finds the fork server warm.

Last result (2 cores of an AMD EPYC, Linux 6.18, Python 3.11, torch 2.13 CPU, 5 rounds, other programs running):

                           median     best    worst    again
    torch, spawn            9.40s    8.61s   12.95s   10.44s
    torch, forkserver       7.17s    5.94s   12.08s    6.98s
    paceline, spawn         9.11s    8.23s   10.86s    9.08s
    paceline, forkserver    1.79s    1.58s    2.43s    0.23s
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist

def reduce_one_number(rank, world_size, folder):
    dist.init_process_group("gloo", f"file://{folder}", rank=rank, world_size=world_size)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world_size
    dist.destroy_process_group()

if __name__ == "__main__":
    package, method, num_ranks, folder = sys.argv[1:]
    if package == "torch":
        from torch.multiprocessing import start_processes as spawn
    else:
        from paceline import spawn
    for call in range(2):
        start = time.perf_counter()
        spawn(reduce_one_number, (int(num_ranks), f"{folder}/{call}"), int(num_ranks), start_method=method)
        print(time.perf_counter() - start)
"""
CALLS = {
    "torch, spawn": ("torch", "spawn"),
    "torch, forkserver": ("torch", "forkserver"),
    "paceline, spawn": ("paceline", "spawn"),
    "paceline, forkserver": ("paceline", "forkserver"),
}


def seconds(script: str, call: tuple[str, str], num_ranks: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, script, *call, str(num_ranks), folder]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return [float(line) for line in done.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    taken: dict[str, list[list[float]]] = {name: [] for name in CALLS}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "one_reduction.py"
        script.write_text(SCRIPT)
        for _ in range(options.rounds):
            for name, call in CALLS.items():
                taken[name].append(seconds(str(script), call, options.ranks))
    print(f"{options.ranks} ranks, {options.rounds} rounds, {len(os.sched_getaffinity(0))} cores, {platform.machine()}")
    print(f"{'':20} {'median':>8} {'best':>8} {'worst':>8} {'again':>8}")
    for name, times in taken.items():
        first, again = ([calls[i] for calls in times] for i in range(2))
        print(
            f"{name:20} {statistics.median(first):7.2f}s {min(first):7.2f}s {max(first):7.2f}s "
            f"{statistics.median(again):7.2f}s"
        )


if __name__ == "__main__":
    main()
