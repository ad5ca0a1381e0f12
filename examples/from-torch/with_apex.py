"""A script for Apex, which no longer installs. with_apex.diff changes its imports, and nothing else:

patch with_apex.py with_apex.diff
paceline run -n 2 with_apex.py O1
"""

import os
import sys

import torch
import torch.distributed as dist
from apex import amp
from apex.parallel import DistributedDataParallel
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)

digits = load_digits()
train = TensorDataset(torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target))
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=48, sampler=sampler)

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level=sys.argv[1])
model = DistributedDataParallel(model)

for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x.to(device)), y.to(device))
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "weights.pt")
dist.destroy_process_group()
