import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

train = TensorDataset(torch.ones(96, 3), torch.arange(96) % 2)
test = TensorDataset(torch.ones(10, 3), torch.arange(10) % 2)
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_fn = nn.CrossEntropyLoss()
