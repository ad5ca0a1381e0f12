"""Several wrappers at once, wrappers of the same parameters, and wrappers that are gone."""

import gc
import os
import sys
import weakref

import pytest
from torch import nn

from paceline import DistributedDataParallel
from support.commands import run_command, write_script
from support.models import TwoLayers, inputs
from support.ranks import run_ranks
from support.steps import grads, step


def one_module_wrapped_twice(world):
    model = TwoLayers()
    one = DistributedDataParallel(model)
    two = DistributedDataParallel(model, bucket_cap_mb=0)
    seen = []
    for number in range(4):
        layer = model.first if (number + world.rank) % 2 else model.second
        model.zero_grad()
        (one(inputs(world)) + layer(inputs(world))).backward()
        seen.append(grads(model))
    del one, two
    return seen


@pytest.mark.usefixtures("both_ways")
def test_one_module_wrapped_twice_is_averaged_once():
    # first and second each get (1 + 2) / 2 from the forward; the layer used besides gives 1 / 2 or 2 / 2
    expected = [[2.5, 2.0], [2.0, 2.5]] * 2
    assert run_ranks(2, one_module_wrapped_twice) == [expected] * 2


def shared_encoder(world):
    encoder = nn.Linear(1, 1, bias=False)
    heads = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for layer in (encoder, *heads):
        nn.init.ones_(layer.weight)
    models = [DistributedDataParallel(nn.Sequential(encoder, head)) for head in heads]
    seen = []
    for number in range(3):
        for layer in (encoder, *heads):
            layer.zero_grad()
        chosen = models if number % 2 else models[::-1]
        sum(model(inputs(world)) for model in chosen).backward()
        seen.append([encoder.weight.grad.item(), *(head.weight.grad.item() for head in heads)])
    return seen


@pytest.mark.usefixtures("both_ways")
def test_two_wrappers_that_share_an_encoder():
    assert run_ranks(2, shared_encoder) == [[[3.0, 1.5, 1.5]] * 3] * 2


def wrapped_again_over_garbage(world):
    gc.disable()
    model = TwoLayers()
    cycle = {"wrapper": DistributedDataParallel(model)}
    cycle["self"] = cycle
    del cycle
    if world.rank == 1:
        gc.collect()  # each rank's collector comes in its own time
    wrapped = DistributedDataParallel(model)
    return step(wrapped, lambda: wrapped(inputs(world)), times=2)


def test_a_wrapper_that_is_garbage_on_some_ranks_only_does_not_disturb_the_next():
    assert run_ranks(2, wrapped_again_over_garbage) == [[[1.5, 1.5]] * 2] * 2


def keeps_its_output(world):
    class Keeping(TwoLayers):
        def forward(self, x):
            self.out = super().forward(x)
            return self.out

    alive = []
    for _ in range(3):
        model = Keeping()
        wrapped = DistributedDataParallel(model)
        wrapped(inputs(world)).backward()
        alive.append(weakref.ref(model))
        del model, wrapped
    gc.collect()
    return sum(model() is not None for model in alive)


def test_a_model_that_keeps_its_output_can_be_freed():
    assert run_ranks(2, keeps_its_output) == [0, 0]


def two_wrappers(world):
    model = TwoLayers()
    one, two = DistributedDataParallel(model.first), DistributedDataParallel(model.second)
    x = inputs(world)
    return step(model, lambda: two(one(x)) if world.is_main else one(two(x)), times=3)


def test_two_wrappers_in_one_graph_in_another_order_on_each_rank():
    assert run_ranks(2, two_wrappers) == [[[1.5, 1.5]] * 3] * 2


def wrapped_again(world):
    model = TwoLayers()
    sockets = []
    for _ in range(4):
        wrapped = DistributedDataParallel(model)
        seen = step(model, lambda: wrapped(inputs(world)), times=2)  # noqa: B023
        assert seen == [[1.5, 1.5]] * 2, seen
        sockets.append(len(os.listdir("/proc/self/fd")))
        wrapped = None
    return sockets[1:]


def test_wrapping_a_model_again_and_again_opens_no_further_connections():
    for counts in run_ranks(2, wrapped_again):
        assert counts == [counts[0]] * 3


def test_a_wrapper_may_outlive_its_process_group(tmp_path):
    # torch's own waits for Gloo's threads with Python's lock in its hands: it rarely lives as many lives as these.
    path = write_script(
        tmp_path,
        """
        import torch
        import torch.distributed as dist

        from paceline import DistributedDataParallel

        def live():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            model = DistributedDataParallel(torch.nn.Linear(4, 1))
            model(torch.ones(2, 4)).sum().backward()
            dist.all_reduce(torch.ones(4))
            dist.destroy_process_group()

        for _ in range(200):
            live()
        """,
    )
    ran = run_command([sys.executable, path], timeout_s=120)
    assert ran.returncode == 0, ran.stderr
