"""Training on N ranks is training in one process on the global batch."""

import pytest
import torch
from torch import nn

from paceline import DistributedDataParallel
from support.ranks import run_ranks

NUM_STEPS = 20
GLOBAL_BATCH = 12
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}


class Net(nn.Module):
    """Convolutions, a tied pair of layers, a layer used twice, one used every other step, a frozen one."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.twice = nn.Linear(16, 16)
        self.sometimes = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.encode = nn.Linear(64, 16)
        self.decode = nn.Linear(16, 64)
        self.decode.weight = nn.Parameter(self.decode.weight.detach())
        self.head = nn.Linear(64, 5)

    def forward(self, x, step):
        x = self.conv(x).relu().flatten(1)[:, :64]
        x = self.encode(x).tanh()
        x = self.twice(self.twice(x).tanh()).tanh() + self.frozen(x)
        if step % 2:
            x = self.sometimes(x).tanh()
        return self.head(self.decode(x).tanh())


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
}


def train(rank, world_size, optimizer, dtype, wrap, accumulate):
    torch.manual_seed(7)
    model = Net().to(dtype)
    wrapped = wrap(model)
    steps = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    data = torch.Generator().manual_seed(11)
    for number in range(NUM_STEPS):
        x = torch.randn(GLOBAL_BATCH, 1, 4, 4, generator=data, dtype=torch.float64).to(dtype)
        y = torch.randint(5, (GLOBAL_BATCH,), generator=data)
        shard = slice(rank * GLOBAL_BATCH // world_size, (rank + 1) * GLOBAL_BATCH // world_size)
        steps.zero_grad()
        pieces = list(zip(x[shard].chunk(accumulate), y[shard].chunk(accumulate), strict=True))
        for position, (some_x, some_y) in enumerate(pieces):
            local = (
                wrapped.no_sync() if accumulate > 1 and position < len(pieces) - 1 and wrapped is not model else None
            )
            if local:
                local.__enter__()
            (nn.functional.cross_entropy(wrapped(some_x, number), some_y) / len(pieces)).backward()
            if local:
                local.__exit__(None, None, None)
        steps.step()
    return [p.detach() for p in model.parameters()]


def on_ranks(world, optimizer, dtype, accumulate):
    return train(world.rank, world.world_size, optimizer, dtype, DistributedDataParallel, accumulate)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_twenty_steps_equal_one_process_on_the_global_batch(world_size, optimizer, dtype):
    alone = train(0, 1, optimizer, dtype, lambda model: model, 1)
    together = run_ranks(world_size, on_ranks, optimizer, dtype, 1)
    for params in together:
        torch.testing.assert_close(params, together[0], rtol=0, atol=0)  # replicas agree bit for bit
    for ours, expected in zip(together[0], alone, strict=True):
        difference = (ours - expected).abs().max() / expected.abs().max()
        assert difference < TOLERANCE[dtype]


@pytest.mark.parametrize("world_size", [2, 3])
def test_accumulation_under_no_sync_equals_one_process_too(world_size):
    alone = train(0, 1, "sgd", torch.float64, lambda model: model, 1)
    together = run_ranks(world_size, on_ranks, "sgd", torch.float64, 2)
    for ours, expected in zip(together[0], alone, strict=True):
        assert (ours - expected).abs().max() / expected.abs().max() < 1e-6
