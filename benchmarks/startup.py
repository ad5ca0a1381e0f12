"""How long a launch takes: 8 ranks that meet over Gloo, reduce one number and end.

    python benchmarks/startup.py [--ranks 8] [--rounds 5]

Runs ``torchrun`` and ``paceline run`` in turns, so that both see the same machine, and prints the medians.

Last result (2 cores of an AMD EPYC, Linux 6.18, Python 3.11, torch 2.13 CPU, 5 rounds):

                           median     best    worst
    torchrun               11.09s   10.77s   13.03s
    paceline run            2.10s    1.86s    2.28s
    import torch, once      1.81s    1.74s    1.99s
    paceline run is 5.3 times as fast
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size()
dist.destroy_process_group()
"""


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "one_reduction.py"
        script.write_text(SCRIPT)
        tail = ["--nproc-per-node", str(options.ranks), str(script)]
        commands = {
            "torchrun": [sys.executable, "-m", "torch.distributed.run", *tail],
            "paceline run": [sys.executable, "-m", "paceline", "run", *tail],
            "import torch, once": [sys.executable, "-c", "import torch"],
        }
        taken: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(options.rounds):
            for name, command in commands.items():
                taken[name].append(seconds(command))
    print(f"{options.ranks} ranks, {options.rounds} rounds, {len(os.sched_getaffinity(0))} cores, {platform.machine()}")
    print(f"{'':20} {'median':>8} {'best':>8} {'worst':>8}")
    for name, times in taken.items():
        print(f"{name:20} {statistics.median(times):7.2f}s {min(times):7.2f}s {max(times):7.2f}s")
    ratio = statistics.median(taken["torchrun"]) / statistics.median(taken["paceline run"])
    print(f"paceline run is {ratio:.1f} times as fast")


if __name__ == "__main__":
    main()
