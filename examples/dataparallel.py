"""Several devices in one process, without a launcher, in a notebook too: the loss is computed where its data is.

python examples/dataparallel.py                     all GPUs; without one, two replicas on the CPU
python examples/dataparallel.py --devices cpu       one device, with the same result

Where a script can be started by `paceline run`, DistributedDataParallel (examples/digits.py) is the faster way.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--devices", nargs="+", help="such as cuda:0 cuda:1, or cpu cpu")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--save", help="where to write the trained parameters")
args = parser.parse_args()
gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
devices = args.devices or gpus or ["cpu", "cpu"]

torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
train, test = random_split(TensorDataset(images, labels), [0.8, 0.2])
train_loader = DataLoader(train, batch_size=100, shuffle=True)  # the last batch is smaller, and counts for less
test_loader = DataLoader(test, batch_size=100)

net = nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
model = paceline.DataParallel(net.to(devices[0]), devices, loss=nn.CrossEntropyLoss())
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(args.epochs):
    model.train()
    for x, y in train_loader:
        optimizer.zero_grad()
        loss = model.forward_backward(x, target=y)  # of the whole batch; gradients are in place
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(1).cpu() == y).sum().item() for x, y in test_loader)
    print(f"epoch {epoch}: loss {loss:.4f}, {right / len(test):.1%} of {len(test)} test digits right")

with model.measure_bytes() as peaks:
    model.forward_backward(x, target=y)
print("the most that each replica held in a step:", *(f"{peak / 2**20:.1f} MiB" for peak in peaks.values()))
if args.save:
    paceline.save(net.state_dict(), args.save)
