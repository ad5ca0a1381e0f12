"""Whatever a backward does, gradients are those of one process on the global batch.

Two ranks unless stated. Rank r's inputs are ones times r + 1, so a linear layer's gradient is 1 on rank 0, 2 on rank 1,
and 1.5 on average.
"""

import contextlib
import dataclasses
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline import DistributedDataParallel
from paceline.parallel import fields
from support.models import TwoLayers, inputs
from support.ranks import expect_errors, run_ranks
from support.steps import grads, step


def only_second(world):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    return step(wrapped, lambda: model.second(inputs(world)), times=3)


@pytest.mark.usefixtures("both_ways")
def test_a_layer_that_no_rank_uses_keeps_no_gradient_and_the_other_is_averaged_at_once():
    assert run_ranks(2, only_second) == [[[None, 1.5]] * 3] * 2


def different_layers(world):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    layer = model.first if world.is_main else model.second
    return step(wrapped, lambda: layer(inputs(world)), times=3)


@pytest.mark.usefixtures("both_ways")
def test_a_layer_that_one_rank_uses_has_a_gradient_on_all():
    assert run_ranks(2, different_layers) == [[[0.5, 1.0]] * 3] * 2


def alternating(world):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    seen = []
    for number in range(6):
        used = model.first if (number + world.rank) % 3 else model.second
        seen += step(wrapped, lambda used=used: used(inputs(world)))
    return seen


@pytest.mark.usefixtures("both_ways")
def test_control_flow_that_differs_between_ranks_and_steps():
    # used by (rank 0, rank 1): second/first, first/first, first/second, and again
    expected = [[1.0, 0.5], [1.5, None], [0.5, 1.0]] * 2
    assert run_ranks(2, alternating) == [expected, expected]


def left_out(world):
    model = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x):
            return self.parts[0](x), self.parts[1](x)

    wrapped = DistributedDataParallel(Both())
    return step(wrapped, lambda: wrapped(inputs(world))[1], times=4)


def test_an_output_left_out_of_the_loss_in_four_steps():
    assert run_ranks(2, left_out) == [[[None, 1.5]] * 4] * 2


def expert_per_rank(world):
    torch.manual_seed(0)
    experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    wrapped = DistributedDataParallel(experts, bucket_cap_mb=0)
    seen = []
    for number in range(5):
        chosen = [(world.rank * 3 + number * k) % 4 for k in range(1 + world.rank % 2)]
        wrapped.zero_grad()
        sum(experts[c](torch.ones(2, 4) * (world.rank + 1)).sum() for c in chosen).backward()
        seen.append([None if e.weight.grad is None else e.weight.grad[0, 0].item() for e in experts])
    return seen


@pytest.mark.usefixtures("both_ways")
def test_experts_chosen_differently_by_four_ranks():
    expected = []
    for number in range(5):
        sums = [0.0] * 4
        used = [False] * 4
        for rank in range(4):
            for k in range(1 + rank % 2):
                expert = (rank * 3 + number * k) % 4
                sums[expert] += 2 * (rank + 1) / 4
                used[expert] = True
        expected.append([total if u else None for total, u in zip(sums, used, strict=True)])
    assert run_ranks(4, expert_per_rank) == [expected] * 4


class Holder:
    def __init__(self, value):
        self.anything = {"deep": [value]}


@dataclasses.dataclass
class Output:
    value: torch.Tensor


@pytest.mark.parametrize("container", [Holder, Output, lambda v: [{"k": (v,)}], lambda v: v])
def test_the_output_may_be_in_any_container(container):
    def run(world):
        class Wrapping(TwoLayers):
            def forward(self, x):
                return container(super().forward(x))

        wrapped = DistributedDataParallel(Wrapping())

        def loss():
            out = wrapped(inputs(world))
            if isinstance(out, Holder):
                return out.anything["deep"][0]
            if isinstance(out, Output):
                return out.value
            return out[0]["k"][0] if isinstance(out, list) else out

        return step(wrapped, loss, times=2)

    assert run_ranks(2, run) == [[[1.5, 1.5]] * 2] * 2


def inner_method(world):
    class WithLoss(TwoLayers):
        def loss(self, x):
            return self(x).sum()

    wrapped = DistributedDataParallel(WithLoss())
    return step(wrapped, lambda: wrapped.module.loss(inputs(world)), times=2)


def test_the_loss_may_come_from_a_method_of_the_inner_module():
    assert run_ranks(2, inner_method) == [[[1.5, 1.5]] * 2] * 2


