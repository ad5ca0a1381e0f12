import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

world = paceline.init()
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = paceline.amp.initialize(model, optimizer, opt_level="O0")
model = paceline.DistributedDataParallel(model)
loader = paceline.DataLoader(TensorDataset(torch.ones(8, 3), torch.ones(8, 1)), batch_size=2)
step, num_steps, metric = 7, 6, 0.5


def train(x, y):
    optimizer.zero_grad()
    with paceline.amp.scale_loss((model(x) - y).square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
