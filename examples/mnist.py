"""MNIST with a small ConvNet. The script starts its ranks by itself, or a launcher does.

python examples/mnist.py                            one process
python examples/mnist.py --ranks 2                  two ranks, which the script starts
paceline run -n 2 examples/mnist.py                 two ranks, which the launcher starts

Without --data it takes the digits that scikit-learn ships, enlarged. --logs DIR writes curves for TensorBoard.
"""

import argparse
import gzip
import pathlib

import numpy
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.data import Accuracy, Mean

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=pathlib.Path, help="MNIST's folder of idx files (.gz or not), or Keras' mnist.npz")
parser.add_argument("--ranks", type=int, default=1, help="how many to start here, without a launcher")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=100, help="over all ranks together")
parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
parser.add_argument("--logs", help="a folder for TensorBoard")
parser.add_argument("--save", help="where to write the trained parameters")


def layer(num_in, num_out):
    convolution = nn.Conv2d(num_in, num_out, 5, padding=2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(num_out), nn.ReLU(), nn.MaxPool2d(2))


class ConvNet(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.layer1, self.layer2 = layer(1, 16), layer(16, 32)
        self.fc = nn.Linear(7 * 7 * 32, num_classes)

    def forward(self, x):  # (batch, 1, 28, 28)
        return self.fc(self.layer2(self.layer1(x)).flatten(1))


def train(_, args):
    torch.set_default_dtype(getattr(torch, args.dtype))
    with paceline.init() as world:
        world.seed(0)
        train_set, test_set = load(args.data)
        train_loader = paceline.DataLoader(train_set, global_batch_size=args.batch_size, shuffle=True, drop_last=True)
        test_loader = paceline.DataLoader(test_set, batch_size=500, padding=False)  # each image once
        model = paceline.SyncBatchNorm.convert_sync_batchnorm(ConvNet())  # statistics of the global batch
        model = paceline.DistributedDataParallel(model.to(world.device))
        optimizer = torch.optim.Adam(model.parameters())
        curves = None
        if args.logs and world.is_main:
            from torch.utils.tensorboard import SummaryWriter

            curves = SummaryWriter(args.logs)
        for epoch in range(args.epochs):
            losses, mean_loss, accuracy = [], Mean(), Accuracy()
            model.train()
            for x, y in train_loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x.to(world.device)), y.to(world.device))
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            mean_loss.update(torch.stack(losses))  # once an epoch, since it waits for the device
            model.eval()
            with torch.no_grad():
                for x, y in test_loader:
                    accuracy.update(model(x.to(world.device)), y)
            loss, right = mean_loss.compute(), accuracy.compute()  # over all ranks, so all ranks call it
            world.print(f"epoch {epoch}: loss {loss:.4f}, {right:.2%} of {len(test_set)} test images right")
            if curves:
                curves.add_scalar("loss", loss, epoch)
                curves.add_scalar("accuracy", right, epoch)
        if curves:
            curves.close()
        if args.save:
            paceline.save(model.module.state_dict(), args.save)


def load(path):
    """Images (N, 1, 28, 28) and labels (N), for training and for testing."""
    if path is None:
        digits = load_digits()
        images = nn.functional.interpolate(torch.tensor(digits.images)[:, None], size=28).numpy() * (255 / 16)
        parts = [(images[:1500], digits.target[:1500]), (images[1500:], digits.target[1500:])]
    elif path.is_dir():
        parts = [(read_idx(path, f"{name}-images"), read_idx(path, f"{name}-labels")) for name in ("train", "t10k")]
    else:
        file = numpy.load(path)
        parts = [(file[f"x_{name}"], file[f"y_{name}"]) for name in ("train", "test")]
    dtype = torch.get_default_dtype()
    return [
        TensorDataset(torch.tensor(images, dtype=dtype).view(-1, 1, 28, 28) / 255, torch.tensor(labels).long())
        for images, labels in parts
    ]


def read_idx(folder, name):
    """MNIST's own format: four bytes, of which the last is the number of dimensions; their sizes; the data."""
    path = next(folder.glob(f"{name}*"), folder / name)
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    shape = numpy.frombuffer(data, ">i4", count=data[3], offset=4)
    return numpy.frombuffer(data, numpy.uint8, offset=4 + 4 * data[3]).reshape(shape)


if __name__ == "__main__":
    args = parser.parse_args()
    if args.ranks > 1:
        paceline.spawn(train, (args,), nprocs=args.ranks, start_method="forkserver")
    else:
        train(0, args)
