"""A script for torch's DistributedDataParallel. It runs under paceline as it is; torch_ddp.diff does more:

torchrun --nproc-per-node 2 torch_ddp.py
paceline run -n 2 torch_ddp.py
patch torch_ddp.py torch_ddp.diff
paceline run -n 2 torch_ddp.py
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
train, test = TensorDataset(images[:1440], labels[:1440]), TensorDataset(images[1440:], labels[1440:])
train_sampler = DistributedSampler(train)
train_loader = DataLoader(train, batch_size=48, sampler=train_sampler)
test_loader = DataLoader(test, batch_size=96, sampler=DistributedSampler(test, shuffle=False))

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
model = DistributedDataParallel(model)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(5):
    train_sampler.set_epoch(epoch)
    model.train()
    for x, y in train_loader:
        optimizer.zero_grad()
        criterion(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
    model.eval()
    counts = torch.zeros(2, device=device)
    with torch.no_grad():
        for x, y in test_loader:
            right = (model(x.to(device)).argmax(1) == y.to(device)).sum()
            counts += torch.stack([right, torch.tensor(len(y), device=device)])
    dist.all_reduce(counts)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: {int(counts[0])} of {int(counts[1])} right")
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "weights.pt")
dist.destroy_process_group()
