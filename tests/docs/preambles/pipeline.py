import torch
from torch import nn

import paceline

net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
criterion = nn.CrossEntropyLoss()
x, y = torch.ones(8, 3), torch.arange(8) % 4
