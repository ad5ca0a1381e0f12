"""The reducer on GPUs: one GPU shared over Gloo, and one GPU a rank over NCCL."""

import pytest
import torch
from torch import nn

from paceline import DistributedDataParallel
from paceline.timeline import Timeline
from support.ranks import run_ranks

pytestmark = pytest.mark.cuda


def train(world, side_stream):
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(world.device)
    wrapped = DistributedDataParallel(model, device_ids=[world.device.index], bucket_cap_mb=0.005)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    for number in range(10):
        x = torch.randn(12, 64, generator=torch.Generator().manual_seed(number))[world.rank :: world.world_size]
        with torch.cuda.stream(stream):
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
    torch.cuda.synchronize()
    return [p.detach().cpu() for p in model.parameters()]


def alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(10):
        optimizer.zero_grad()
        model(torch.randn(12, 64, generator=torch.Generator().manual_seed(number))).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("side_stream", [False, True])
def test_two_ranks_that_share_a_gpu_over_gloo_equal_one_process(side_stream):
    for params in run_ranks(2, train, side_stream, device="cuda:0", timeout_s=90):
        torch.testing.assert_close(params, alone(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side_stream", [False, True])
def test_a_gpu_a_rank_over_nccl_equals_one_process(side_stream):
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a GPU for each rank, and there is one")
    for params in run_ranks(2, train, side_stream, backend="auto", device="auto", timeout_s=90):
        torch.testing.assert_close(params, alone(), rtol=1e-4, atol=1e-5)


def partly_used(world):
    model = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]).to(world.device)
    wrapped = DistributedDataParallel(model)
    x = torch.ones(1, 1, device=world.device) * (world.rank + 1)
    seen = []
    for _ in range(3):
        wrapped.zero_grad()
        model[1](x).backward()
        seen.append([None if p.grad is None else p.grad.item() for p in model.parameters()])
    return seen


def observed(world):
    timeline = Timeline()
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 8, bias=False)).to(world.device)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0, observer=timeline)
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(torch.ones(4, 64, device=world.device)).sum().backward()
    wrapped.observe(None)  # waits for the device, so that all has been told
    return list(timeline), wrapped.report().measured


def test_events_on_a_gpu_come_in_order_with_times_of_the_device():
    for events, measured in run_ranks(2, observed, device="cuda:0", timeout_s=90):
        last = [event for event in events if event.round == 2]
        assert [(event.kind, event.bucket) for event in last] == [
            ("round began", None),
            ("bucket ready", 0),
            ("launched", 0),
            ("bucket ready", 1),
            ("launched", 1),
            ("done", 0),
            ("done", 1),
            ("control", None),
            ("waited", None),
            ("round ended", None),
        ]
        at = {(event.kind, event.bucket): event for event in last}
        for bucket in (0, 1):
            assert at["launched", bucket].time_s <= at["done", bucket].time_s
        assert all(event.duration_s >= 0 for event in events)
        assert measured.num_rounds == 3


def test_unused_parameters_on_a_gpu():
    assert run_ranks(2, partly_used, device="cuda:0", timeout_s=90) == [[[None, 1.5]] * 3] * 2
