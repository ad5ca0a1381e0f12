"""Apex's wrapper and its Reducer, where ranks or steps do not use the same layers."""

import torch
from torch import nn

from paceline.parallel import apex
from support.ranks import run_ranks


def two_layers():
    layers = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in "ab"})
    for param in layers.parameters():
        nn.init.ones_(param)
    return layers


def grads(layers):
    return [None if param.grad is None else param.grad.item() for param in layers.parameters()]


def one_layer_each(world):
    layers, x = two_layers(), torch.ones(1, 1)
    reducer = apex.Reducer(layers)
    layers["ab"[world.rank]](x).backward()
    reducer.reduce()
    return grads(layers)


def test_the_reducer_averages_what_any_rank_has_used():
    assert run_ranks(2, one_layer_each) == [[0.5, 0.5]] * 2


def summed(world):
    """The layer a is used in the last step alone, and its gradient comes when b's has been sent."""
    layers, x = two_layers(), torch.ones(1, 1)
    wrapped = apex.DistributedDataParallel(layers, gradient_average=False)
    for step in range(4):
        wrapped.zero_grad()
        used = layers["a"](x) if step == 3 else 0
        (used + layers["b"](x)).backward()
    return grads(layers)


def test_sums_are_sums_of_late_gradients_too():
    assert run_ranks(2, summed) == [[2.0, 2.0]] * 2
