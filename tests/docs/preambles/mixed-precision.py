import torch
from torch import nn

from paceline import amp

model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if "loss" not in globals():  # the page's first block makes the model that the later ones save
    loss = model(torch.ones(2, 3)).sum()
path = "checkpoint.pt"
