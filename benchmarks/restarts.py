"""Whether training comes back when a rank is killed, and how soon: 200 kills in the middle of a step, for each backend.

    OMP_NUM_THREADS=1 python benchmarks/restarts.py [--kills 200] [--kills-per-launch 10] [--backends gloo shm]
    OMP_NUM_THREADS=1 python benchmarks/restarts.py --torchrun --kills 20 --kills-per-launch 1

Two ranks train a small MLP. In each life a rank drawn by chance gets SIGKILL half way through the backward of a step
drawn by chance, and the launcher starts all again. A kill counts as *come back* when both ranks of the next life have
completed a step. Times are medians over those:

- *back*: from the kill to the first step that both ranks of the next life have completed;
- *script*: what of that is the script's own, from its first line to that step;
- *python*: ``python script.py`` as one process, from the command to its first step, run in turns with the launches.

With ``--torchrun`` the same under torchrun, with torch's DistributedDataParallel over Gloo.

Last result (2 cores of an AMD EPYC, Linux 6.18, Python 3.11, torch 2.13 CPU, idle but for this):

            came back     back    worst   script   python
    gloo   200 of 200    0.32s    0.43s    0.05s    1.99s
    shm    200 of 200    0.31s    0.38s    0.05s    1.99s

With a load of 10 beside it, and 20 kills a launch:

            came back     back    worst   script   python
    gloo   200 of 200    1.37s    4.92s    0.35s    9.89s
    shm    200 of 200    1.21s    5.63s    0.32s    9.89s
"""

import argparse
import contextlib
import json
import os
import pathlib
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

SCRIPT = """
import json, os, pathlib, random, signal, sys, time

born_s = time.monotonic()

import torch
import torch.distributed as dist
from torch import nn

whose, backend, num_kills, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
rank, life = (int(os.environ.get(name, 0)) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
notes = os.open(pathlib.Path(__file__).with_name("notes"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def note(event, at_s):
    os.write(notes, json.dumps({"event": event, "life": life, "rank": rank, "at_s": at_s}).encode() + b"\\n")

def die(grad):
    note("killed", time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)

model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
if whose == "paceline":
    import paceline

    paceline.init(backend, device="cpu")
    model = paceline.DistributedDataParallel(model)
elif "RANK" in os.environ:
    dist.init_process_group(backend)
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
chance = random.Random(f"{seed} {life}")
victim, last_step = chance.randrange(2), chance.randrange(1, 20)
for step in range(last_step + 1):
    if step == last_step and rank == victim and life < num_kills:
        list(model.parameters())[8].register_hook(die)
    optimizer.zero_grad()
    model(torch.randn(32, 256)).square().mean().backward()
    optimizer.step()
    if step == 0:
        note("born", born_s)
        note("stepped", time.monotonic())
if dist.is_initialized():
    dist.destroy_process_group()
"""
NUM_RANKS = 2
LAUNCH_TIMEOUT_S = 60.0  # and as much again for each kill


@dataclass
class Outcome:
    """What became of the kills over one backend."""

    num_kills: int = 0
    num_back: int = 0
    back_s: list[float] = field(default_factory=list)
    script_s: list[float] = field(default_factory=list)


def launch(command: list[str], whose: str, backend: str, num_kills: int, seed: int, outcome: Outcome) -> None:
    """Run one launch in which ranks are killed ``num_kills`` times, and add what came of it."""
    options = ["--nproc-per-node", str(NUM_RANKS), "--max-restarts", str(num_kills)]
    with script() as path:
        arguments = [whose, backend, str(num_kills), str(seed)]
        run([*command, *options, path, *arguments], LAUNCH_TIMEOUT_S * (1 + num_kills))
        notes = read_notes(path)
    outcome.num_kills += num_kills  # those that never came to pass, too: the launch should have lived to see them
    for life in range(num_kills):
        killed = times(notes, "killed", life)
        stepped = times(notes, "stepped", life + 1)
        if len(killed) == 1 and len(stepped) == NUM_RANKS:
            outcome.num_back += 1
            outcome.back_s.append(max(stepped) - killed[0])
            outcome.script_s.append(max(stepped) - min(times(notes, "born", life + 1)))


def own_start_s(whose: str) -> float:
    """How long the script takes by itself, as one process, up to its first step."""
    with script() as path:
        start_s = time.monotonic()
        run([sys.executable, path, whose, "gloo", "0", "0"], LAUNCH_TIMEOUT_S)
        (stepped_s,) = times(read_notes(path), "stepped", 0)
    return stepped_s - start_s


@contextlib.contextmanager
def script() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "train.py"
        path.write_text(SCRIPT)
        yield str(path)


def run(command: list[str], timeout_s: float) -> None:
    """To its end. One that hangs is ended, with all that it has started."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LAUNCH_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_notes(path: str) -> list[dict[str, Any]]:
    notes = pathlib.Path(path).with_name("notes")
    return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []


def times(notes: list[dict[str, Any]], event: str, life: int) -> list[float]:
    return [note["at_s"] for note in notes if (note["event"], note["life"]) == (event, life)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="for each backend")
    parser.add_argument("--kills-per-launch", type=int, default=10)
    parser.add_argument("--backends", nargs="+", default=None)
    parser.add_argument("--torchrun", action="store_true")
    options = parser.parse_args()
    whose = "torch" if options.torchrun else "paceline"
    launcher = ["torch.distributed.run", "--standalone"] if options.torchrun else ["paceline", "run"]
    backends = options.backends or (["gloo"] if options.torchrun else ["gloo", "shm"])
    outcomes = {backend: Outcome() for backend in backends}
    python_s = []
    for seed in range(options.kills // options.kills_per_launch):
        for backend, outcome in outcomes.items():
            launch([sys.executable, "-m", *launcher], whose, backend, options.kills_per_launch, seed, outcome)
        python_s.append(own_start_s(whose))
    load = " ".join(f"{load:.1f}" for load in os.getloadavg())
    print(f"{' '.join(launcher)}, {len(os.sched_getaffinity(0))} cores, {platform.machine()}, load {load} at the end")
    print(f"{'':8} {'came back':>12} {'back':>8} {'worst':>8} {'script':>8} {'python':>8}")
    for backend, outcome in outcomes.items():
        came_back = f"{outcome.num_back} of {outcome.num_kills}"
        figures = [outcome.back_s, outcome.back_s, outcome.script_s, python_s]
        kinds = [statistics.median, max, statistics.median, statistics.median]
        shown = [
            f"{kind(values):7.2f}s" if values else f"{'-':>8}" for kind, values in zip(kinds, figures, strict=True)
        ]
        print(f"{backend:8} {came_back:>12} {' '.join(shown)}")


if __name__ == "__main__":
    main()
