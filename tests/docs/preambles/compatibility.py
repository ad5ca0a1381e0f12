import torch
from torch.nn.functional import cross_entropy

import paceline
from paceline import global_mean

world = paceline.init()
logits = torch.zeros(4, 5, requires_grad=True)
targets = torch.tensor([1, 2, -100, 4])
