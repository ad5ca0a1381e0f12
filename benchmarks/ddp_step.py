"""A whole training step under DistributedDataParallel: paceline's, torch's, and none.

    OMP_NUM_THREADS=1 paceline run -n 2 benchmarks/ddp_step.py [--backend shm] [--torch-over shm] [--rounds 40]
    OMP_NUM_THREADS=1 python benchmarks/ddp_step.py --memory

A step is zero_grad, forward, backward and SGD's step. "bare" is the same step with no communication at all, on all
ranks at once. "torch" is torch's DDP over Gloo, with ``gradient_as_bucket_view=True``, which is its leanest; "paceline"
is paceline's over ``--backend`` (shm where it is known, else gloo). With ``--backend gloo`` gradients still go through
shared memory, as they do for a script that asks for Gloo; with PACELINE_SHARED_MEMORY=0 too, they go over Gloo.

Time: the contenders take turns within each round, so that all see the same machine. A step starts at a barrier and is
over when the slowest rank's is. Medians over the rounds; a ratio is the median of each round's own, and the last line
is the geometric mean over the models.

Memory: each contender in fresh ranks of its own, since a process seldom gives back what it had. What is counted is the
growth since before the model was built, mean over the ranks. RSS and PSS are what stays at the end of a step, gradients
included; "peak" is the highest RSS in steps 6 to 10, activations included; "first peak" that in construction and the
first five, when buckets are rearranged. RSS counts a page of shared memory fully in each rank that has touched it; PSS
divides it by their number, so that the PSS of all ranks adds up to what the machine has given. Beside each model's name
its parameters' own size.

The last result, with its machine, is in docs/performance.md.
"""

import argparse
import copy
import ctypes
import functools
import json
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from collectives import ratio, take_turns
from torch import nn

import paceline
from paceline.bench.models import GPT, mnist_net


def mnist() -> tuple[nn.Module, torch.Tensor]:
    return mnist_net(), torch.randn(32, 1, 28, 28)


def mlp() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6))), torch.randn(64, 1024)


def gpt() -> tuple[nn.Module, torch.Tensor]:
    return GPT(), torch.randint(256, (2, 128))


def small_layers() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Linear(32, 32) for _ in range(200)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)  # so deep, gradients would vanish into denormal numbers, which are slow
    return nn.Sequential(*layers), torch.randn(16, 32)


MODELS = {"MNIST net": mnist, "MLP 6 x 1024": mlp, "GPT 6 x 384": gpt, "200 small layers": small_layers}


@functools.cache
def group_over(backend: str) -> dist.ProcessGroup:
    return dist.new_group(backend=backend)


def torch_over(backend: str, model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, process_group=group_over(backend), gradient_as_bucket_view=True)


def paceline_over(backend: str, model: nn.Module) -> nn.Module:
    return paceline.DistributedDataParallel(model, process_group=group_over(backend))


def contenders(options: argparse.Namespace) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """What each wraps a model in; wrapping is a collective call."""
    wrap: dict[str, Callable[[nn.Module], nn.Module]] = {"bare": lambda model: model}
    wrap["torch"] = functools.partial(torch_over, "gloo")
    if options.torch_over:
        wrap[f"torch, {options.torch_over}"] = functools.partial(torch_over, options.torch_over)
    return wrap | {"paceline": functools.partial(paceline_over, options.backend)}


def step_of(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """A training step; it leaves its gradients for the next one to drop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()

    return step


def measure_times(options: argparse.Namespace) -> None:
    with paceline.init("gloo", device="cpu") as world:
        wraps = contenders(options)
        world.print(f"{world.world_size} ranks, paceline over {options.backend}, torch {torch.__version__}")
        heads = "".join(f"{name:>14}" for name in wraps)
        world.print(f"{'ms':18}{heads}{'paceline / bare':>18}{'paceline / torch':>18}")
        ratios = []
        for name, build in MODELS.items():
            model, x = build()
            steps = {kind: step_of(wrap(copy.deepcopy(model)), x) for kind, wrap in wraps.items()}
            times = take_turns(steps, options.rounds)
            medians = "".join(f"{statistics.median(values) * 1e3:14.1f}" for values in times.values())
            ratios.append([ratio(times["paceline"], times[other]) for other in ("bare", "torch")])
            world.print(f"{name:18}{medians}{ratios[-1][0]:18.2f}{ratios[-1][1]:18.2f}", flush=True)
        means = [statistics.geometric_mean(column) for column in zip(*ratios, strict=True)]
        world.print(f"{'geometric mean':{18 + 14 * len(wraps)}}{means[0]:18.2f}{means[1]:18.2f}")


def memory_mib() -> dict[str, float]:
    """RSS and PSS of this process, and its highest RSS since ``forget_peak``."""
    rollup = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in (*rollup, *status) if line.endswith(" kB")}
    return {"RSS": kib["Rss"] / 1024, "PSS": kib["Pss"] / 1024, "peak": kib["VmHWM"] / 1024}


def forget_peak() -> None:
    """Give back what is free, which the C library keeps for later, and let the peak start anew."""
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def measure_memory_of(options: argparse.Namespace) -> None:
    """In the ranks of one contender: print, on rank 0, how memory grew with one model, in MiB."""
    with paceline.init("gloo", device="cpu") as world:
        wrap = contenders(options)[options.contender]
        _ = paceline.DistributedDataParallel  # loads its module
        step_of(nn.Linear(1, 1), torch.ones(1, 1))()  # loads what an optimizer loads
        forget_peak()
        before = memory_mib()
        dist.barrier()
        model, x = MODELS[options.model]()
        step = step_of(wrap(model), x)
        for _ in range(5):
            step()
        first_peak = memory_mib()["peak"]
        forget_peak()
        for _ in range(5):
            step()
        peak = memory_mib()["peak"]
        forget_peak()
        dist.barrier()  # around the count: all ranks hold what they share while one looks
        after = memory_mib() | {"peak": peak, "first peak": first_peak}
        dist.barrier()
        grown = torch.tensor([after[kind] - before[kind.split()[-1]] for kind in after], dtype=torch.float64)
        dist.all_reduce(grown)
        world.print(json.dumps(dict(zip(after, (grown / world.world_size).tolist(), strict=True))))


def measure_memory(options: argparse.Namespace) -> None:
    """Start ranks for each model and contender, and print what they report."""
    kinds = ("RSS", "PSS", "peak", "first peak")
    print(f"{'MiB a rank':34}{''.join(f'{kind:>12}' for kind in kinds)}")
    for name, build in MODELS.items():
        size_mib = sum(p.numel() * p.element_size() for p in build()[0].parameters()) / 2**20
        for contender in contenders(options):
            command = [sys.executable, "-m", "paceline", "run", "-n", "2", __file__, *sys.argv[1:]]
            grown = json.loads(
                subprocess.check_output([*command, "--model", name, "--contender", contender], text=True)
            )
            label = f"{name} ({size_mib:.1f})" if contender == "bare" else ""
            print(f"{label:24}{contender:10}{''.join(f'{grown[kind]:12.1f}' for kind in kinds)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = "shm" if "shm" in dist.Backend.backend_list else "gloo"
    parser.add_argument("--backend", default=known, help="what paceline's DDP talks over")
    parser.add_argument("--torch-over", metavar="BACKEND", help="torch's DDP over this backend too")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--memory", action="store_true", help="memory instead of time; without `paceline run`")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        measure_memory_of(options)
    elif options.memory:
        measure_memory(options)
    else:
        measure_times(options)


if __name__ == "__main__":
    main()
