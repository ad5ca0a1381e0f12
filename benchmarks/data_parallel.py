"""DataParallel on CPU replicas: how many bytes each holds, and its step beside DistributedDataParallel's.

    OMP_NUM_THREADS=1 python benchmarks/data_parallel.py --bytes [--replicas 4]
    OMP_NUM_THREADS=1 paceline run -n 2 benchmarks/data_parallel.py [--rounds 40]

Bytes: the most that each replica holds within a step, by ``DataParallel.measure_bytes``: parameters, gradients,
activations, outputs and loss. "gathered" is ``criterion(model(x), y).backward()``, "balanced" ``forward_backward``. The
model has as many classes as a language model has words, so that its outputs are large.

Time: a step of the same global batch, in which each replica, or rank, has one thread. While DataParallel's replicas run
in rank 0, the other rank waits in a barrier. "bare" is the bare module on the global batch, with one thread. Medians
over the rounds; the last column is the median of each round's own ratio.

The last results, with their machine, are in docs/data-parallel.md.
"""

import argparse
import copy
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from collectives import ratio, take_turns
from ddp_step import MODELS
from torch import Tensor, nn

import paceline


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def show_bytes(num_replicas: int) -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8192))
    x, y = torch.randn(512, 256), torch.randint(8192, (512,))
    criterion = nn.CrossEntropyLoss()
    print(f"{'MiB':10}" + "".join(f"{f'replica {index}':>12}" for index in range(num_replicas)))
    for name in ("gathered", "balanced"):
        wrapped = paceline.DataParallel(copy.deepcopy(model), ["cpu"] * num_replicas, loss=criterion)
        for _ in range(2):  # in the second, the replicas have their copies
            wrapped.zero_grad()
            with wrapped.measure_bytes() as peaks:
                if name == "balanced":
                    wrapped.forward_backward(x, target=y)
                else:
                    criterion(wrapped(x), y).backward()
        print(f"{name:10}" + "".join(f"{peaks[index] / 2**20:12.1f}" for index in range(num_replicas)))


def steps_of(model: nn.Module, x: Tensor, world: paceline.World) -> dict[str, Callable[[], None]]:
    """A step of each contender on the global batch ``x``; all but "DDP" run on rank 0 alone."""
    ours = x.chunk(world.world_size)[world.rank]

    def step_with(kind: str) -> Callable[[], None]:
        inner = copy.deepcopy(model)
        optimizer = torch.optim.SGD(inner.parameters(), lr=1e-3)
        wrapped = inner
        if kind == "DDP":
            wrapped = paceline.DistributedDataParallel(inner, process_group=dist.new_group(backend="shm"))
        elif kind != "bare":
            wrapped = paceline.DataParallel(inner, ["cpu"] * world.world_size, loss=mean_square)

        def step() -> None:
            if kind != "DDP" and world.rank > 0:
                return
            optimizer.zero_grad(set_to_none=True)
            if kind == "DP balanced":
                wrapped.forward_backward(x)
            else:
                mean_square(wrapped(ours if kind == "DDP" else x)).backward()
            optimizer.step()

        return step

    return {kind: step_with(kind) for kind in ("bare", "DDP", "DP", "DP balanced")}


def show_times(rounds: int) -> None:
    with paceline.init("gloo", device="cpu") as world:
        world.print(f"{'ms':18}{'bare':>10}{'DDP':>10}{'DP':>10}{'DP balanced':>14}{'DP balanced / DDP':>20}")
        ratios = []
        for name, build in MODELS.items():
            torch.manual_seed(0)
            model, x = build()
            times = take_turns(steps_of(model, torch.cat([x] * world.world_size), world), rounds)
            medians = [statistics.median(values) * 1e3 for values in times.values()]
            ratios.append(ratio(times["DP balanced"], times["DDP"]))
            heads = f"{name:18}{medians[0]:10.1f}{medians[1]:10.1f}{medians[2]:10.1f}{medians[3]:14.1f}"
            world.print(f"{heads}{ratios[-1]:20.2f}", flush=True)
        world.print(f"{'geometric mean':62}{statistics.geometric_mean(ratios):20.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", action="store_true")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    if options.bytes:
        show_bytes(options.replicas)
    else:
        show_times(options.rounds)


if __name__ == "__main__":
    main()
