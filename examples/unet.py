"""Segmentation with a U-Net: which pixels of a noisy image belong to a disc, which to a square, which to neither.

python examples/unet.py                             one process
paceline run -n 2 examples/unet.py                  two ranks, with the same result

Small batches make batch norm's statistics poor: SyncBatchNorm takes them from the batches of all ranks together. Dice
is exact, since it is computed from the numbers of pixels on all ranks, each image once. --logs DIR writes curves and
pictures for TensorBoard.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy, interpolate, max_pool2d
from torch.utils.data import Dataset

import paceline
from paceline.data import ConfusionCounts

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--images", type=int, default=512, help="to train on")
parser.add_argument("--size", type=int, default=48, help="of an image, in pixels, divisible by 4")
parser.add_argument("--batch-size", type=int, default=8, help="over all ranks together")
parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
parser.add_argument("--logs", help="a folder for TensorBoard")
parser.add_argument("--save", help="where to write the trained parameters")
args = parser.parse_args()
torch.set_default_dtype(getattr(torch, args.dtype))


class Shapes(Dataset):
    """Images (1, size, size) of a disc and a square in noise; the class of each pixel: 0 none, 1 disc, 2 square."""

    def __init__(self, length, size, first=0):
        self.length, self.size, self.first = length, size, first

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not 0 <= index < self.length:
            raise IndexError(index)
        random = torch.Generator().manual_seed(self.first + index)  # the same image on every rank, in every epoch
        y, x = torch.meshgrid(torch.arange(self.size), torch.arange(self.size), indexing="ij")
        classes = torch.zeros(self.size, self.size, dtype=torch.long)
        for shape in (1, 2):
            center_y, center_x, radius = torch.rand(3, generator=random) * self.size * torch.tensor([1.0, 1.0, 0.2])
            away_y, away_x, radius = (y - center_y).abs(), (x - center_x).abs(), radius + self.size / 10
            distance = (away_y**2 + away_x**2).sqrt() if shape == 1 else torch.maximum(away_y, away_x)
            classes[distance <= radius] = shape
        noise = torch.randn(self.size, self.size, generator=random)
        return ((classes > 0) + 0.3 * noise)[None], classes


def convolutions(num_in, num_out):
    layers = [nn.Conv2d(num_in, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU()]
    return nn.Sequential(
        *layers, nn.Conv2d(num_out, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU()
    )


class UNet(nn.Module):
    def __init__(self, num_classes, width=12):
        super().__init__()
        self.down1, self.down2 = convolutions(1, width), convolutions(width, 2 * width)
        self.bottom = convolutions(2 * width, 4 * width)
        self.up2, self.up1 = convolutions(6 * width, 2 * width), convolutions(3 * width, width)
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, x):  # (batch, 1, height, width) to (batch, num_classes, height, width)
        fine = self.down1(x)
        coarse = self.down2(max_pool2d(fine, 2))
        bottom = self.bottom(max_pool2d(coarse, 2))
        coarse = self.up2(torch.cat([interpolate(bottom, scale_factor=2), coarse], 1))
        return self.head(self.up1(torch.cat([interpolate(coarse, scale_factor=2), fine], 1)))


with paceline.init() as world:
    world.seed(0)
    train, test = Shapes(args.images, args.size), Shapes(101, args.size, first=10**6)
    train_loader = paceline.DataLoader(train, global_batch_size=args.batch_size, shuffle=True, drop_last=True)
    test_loader = paceline.DataLoader(test, batch_size=16, padding=False)  # each image once, also the 101st
    model = paceline.SyncBatchNorm.convert_sync_batchnorm(UNet(num_classes=3))
    model = paceline.DistributedDataParallel(model.to(world.device))
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, args.epochs * len(train_loader))
    curves = None
    if args.logs and world.is_main:
        from torch.utils.tensorboard import SummaryWriter

        curves = SummaryWriter(args.logs)
    for epoch in range(args.epochs):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            cross_entropy(model(x.to(world.device)), y.to(world.device)).backward()
            optimizer.step()
            schedule.step()
        model.eval()
        counts = ConfusionCounts(3)
        with torch.no_grad():
            for x, y in test_loader:
                guesses = model(x.to(world.device)).argmax(1).cpu()
                counts.update(guesses, y)
        pixels = counts.compute()  # over all ranks: (class, guess)
        dice = 2 * pixels.diag() / (pixels.sum(0) + pixels.sum(1))
        world.print(f"epoch {epoch}: Dice of discs {dice[1]:.3f}, of squares {dice[2]:.3f}, of {len(test)} test images")
        if curves:
            curves.add_scalar("Dice/discs", dice[1], epoch)
            curves.add_scalar("Dice/squares", dice[2], epoch)
            curves.add_images("images and classes found", torch.cat([x[:4], guesses[:4, None] / 2], 3), epoch)
    if curves:
        curves.close()
    if args.save:
        paceline.save(model.module.state_dict(), args.save)
