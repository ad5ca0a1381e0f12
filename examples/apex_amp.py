"""Apex's mixed precision, O0 to O3: a script as it was written for Apex, with its two imports changed.

paceline run -n 2 examples/apex_amp.py --opt-level O1           two ranks
python examples/apex_amp.py --opt-level O2                      one process

O0 is float32, O1 casts each function as suits it, O2 keeps float32 masters of half-precision weights, O3 has nothing
but half precision. On CPUs "half" is float16 too; docs/mixed-precision.md says how to have bfloat16.
"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from paceline import amp  # from apex import amp
from paceline.parallel.apex import DistributedDataParallel, convert_syncbn_model  # from apex.parallel import ...

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", default="O1", choices=["O0", "O1", "O2", "O3"])
parser.add_argument("--keep-batchnorm-fp32")
parser.add_argument("--loss-scale")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("-b", "--batch-size", type=int, default=64, help="of each rank")
args = parser.parse_args()

args.distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
rank, device = 0, torch.device("cuda" if torch.cuda.is_available() else "cpu")
if args.distributed:
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16  # (N, 1, 8, 8)
data = TensorDataset(images, torch.tensor(digits.target))
train, test = Subset(data, range(1500)), Subset(data, range(1500, len(data)))
sampler = DistributedSampler(train) if args.distributed else None
train_loader = DataLoader(train, args.batch_size, shuffle=sampler is None, sampler=sampler)
own = range(rank, len(test), dist.get_world_size() if args.distributed else 1)  # each sample on one rank
test_loader = DataLoader(Subset(test, own), batch_size=128)

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, stride=2, padding=1),
    nn.BatchNorm2d(64),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(64 * 4 * 4, 10),
)
model = convert_syncbn_model(model).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
model, optimizer = amp.initialize(
    model,
    optimizer,
    opt_level=args.opt_level,
    keep_batchnorm_fp32=args.keep_batchnorm_fp32,
    loss_scale=args.loss_scale,
)
if args.distributed:
    model = DistributedDataParallel(model, delay_allreduce=True)
criterion = nn.CrossEntropyLoss()

for epoch in range(args.epochs):
    if args.distributed:
        sampler.set_epoch(epoch)
    model.train()
    for x, y in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(x.to(device)), y.to(device))
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 5.0)
        optimizer.step()
    model.eval()
    right = torch.zeros((), device=device)
    with torch.no_grad():
        for x, y in test_loader:
            right += (model(x.to(device)).argmax(1) == y.to(device)).sum()
    if args.distributed:
        dist.all_reduce(right)
    if rank == 0:
        print(f"epoch {epoch}: {right.item() / len(test):.1%} of {len(test)} test digits right")

if rank == 0:
    print(f"{args.opt_level}: {amp.skipped_steps()} steps skipped, since gradients had overflowed")
if args.distributed:
    dist.destroy_process_group()
