import itertools

import torch
from torch import nn

import paceline

world = paceline.init()
model = paceline.DistributedDataParallel(nn.Linear(3, 1))
loader = [(torch.ones(2, 3), torch.ones(2, 1))] * 3
