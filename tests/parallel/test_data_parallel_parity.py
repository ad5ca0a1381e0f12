"""Every number of replicas and every size of batch trains as the bare module does."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline.parallel import DataParallel

BATCH_SIZES = range(1, 21)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Parameter(torch.randn(4, 5, dtype=torch.float64))
        self.outer = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))

    def forward(self, x):
        return (x @ self.inner).tanh() @ self.outer


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def distance(ones, others):
    return (flat(ones) - flat(others)).abs().max().item()


class Trained:
    """A module on its way through ten steps, by some way to compute its loss and gradients."""

    def __init__(self, module, train):
        self.module, self.train = copy.deepcopy(module), train
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.5, momentum=0.9)

    def step(self, x, y):
        """What there is to compare: the loss, and after it gradients and weights."""
        self.optimizer.zero_grad()
        loss = self.train(self.module, x, y)
        grads = [param.grad for param in self.module.parameters()]
        self.optimizer.step()
        return [loss, *grads, *self.module.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", range(1, 8))
def test_ten_steps_equal_the_bare_modules(num_replicas):
    torch.manual_seed(num_replicas)
    start = Net()
    wrappers = {}

    def bare(module, x, y):
        output = module(x)
        loss = functional.cross_entropy(output, y)
        loss.backward()
        return torch.cat([output.detach().reshape(-1), loss.detach().reshape(1)])

    def gathered(module, x, y):
        wrapped = wrappers.setdefault(id(module), DataParallel(module, ["cpu"] * num_replicas))
        return bare(wrapped, x, y)

    def balanced(module, x, y):
        made = DataParallel(module, ["cpu"] * num_replicas, loss=nn.CrossEntropyLoss())
        return wrappers.setdefault(id(module), made).forward_backward(x, target=y)

    for size in BATCH_SIZES:
        wrappers.clear()
        alone, first, second = (Trained(start, train) for train in (bare, gathered, balanced))
        for _ in range(10):  # optimizer steps
            x, y = torch.randn(size, 4, dtype=torch.float64), torch.randint(3, (size,))
            expected = alone.step(x, y)
            assert distance(first.step(x, y), expected) < 1e-6
            assert distance(second.step(x, y), [expected[0][-1], *expected[1:]]) < 1e-6
