"""One model cut into stages, on the devices of one process or on ranks; microbatches follow one another through it.

python examples/pipeline.py                         all GPUs; without one, two threads on the CPU
paceline run -n 2 examples/pipeline.py              two ranks, each with half of the model, and the same result

Cut where the dearest stage takes least time, measured with an example. --save writes the undivided model.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--microbatches", type=int, default=4)
parser.add_argument("--schedule", default="1f1b", choices=["1f1b", "gpipe", "interleaved"])
parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
parser.add_argument("--save", help="where to write the trained parameters")
args = parser.parse_args()
torch.set_default_dtype(getattr(torch, args.dtype))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):  # (batch, width)
        return x + self.inner(x)


with paceline.init() as world:
    world.seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.get_default_dtype()).flatten(1) / 16  # (N, 64)
    train, test = random_split(TensorDataset(images, torch.tensor(digits.target)), [0.8, 0.2])
    # All ranks take part in each batch: the first uses its images, the last its labels. So none has a share of its own.
    train_loader = paceline.DataLoader(train, 96, shuffle=True, num_replicas=1, rank=0)
    test_loader = paceline.DataLoader(test, 128, padding=False, num_replicas=1, rank=0)
    net = nn.Sequential(nn.Linear(64, 128), *[Residual(128) for _ in range(8)], nn.LayerNorm(128), nn.Linear(128, 10))
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    model = paceline.Pipeline(
        net,
        devices=None if world.world_size > 1 else gpus or ["cpu", "cpu"],
        microbatches=args.microbatches,
        schedule=args.schedule,
        loss=nn.CrossEntropyLoss(),
        balance="time",
        example=images[: 96 // args.microbatches],
    )
    for number, units in enumerate(model.units):
        world.print(f"stage {number}: modules {', '.join(units)}")
    world.print(model.schedule())
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)  # of the stages that are here
    for epoch in range(args.epochs):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = model.forward_backward(x, target=y)  # of the whole batch, on every rank
            model.clip_grad_norm_(1.0)  # of all stages together
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = sum((model(x).argmax(1).cpu() == y).sum().item() for x, y in test_loader)
        world.print(f"epoch {epoch}: loss {loss:.4f}, {right / len(test):.1%} of {len(test)} test digits right")
    bubble = model.measured_bubble()  # over all ranks, so all ranks call it
    world.print(f"in the last step lanes waited for {bubble:.0%} of the time")
    if args.save:
        paceline.save(model.full_state_dict(), args.save)
