"""Handwritten digits, on one device or many, with the same lines.

python examples/digits.py                           one process
paceline run -n 2 examples/digits.py                two ranks
torchrun --nproc-per-node 2 examples/digits.py      two ranks, started by torch
"""

import argparse
import sys
import time

import numpy
import torch
from rich.progress import track
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--data", help=".npz file: images (N, height, width) from 0 to 255, and labels (N)")
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--batch-size", type=int, default=96, help="over all ranks together")
parser.add_argument("--save", help="where to write the trained parameters")
args = parser.parse_args()

source = numpy.load(args.data) if args.data else {"images": load_digits().images, "labels": load_digits().target}
images = torch.tensor(source["images"], dtype=torch.float32).unsqueeze(1)  # (N, 1, height, width)
digits = TensorDataset(images / images.max(), torch.tensor(source["labels"], dtype=torch.long))

with paceline.init() as world:
    world.seed(0)
    train, test = random_split(digits, [0.8, 0.2])  # alike on all ranks: they have one seed
    per_rank = args.batch_size // world.world_size
    train_loader = paceline.DataLoader(train, batch_size=per_rank, shuffle=True, drop_last=True)
    test_loader = paceline.DataLoader(test, batch_size=256, padding=False)  # each sample once
    model = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 64, 3, 2, padding=1), nn.GELU())
    model.extend([nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64 * 4 * 4, 10)])
    model = paceline.DistributedDataParallel(model.to(world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    show_bar, seconds = world.is_main and sys.stdout.isatty(), 0.0
    for epoch in range(args.epochs):
        start = time.perf_counter()
        model.train()
        for x, y in track(train_loader, f"epoch {epoch}", transient=True, disable=not show_bar):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.to(world.device)), y.to(world.device)).backward()
            optimizer.step()
        seconds += time.perf_counter() - start
        model.eval()
        with torch.no_grad():
            guesses = paceline.gather([model(x.to(world.device)).argmax(1) for x, _ in test_loader], test_loader)
        right = (guesses.cpu() == torch.stack([y for _, y in test])).sum().item()
        world.print(f"epoch {epoch}: {right / len(test):.1%} of {len(test)} test digits right")
    rate = args.epochs * len(train_loader) * args.batch_size / max(seconds, 1e-9)
    world.print(f"{rate:,.0f} samples/s on {world.world_size} x {world.device.type}")
    if args.save and world.is_main:
        torch.save(model.module.state_dict(), args.save)