def checkpointed(world, reentrant, times_used, through_wrapper):
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 3)  # its gradients come last: the bucket waits while others come more than once
            self.layer = nn.Linear(3, 3)
            self.head = nn.Linear(3, 1)

        def forward(self, x):
            x = self.first(x)
            for _ in range(times_used):
                x = x.tanh() if reentrant is None else x
                x = self.layer(x) if reentrant is None else checkpoint(self.layer, x.tanh(), use_reentrant=reentrant)
            return self.head(x)

    model = Model().double()
    wrapped = DistributedDataParallel(model)
    x = (torch.arange(12, dtype=torch.float64).view(4, 3) + world.rank).div(10).requires_grad_()
    call = wrapped if through_wrapper else model
    seen = []
    for _ in range(3):
        wrapped.zero_grad()
        call(x).sum().backward()
        seen.append([p.grad.clone() for p in model.parameters()])
    return seen


CHECKPOINTS = list(itertools.product([True, False], [1, 2, 3], [True, False]))


def with_and_without_checkpoints(world):
    """All in one world: in each rank, the first checkpoint imports a compiler."""
    plain = {times_used: checkpointed(world, None, times_used, True) for times_used in (1, 2, 3)}
    return plain, [checkpointed(world, *how) for how in CHECKPOINTS]


@pytest.mark.slow
@pytest.mark.usefixtures("both_ways")
def test_checkpointing_equals_no_checkpointing():
    for plain, found in run_ranks(2, with_and_without_checkpoints, timeout_s=60):
        for (reentrant, times_used, through_wrapper), averages in zip(CHECKPOINTS, found, strict=True):
            how = f"{reentrant=} {times_used=} {through_wrapper=}: "
            torch.testing.assert_close(averages, plain[times_used], rtol=1e-12, atol=1e-12, msg=how.__add__)


