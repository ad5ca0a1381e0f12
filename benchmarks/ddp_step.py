"""A forward and backward under DistributedDataParallel: paceline's, torch's, and none; CPUs, Gloo.

    OMP_NUM_THREADS=1 paceline run -n 2 benchmarks/ddp_step.py [--rounds 40]

The three take turns within each round, so that all see the same machine. Medians over the rounds, on rank 0.

Last result (2 cores of an AMD EPYC, Linux 6.18, Python 3.11, torch 2.13.0+cpu, 2 ranks of one thread, 40 rounds):

    ms                        bare     torch  paceline    paceline / torch
    MNIST net                 54.9      65.3      68.4                1.07
    MLP 6 x 1024              40.9      71.9      72.1                1.02
    200 small layers          11.1      18.7      20.4                1.16

The run before it gave 1.06, 1.00 and 1.24.
"""

import argparse
import copy
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

import paceline


def models():
    """(name, model, input)"""
    conv = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    yield "MNIST net", nn.Sequential(*conv, nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10)), (32, 1, 28, 28)
    yield "MLP 6 x 1024", nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6))), (64, 1024)
    yield "200 small layers", nn.Sequential(*(nn.Linear(32, 32) for _ in range(200))), (16, 32)


def seconds(model, x):
    dist.barrier()
    start = time.perf_counter()
    model.zero_grad()
    model(x).sum().backward()
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    with paceline.init(device="cpu") as world:
        world.print(f"{world.world_size} ranks, torch {torch.__version__}, {torch.get_num_threads()} threads each")
        world.print(f"{'ms':20}{'bare':>10}{'torch':>10}{'paceline':>10}{'paceline / torch':>20}")
        for name, model, shape in models():
            x = torch.randn(shape)
            contenders = {
                "bare": model,
                "torch": nn.parallel.DistributedDataParallel(copy.deepcopy(model)),
                "paceline": paceline.DistributedDataParallel(copy.deepcopy(model)),
            }
            times = {kind: [] for kind in contenders}
            for _ in range(rounds):
                for kind, contender in contenders.items():
                    times[kind].append(seconds(contender, x))
            medians = [f"{statistics.median(values) * 1e3:10.1f}" for values in times.values()]
            pairs = zip(times["paceline"], times["torch"], strict=True)
            world.print(
                f"{name:20}{''.join(medians)}{statistics.median(ours / theirs for ours, theirs in pairs):20.2f}"
            )


if __name__ == "__main__":
    main()
