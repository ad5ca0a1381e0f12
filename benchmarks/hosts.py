"""Two hosts of two ranks each, emulated on one machine: an all_reduce and a training step across a 1 Gbit/s network.

    sudo python benchmarks/hosts.py [--backends gloo hier] [--rounds 20] [--rate 1gbit]

The hosts are network namespaces; see tests/support/hosts.py. In the first table all ranks reduce 25 MB of float32, over
each backend in turns: of 25 MB each host must send 25 MB to the other, so the wire alone takes 200 ms at 1 Gbit/s. In
the second they train an MLP with 25 MB of gradients, under torch's DDP over the first backend and paceline's over each
of the others. Medians over the rounds; a ratio is the median of each round's own. All four ranks compute on this
machine's cores, so a step is slower than on two real hosts, and the network's part in it smaller.

The last result, with its machine, is in docs/performance.md.
"""

import argparse
import copy
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from collectives import all_reduce, ratio, take_turns
from ddp_step import group_over, mlp, paceline_over, step_of, torch_over

import paceline

# Hosts are emulated in one place only, for tests and for this.
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
from support.hosts import hosts, start_ranks, why_no_hosts

RANKS_PER_HOST = 2


def report(title: str, calls: dict[str, Callable[[], object]], rounds: int) -> None:
    """Measure, and print a line for each call on rank 0; ratios are of the first one."""
    times = take_turns(calls, rounds)
    if dist.get_rank() == 0:
        first = next(iter(times.values()))
        print(f"{title:28}{'ms':>10}{'times as fast':>16}")
        for name, values in times.items():
            print(f"{name:28}{statistics.median(values) * 1e3:10.1f}{ratio(first, values):16.2f}")
        print(flush=True)


def measure(backends: list[str], rounds: int) -> None:
    """What each rank does."""
    with paceline.init("gloo", device="cpu"):
        x = torch.full((25_000_000 // 4,), 0.0)
        report("all_reduce of 25 MB", {name: all_reduce(x, group_over(name)) for name in backends}, rounds)
        first, *others = backends
        model, samples = mlp()
        steps = {f"torch over {first}": step_of(torch_over(first, copy.deepcopy(model)), samples)}
        for name in others or [first]:
            steps[f"paceline over {name}"] = step_of(paceline_over(name, copy.deepcopy(model)), samples)
        report("MLP 6 x 1024, a step", steps, rounds)


def start(rate: str) -> int:
    """Start this script again as every rank; returns the first failure's exit status, or 0. None outlives this call."""
    with hosts(2, rate) as both:
        command = [sys.executable, __file__, *sys.argv[1:], "--rank"]
        ranks = start_ranks(both, RANKS_PER_HOST, command, stdout=None, stderr=None)
        while True:
            statuses = [rank.poll() for rank in ranks]
            if any(statuses) or None not in statuses:
                return next(filter(None, statuses), 0)
            time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [backend for backend in ("gloo", "hier") if backend in dist.Backend.backend_list]
    parser.add_argument("--backends", nargs="+", default=known)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rate", default="1gbit", help="of each host's cable, each way, in tc's spelling")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        measure(options.backends, options.rounds)
        return 0
    if reason := why_no_hosts():
        print(f"no hosts to measure on: {reason}", file=sys.stderr)
        return 1
    return start(options.rate)


if __name__ == "__main__":
    sys.exit(main())