class Twice(nn.Module):
    """``last`` is expected first; ``layer``, in a bucket of its own, gets its gradient twice before."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3, bias=False)
        self.last = nn.Linear(3, 3, bias=False)

    def forward(self, x, segment):
        return segment(self.layer, segment(self.layer, self.last(x))).sum()


def twice_before_its_bucket_is_due(world, is_alone):
    torch.manual_seed(0)
    model = Twice().double()
    call = model if is_alone else DistributedDataParallel(model, bucket_cap_mb=0)
    segment = (lambda layer, x: layer(x)) if is_alone else lambda layer, x: checkpoint(layer, x, use_reentrant=True)
    call(torch.ones(4, 3, dtype=torch.float64), segment).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.usefixtures("both_ways")
def test_a_gradient_that_comes_twice_before_its_bucket_is_due():
    alone = run_ranks(1, twice_before_its_bucket_is_due, True)[0]
    for found in run_ranks(2, twice_before_its_bucket_is_due, False):
        torch.testing.assert_close(found, alone)


def shared_layer(world):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    return step(wrapped, lambda: wrapped(wrapped(inputs(world))), times=2)


@pytest.mark.usefixtures("both_ways")
def test_one_forward_feeding_another_of_the_same_model():
    # y = f s f s x: d/df = 2 f s^2 x = 2 x with all weights 1
    assert run_ranks(2, shared_layer) == [[[3.0, 3.0]] * 2] * 2


def tied(world):
    model = TwoLayers()
    model.second.weight = model.first.weight
    wrapped = DistributedDataParallel(model)
    return step(wrapped, lambda: wrapped(inputs(world)), times=2)


@pytest.mark.usefixtures("both_ways")
def test_tied_weights():
    assert run_ranks(2, tied) == [[[3.0]] * 2] * 2  # d(w w x)/dw = 2 w x


def several_backwards(world):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    first, second = wrapped(inputs(world)), wrapped(2 * inputs(world))  # two forwards before two backwards
    first.backward()
    after_one = grads(model)
    second.backward()
    after_two = grads(model)
    wrapped.zero_grad()
    loss = wrapped(inputs(world))
    loss.backward(retain_graph=True)
    loss.backward()
    return after_one, after_two, grads(model)


@pytest.mark.usefixtures("both_ways")
def test_backwards_accumulate_averages():
    assert run_ranks(2, several_backwards) == [([1.5, 1.5], [4.5, 4.5], [3.0, 3.0])] * 2


def two_losses(world):
    model = TwoLayers()
    _wrapped = DistributedDataParallel(model)
    hidden = model.first(inputs(world))
    losses = [model.second(hidden), hidden * 3]
    for loss in losses:
        loss.backward(retain_graph=True)
    return grads(model)


@pytest.mark.usefixtures("both_ways")
def test_two_losses_over_one_graph():
    assert run_ranks(2, two_losses) == [[6.0, 1.5]] * 2


def autograd_grad(world):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    (local,) = torch.autograd.grad(wrapped(inputs(world)), [model.first.weight])
    return local.item(), step(wrapped, lambda: wrapped(inputs(world)))


def test_autograd_grad_stays_local_and_disturbs_nothing():
    assert run_ranks(2, autograd_grad) == [(1.0, [[1.5, 1.5]]), (2.0, [[1.5, 1.5]])]


def penalty(world):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    x = inputs(world).requires_grad_()
    (slope,) = torch.autograd.grad(wrapped(x), [x], create_graph=True)  # f s
    (slope**2).sum().backward()
    return grads(model)


def test_a_gradient_penalty():
    assert run_ranks(2, penalty) == [[2.0, 2.0]] * 2  # d(f s)^2/df = 2 f s^2


def accumulation(world, forward_inside, backward_inside):
    model = nn.Linear(1, 1, bias=False)
    wrapped = DistributedDataParallel(model)
    seen = []
    for _ in range(3):
        wrapped.zero_grad()
        for _ in range(2):
            with wrapped.no_sync() if forward_inside else contextlib.nullcontext():
                loss = wrapped(inputs(world))
                if backward_inside and forward_inside:
                    loss.backward()
            if backward_inside and not forward_inside:
                with wrapped.no_sync():
                    loss.backward()
            elif not backward_inside:
                loss.backward()
        local = model.weight.grad.item()
        wrapped(inputs(world)).backward()
        seen.append((local, model.weight.grad.item()))
    return seen


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("forward_inside", [True, False])
def test_no_sync_keeps_gradients_local_until_the_next_backward_outside(forward_inside):
    found = run_ranks(2, accumulation, forward_inside, True)
    assert found == [[(2.0, 4.5)] * 3, [(4.0, 4.5)] * 3]


def test_no_sync_around_forward_alone_does_not_delay_anything():
    assert run_ranks(2, accumulation, True, False) == [[(3.0, 4.5)] * 3] * 2


def unused_in_the_last(world):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    with wrapped.no_sync():
        model.first(inputs(world)).backward()
    model.second(inputs(world)).backward()
    return grads(model)


@pytest.mark.usefixtures("both_ways")
def test_what_was_accumulated_is_averaged_even_if_the_last_backward_does_not_use_it():
    assert run_ranks(2, unused_in_the_last) == [[1.5, 1.5]] * 2


def nested_no_sync(world):
    model = nn.Linear(1, 1, bias=False)
    wrapped = DistributedDataParallel(model)
    with wrapped.no_sync():
        with wrapped.no_sync():
            pass
        wrapped(inputs(world)).backward()
    return model.weight.grad.item(), wrapped.require_backward_grad_sync


def test_no_sync_nests():
    assert run_ranks(2, nested_no_sync) == [(1.0, True), (2.0, True)]


def gradient_for_the_input(world):
    wrapped = DistributedDataParallel(TwoLayers())
    if world.is_main:
        x = torch.ones(1, 1, requires_grad=True)
        assert torch.autograd.grad(wrapped(x), x)[0].item() == 1.0
    world.barrier(timeout=10)
    return step(wrapped, lambda: wrapped(inputs(world)))


def test_one_rank_may_ask_for_an_inputs_gradient_alone():
    assert run_ranks(2, gradient_for_the_input) == [[[1.5, 1.5]]] * 2


def on_devices(world, devices):
    """As if each rank's parameters lay on that device."""
    place = torch.device(devices[world.rank])
    fields._is_cpu, fields._device_of = lambda _: place.type == "cpu", lambda _: place
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    model(torch.full((1, 1), 1.0 + world.rank)).sum().backward()
    return model.module.weight.grad.item()


def test_each_rank_has_a_gpu_of_its_own():
    assert run_ranks(2, on_devices, ["cuda:0", "cuda:1"]) == [1.5, 1.5]


def test_ranks_on_devices_of_several_types_are_told():
    for error in expect_errors(2, on_devices, ["cuda:0", "cpu"]):
        assert "on other devices; move the model alike on every rank" in error
