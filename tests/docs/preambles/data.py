import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, SequentialSampler, TensorDataset

import paceline

world = paceline.init()
dataset = test = TensorDataset(torch.ones(200, 3), torch.arange(200) % 2)
weights = torch.ones(200)
lengths = list(range(200))
model = paceline.DistributedDataParallel(nn.Linear(3, 2))
test_loader = paceline.DataLoader(test, batch_size=64, padding=False)


def LengthGroupedBatchSampler(lengths):  # noqa: N802
    return BatchSampler(SequentialSampler(lengths), batch_size=8, drop_last=False)
