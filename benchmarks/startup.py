"""How long a launch takes, and how much memory it holds: 8 ranks that meet over Gloo, reduce one number and wait.

    python benchmarks/startup.py [--ranks 8] [--rounds 5]

Runs ``torchrun`` and ``paceline run`` in turns, so that both see the same machine, and prints the medians. *reduced* is
when the last rank has the sum, *ended* when the command has, without the pause in which memory is read; both count from
the command. Memory is that of all processes of the launch while the ranks wait, a page that several share counted once.

The last result, with its machine, is in docs/performance.md.
"""

import argparse
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import psutil

SCRIPT = """
import os, pathlib, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
reduced_s = time.monotonic()
assert total.item() == dist.get_world_size()
here = pathlib.Path(__file__).parent
part = here / f"part{os.environ['RANK']}"
part.write_text(str(reduced_s))
part.rename(here / f"reduced{os.environ['RANK']}")
while not (here / "go_on").exists():
    time.sleep(0.02)
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Launch:
    """What one launch took."""

    reduced_s: float
    ended_s: float
    memory_bytes: int


def measure(command: list[str], num_ranks: int) -> Launch:
    with tempfile.TemporaryDirectory() as folder:
        here = pathlib.Path(folder)
        script = here / "one_reduction.py"
        script.write_text(SCRIPT)
        start_s = time.monotonic()
        launcher = subprocess.Popen(
            [*command, "--nproc-per-node", str(num_ranks), str(script)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while len(notes := list(here.glob("reduced*"))) < num_ranks:
            if launcher.poll() is not None:
                sys.exit(f"{command} ended with {launcher.returncode} before its ranks had met")
            time.sleep(0.01)
        reduced_s = max(float(note.read_text()) for note in notes)
        waiting_s = time.monotonic()
        root = psutil.Process(launcher.pid)
        memory_bytes = sum(process.memory_full_info().pss for process in [root, *root.children(recursive=True)])
        pause_s = time.monotonic() - waiting_s
        (here / "go_on").touch()
        if launcher.wait() != 0:
            sys.exit(f"{command} ended with {launcher.returncode}")
        return Launch(reduced_s - start_s, time.monotonic() - start_s - pause_s, memory_bytes)


def seconds_to_import_torch() -> float:
    start_s = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    commands = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        "paceline run": [sys.executable, "-m", "paceline", "run"],
    }
    launches: dict[str, list[Launch]] = {name: [] for name in commands}
    imports_s = []
    for _ in range(options.rounds):
        for name, command in commands.items():
            launches[name].append(measure(command, options.ranks))
        imports_s.append(seconds_to_import_torch())
    print(f"{options.ranks} ranks, {options.rounds} rounds, {len(os.sched_getaffinity(0))} cores, {platform.machine()}")
    print(f"{'':20} {'reduced':>8} {'best':>8} {'worst':>8} {'ended':>8} {'memory':>10}")
    medians = {}
    for name, taken in launches.items():
        reduced_s = [launch.reduced_s for launch in taken]
        medians[name] = Launch(
            statistics.median(reduced_s),
            statistics.median(launch.ended_s for launch in taken),
            int(statistics.median(launch.memory_bytes for launch in taken)),
        )
        print(
            f"{name:20} {medians[name].reduced_s:7.2f}s {min(reduced_s):7.2f}s {max(reduced_s):7.2f}s "
            f"{medians[name].ended_s:7.2f}s {medians[name].memory_bytes / 2**20:6.0f} MiB"
        )
    print(
        f"{'import torch, once':20} {statistics.median(imports_s):7.2f}s {min(imports_s):7.2f}s {max(imports_s):7.2f}s"
    )
    theirs, ours = medians["torchrun"], medians["paceline run"]
    print(
        f"paceline run reduces {theirs.reduced_s / ours.reduced_s:.1f} times as soon, "
        f"in {ours.memory_bytes / theirs.memory_bytes:.0%} of the memory"
    )


if __name__ == "__main__":
    main()
