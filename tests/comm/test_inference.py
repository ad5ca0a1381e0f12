"""Training with evaluation in inference mode in between: metrics are summed there, and objects gathered.

What collectives do in inference mode is in the battery too.
"""

import pytest
import torch
import torch.distributed as dist

import paceline
from support.layouts import run_on

WHERE = ["shm", (0, 0, 1), (0, 1, 2)]


def trains_and_evaluates(world, wrap):
    """y = wx from w = 0, at x = r+1 towards 0, with the gradient of -wx, whose mean is -(n+1)/2, at a rate of 1.

    Returns:
        The weight after each of three epochs, and the metric of each evaluation: the sum over all ranks of w (r+1).
    """
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(layer.weight)
    wrapped = wrap(layer)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    x = torch.tensor([[world.rank + 1.0]])
    weights, metrics, objects = [], [], []
    for epoch in range(3):
        for _ in range(2):
            optimizer.zero_grad()
            (-wrapped(x)).sum().backward()
            optimizer.step()
        weights.append(layer.weight.item())
        with torch.inference_mode():
            wrapped.eval()
            metric = wrapped(x).sum()
            dist.all_reduce(metric)
            gathered = [None] * world.world_size
            dist.all_gather_object(gathered, (epoch, world.rank))
            late = torch.ones(70_000)
            work = dist.all_reduce(late, async_op=True)
        wrapped.train()
        metrics.append(metric.item())
        objects.append(gathered)
        work.wait()
        assert late.unique().tolist() == [world.world_size]
        after = [None] * world.world_size
        dist.all_gather_object(after, world.rank)
        assert after == [0, 1, 2]
    return weights, metrics, objects


@pytest.mark.parametrize("wrap", [paceline.DistributedDataParallel, torch.nn.parallel.DistributedDataParallel])
@pytest.mark.parametrize("where", WHERE, ids=str)
def test_training_goes_on_after_an_evaluation_in_inference_mode(where, wrap):
    objects = [[(epoch, rank) for rank in range(3)] for epoch in range(3)]
    expected = [4.0, 8.0, 12.0], [24.0, 48.0, 72.0], objects
    assert run_on(where, trains_and_evaluates, wrap) == [expected] * 3


def averages_in_both_modes(world):
    """Launched in inference mode and waited for outside, and the other way round."""
    group = dist.distributed_c10d._get_default_group().averages()
    seen = []
    for launching in (True, False, True, False):
        with torch.inference_mode(launching):
            shared = group.allocate(1000, torch.float32)
            shared.tensor.fill_(float(world.rank))
            launch = group.launch(shared)
        with torch.inference_mode(not launching):
            group.wait(launch)
        shared.tensor.add_(1.0)
        seen += shared.tensor.unique().tolist()
    return seen


@pytest.mark.parametrize("where", WHERE, ids=str)
def test_averages_do_not_mind_the_mode(where):
    assert run_on(where, averages_in_both_modes) == [[2.0] * 4] * 3
