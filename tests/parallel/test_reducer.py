"""Whatever a backward does, gradients are those of one process on the global batch.

All of it twice: over shared memory, where a gradient waits for its bucket, and over Gloo, with every gradient taken at
once. [Note: at once, in dense.py]

Two ranks unless stated. Rank r's inputs are ones times r + 1, so a linear layer's gradient is 1 on rank 0, 2 on rank 1,
and 1.5 on average.
"""

import contextlib
import dataclasses
import gc
import os
import re
import signal
import time
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline
from paceline import DistributedDataParallel
from paceline.errors import ReductionError, ReplicaMismatchError
from paceline.parallel.buckets import dense
from paceline.parallel.reducer import channels
from support.models import TwoLayers, inputs
from support.ranks import RankError, expect_errors, run_ranks


@pytest.fixture(autouse=True, params=["shared memory, together", "gloo, at once"])
def how_gradients_travel(request, monkeypatch):
    """Ranks are forked, so what is set here holds in them."""
    if request.param == "gloo, at once":
        monkeypatch.setattr(dense, "_HUGE_NUMEL", 0)
        monkeypatch.setitem(run_ranks.__kwdefaults__, "backend", "gloo")


def grads(module):
    return [None if p.grad is None else p.grad.item() for p in module.parameters()]


def step(wrapped, loss, times=1):
    """Gradients after each of ``times`` fresh backwards."""
    seen = []
    for _ in range(times):
        wrapped.zero_grad()
        loss().backward()
        seen.append(grads(wrapped))
    return seen


# -- what is used -------------------------------------------------------------------------------------------------


def only_second(world):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    return step(wrapped, lambda: model.second(inputs(world)), times=3)


def test_a_layer_that_no_rank_uses_keeps_no_gradient_and_the_other_is_averaged_at_once():
    assert run_ranks(2, only_second) == [[[None, 1.5]] * 3] * 2


def different_layers(world):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    layer = model.first if world.is_main else model.second
    return step(wrapped, lambda: layer(inputs(world)), times=3)


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


# -- what changes after wrapping -----------------------------------------------------------------------------------


def replaced(world, through_wrapper):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    call = wrapped if through_wrapper else model
    before = step(wrapped, lambda: call(inputs(world)))
    model.second.weight = nn.Parameter(torch.full((1, 1), 1.0 + world.rank))
    model.first.weight = nn.Parameter(torch.ones(1, 1))
    step(wrapped, lambda: call(inputs(world)))  # from here on all have rank 0's values
    return before, step(wrapped, lambda: call(inputs(world)), times=2), model.second.weight.item()


@pytest.mark.parametrize("through_wrapper", [True, False])
def test_a_replaced_weight_is_averaged_and_gets_the_first_ranks_value(through_wrapper):
    assert run_ranks(2, replaced, through_wrapper) == [([[1.5, 1.5]], [[1.5, 1.5]] * 2, 1.0)] * 2


def all_replaced_without_forward(world):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    model.first.weight = nn.Parameter(torch.ones(1, 1))
    model.second.weight = nn.Parameter(torch.ones(1, 1))
    return step(wrapped, lambda: model(inputs(world)), times=2)


def test_a_model_whose_every_weight_was_replaced_is_still_averaged():
    assert run_ranks(2, all_replaced_without_forward) == [[[1.5, 1.5]] * 2] * 2


def layer_replaced(world):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    model.second = nn.Linear(1, 1, bias=True)
    nn.init.ones_(model.second.weight)
    return step(wrapped, lambda: wrapped(inputs(world)), times=3)


def test_a_replaced_layer_with_another_number_of_parameters():
    assert run_ranks(2, layer_replaced) == [[[1.5, 1.5, 1.0]] * 3] * 2


def replaced_on_one(world):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    if world.rank == 1:
        model.second.weight = nn.Parameter(torch.full((1, 1), 5.0))
    step(wrapped, lambda: wrapped(inputs(world)))
    return step(wrapped, lambda: wrapped(inputs(world)), times=2), model.second.weight.item()


def test_a_weight_replaced_on_one_rank_only_is_agreed_on_by_all():
    assert run_ranks(2, replaced_on_one) == [([[1.5, 1.5]] * 2, 1.0)] * 2


def unfrozen(world, through_wrapper):
    model = TwoLayers()
    model.first.weight.requires_grad_(False)
    wrapped = DistributedDataParallel(model)
    call = wrapped if through_wrapper else model
    seen = step(wrapped, lambda: call(inputs(world)), times=2)
    model.first.weight.requires_grad_(True)
    seen += step(wrapped, lambda: call(inputs(world)), times=2)
    model.second.weight.requires_grad_(False)
    seen += step(wrapped, lambda: call(inputs(world)), times=2)
    return seen


@pytest.mark.parametrize("through_wrapper", [True, False])
def test_layers_frozen_and_unfrozen_after_wrapping(through_wrapper):
    expected = [[None, 1.5]] * 2 + [[1.5, 1.5]] * 2 + [[1.5, None]] * 2
    assert run_ranks(2, unfrozen, through_wrapper) == [expected] * 2


def only_the_unfrozen_trains(world):
    model = TwoLayers()
    model.first.weight.requires_grad_(False)
    wrapped = DistributedDataParallel(model)
    model.first.weight.requires_grad_(True)
    model.second.weight.requires_grad_(False)
    return step(wrapped, lambda: model(inputs(world)), times=2)


def test_the_only_trained_layer_is_one_that_was_frozen_when_wrapped():
    assert run_ranks(2, only_the_unfrozen_trains) == [[[1.5, None]] * 2] * 2


def frozen_on_one(world):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    if world.rank == 1:
        model.first.weight.requires_grad_(False)
    wrapped(inputs(world)).backward()


def test_a_layer_frozen_on_one_rank_only_is_an_error_on_all():
    message = (
        "ReplicaMismatchError: 'first.weight' has requires_grad=True on rank 0 and False on rank 1. "
        "Freeze, unfreeze and cast parameters on every rank alike."
    )
    assert expect_errors(2, frozen_on_one) == [message, message]


# -- how backward runs ---------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("through_wrapper", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("times_used", [1, 2, 3])
def test_checkpointing_equals_no_checkpointing(reentrant, times_used, through_wrapper):
    plain = run_ranks(2, checkpointed, None, times_used, True)
    found = run_ranks(2, checkpointed, reentrant, times_used, through_wrapper)
    for ours, theirs in zip(found, [plain[0]] * 2, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


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


def test_a_gradient_that_comes_twice_before_its_bucket_is_due():
    alone = run_ranks(1, twice_before_its_bucket_is_due, True)[0]
    for found in run_ranks(2, twice_before_its_bucket_is_due, False):
        torch.testing.assert_close(found, alone)


def shared_layer(world):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    return step(wrapped, lambda: wrapped(wrapped(inputs(world))), times=2)


def test_one_forward_feeding_another_of_the_same_model():
    # y = f s f s x: d/df = 2 f s^2 x = 2 x with all weights 1
    assert run_ranks(2, shared_layer) == [[[3.0, 3.0]] * 2] * 2


def tied(world):
    model = TwoLayers()
    model.second.weight = model.first.weight
    wrapped = DistributedDataParallel(model)
    return step(wrapped, lambda: wrapped(inputs(world)), times=2)


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


# -- no_sync and accumulation --------------------------------------------------------------------------------------


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


# -- dtypes, layouts, devices --------------------------------------------------------------------------------------


def mixed_dtypes(world):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
            self.weights = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes])

        def forward(self, x):
            return sum((w.real if w.is_complex() else w).double().sum() * x for w in self.weights)

    wrapped = DistributedDataParallel(Mixed())
    wrapped(inputs(world).double().squeeze()).backward()
    return [
        (str(p.grad.dtype), p.grad.real.tolist() if p.is_complex() else p.grad.tolist()) for p in wrapped.parameters()
    ]


def test_parameters_of_five_dtypes():
    names = ["float64", "float32", "bfloat16", "float16", "complex64"]
    assert run_ranks(2, mixed_dtypes) == [[(f"torch.{name}", [1.5] * 3) for name in names]] * 2


def layouts(world):
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten()).to(memory_format=torch.channels_last)
    model.register_parameter("transposed", nn.Parameter(torch.ones(3, 2).t()))
    wrapped = DistributedDataParallel(model)
    x = torch.arange(2 * 2 * 9, dtype=torch.float32).view(2, 2, 3, 3) * (world.rank + 1)
    factor = torch.arange(6.0).view(2, 3) * (world.rank + 1)
    (wrapped(x).sum() + (model.transposed * factor).sum()).backward()
    return model[0].weight.grad.clone(), model.transposed.grad.clone(), model[0].weight.grad.stride()


def test_gradients_that_are_not_contiguous():
    x = torch.arange(36.0).view(2, 2, 3, 3).sum(0) * 1.5
    for conv, transposed, stride in run_ranks(2, layouts):
        torch.testing.assert_close(conv, x.expand(3, 2, 3, 3), rtol=1e-6, atol=0)
        torch.testing.assert_close(transposed, torch.arange(6.0).view(2, 3) * 1.5)
        assert stride == (18, 1, 6, 2)  # channels last, as the weight is


def sparse(world):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 2, sparse=True)
            self.head = nn.Linear(2, 1, bias=False)

        def forward(self, rows):
            return self.head(self.table(rows)).sum()

    model = Model()
    nn.init.ones_(model.head.weight)
    wrapped = DistributedDataParallel(model)
    seen = []
    for number in range(3):
        wrapped.zero_grad()
        if number < 2:
            wrapped(torch.tensor([world.rank, 5])).backward()
        elif world.is_main:
            wrapped(torch.tensor([7])).backward()
        else:
            model.head(torch.ones(1, 2)).sum().backward()
        grad = model.table.weight.grad
        seen.append((grad.is_sparse, grad.to_dense()[:, 0].tolist()))
    return seen


def test_sparse_gradients_stay_sparse():
    first = [0.5, 0.5, 0, 0, 0, 1.0, 0, 0, 0, 0]
    last = [0, 0, 0, 0, 0, 0, 0, 0.5, 0, 0]
    assert run_ranks(2, sparse) == [[(True, first), (True, first), (True, last)]] * 2


# -- whose memory --------------------------------------------------------------------------------------------------


def kept_gradients(world):
    model = nn.Linear(1, 1, bias=False)
    wrapped = DistributedDataParallel(model)
    history, views = [], []
    for number in range(3):
        wrapped.zero_grad()
        wrapped(inputs(world) * (number + 1)).backward()
        history.append(model.weight.grad)
        views.append(model.weight.grad.detach().view(-1))
    return [g.item() for g in history], [v.item() for v in views]


def test_gradients_that_somebody_keeps_are_not_overwritten_by_later_steps():
    assert run_ranks(2, kept_gradients) == [([1.5, 3.0, 4.5], [1.5, 3.0, 4.5])] * 2


def own_buffer(world):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    flat = torch.zeros(2)
    for position, param in enumerate(model.parameters()):
        param.grad = flat[position].view(1, 1)
    before = [param.grad for param in model.parameters()]
    seen = []
    for _ in range(2):
        flat.zero_()
        wrapped(inputs(world)).backward()
        seen.append(flat.tolist())
    return seen, all(param.grad is grad for param, grad in zip(model.parameters(), before, strict=True))


def test_gradients_that_lie_in_somebodys_buffer_stay_there():
    assert run_ranks(2, own_buffer) == [([[1.5, 1.5]] * 2, True)] * 2


def zeroed_in_place(world):
    model = nn.Linear(1, 1, bias=False)
    wrapped = DistributedDataParallel(model)
    seen, places = [], set()
    for _ in range(4):
        wrapped.zero_grad(set_to_none=False)
        wrapped(inputs(world)).backward()
        seen.append(model.weight.grad.item())
        places.add(model.weight.grad.data_ptr())
    return seen, len(places)


def test_gradients_zeroed_in_place_stay_in_place():
    seen, places = zip(*run_ranks(2, zeroed_in_place), strict=True)
    assert list(seen) == [[1.5] * 4] * 2
    assert places == (1, 1)


def places_of_fresh_gradients(world):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    places = []
    for _ in range(6):
        wrapped.zero_grad()
        wrapped(inputs(world)).backward()
        places.append([p.grad.data_ptr() for p in model.parameters()])
    return places[1:]  # after the first step buckets are laid out anew


def test_gradients_that_nobody_keeps_lie_in_the_same_memory_in_every_step():
    for places in run_ranks(2, places_of_fresh_gradients):
        assert places == [places[0]] * 5


# -- when it goes wrong --------------------------------------------------------------------------------------------


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("boom")


def fails_before_anything_was_sent(world):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    with contextlib.suppress(ValueError):
        Boom.apply(wrapped(inputs(world))).backward()
    return step(wrapped, lambda: wrapped(inputs(world)), times=2)


def test_a_backward_that_fails_before_the_model_leaves_the_next_one_right():
    assert run_ranks(2, fails_before_anything_was_sent) == [[[1.5, 1.5]] * 2] * 2


class Fails(torch.autograd.Function):
    """Its backward raises where it is told to."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails:
            raise ValueError("boom")
        return grad, None


def fails_before_anything_is_sent(world, failing_ranks):
    """Gradients (1, 1) and (2, 2), of which the first backward gets as far as the second layer's."""
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    with contextlib.suppress(ValueError):
        model.second(Fails.apply(model.first(inputs(world)), world.rank in failing_ranks)).sum().backward()
    after_failure = grads(model)
    wrapped(inputs(world)).backward()
    return after_failure, grads(model)


def test_a_backward_that_fails_before_anything_was_sent_leaves_what_it_had():
    found = run_ranks(2, fails_before_anything_is_sent, (0, 1))
    assert [after_failure for after_failure, _ in found] == [[None, 1.0], [None, 2.0]]
    assert [after_next for _, after_next in found] == [[1.5, 3.0]] * 2


def skips_a_step_on_one_rank(world):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    for number in range(3):
        wrapped.zero_grad()
        with contextlib.suppress(ValueError):
            model.second(Fails.apply(model.first(inputs(world)), (world.rank, number) == (1, 1))).sum().backward()


def test_a_backward_that_fails_on_one_rank_only_is_an_error_on_all_at_the_next():
    for rank, message in enumerate(expect_errors(2, skips_a_step_on_one_rank)):
        assert message.startswith(
            f"ReductionError: rank {rank}: a backward raised an error on rank 1, where it was caught, and not on the "
            "others. So the ranks average gradients of different steps. Skip a step on all ranks or on none;"
        )


def fails_in_the_middle(world):
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(3)))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0)
    with contextlib.suppress(ValueError):
        model[2](model[1](Boom.apply(model[0](inputs(world))))).backward()
    wrapped(inputs(world)).backward()


def test_a_backward_that_failed_half_way_is_not_silently_continued():
    for rank, message in enumerate(expect_errors(2, fails_in_the_middle)):
        assert message.startswith(
            f"ReductionError: rank {rank}: the backward before this one raised an error after part of its gradients "
            "had been sent. The ranks no longer agree on what comes next: end them all and start from a checkpoint."
        )


def dies_before_backward(world, how):
    wrapped = DistributedDataParallel(TwoLayers())
    wrapped(inputs(world)).backward()
    if world.rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("rank 1 gives up")
    since = time.monotonic()
    try:
        wrapped(inputs(world)).backward()
    except ReductionError as error:
        assert time.monotonic() - since < 5.0  # a second, on a machine that has time
        raise error


def without_shared_memory(monkeypatch):
    """As where ranks are on several hosts."""
    monkeypatch.setattr(channels, "choose_cpu_backend", lambda _: "gloo")


@pytest.mark.parametrize("control", ["in memory", "over gloo"])
@pytest.mark.parametrize("how", ["failed", "killed"])
def test_when_a_rank_is_lost_the_others_say_which_and_why(how, control, monkeypatch):
    if control == "over gloo":
        without_shared_memory(monkeypatch)
    with pytest.raises(RankError) as caught:
        run_ranks(2, dies_before_backward, how)
    told = r"failed[^\n]*:\n(.*\n)*ValueError: rank 1 gives up" if how == "failed" else r"(was killed|ended)"
    assert re.search(
        r"paceline\.errors\.ReductionError: rank 0: gradients could not be averaged over 2 ranks: rank 1 \(pid \d+\) "
        + told,
        str(caught.value),
    )


def is_silent(rank, world_size, directory):
    address = f"file://{directory}/rendezvous"
    with paceline.init(run_ranks.__kwdefaults__["backend"], address, rank=rank, world_size=world_size, timeout=1):
        wrapped = DistributedDataParallel(TwoLayers())
        if rank == 1:
            time.sleep(3)
        wrapped(torch.ones(1, 1)).backward()


def test_a_rank_that_is_silent_is_named_at_the_deadline():
    message, _ = expect_errors(2, is_silent, join=False)
    assert re.match(
        r"ReductionError: rank 0: gradients could not be averaged over 2 ranks: all_reduce\(.*\) at .*/test_reducer.py:"
        r"\d+, call number 1 of this group, was not done after 1 s, the timeout that it was given: rank 1 has not come",
        message,
    )


def fails_at_the_very_end(world):
    wrapped = DistributedDataParallel(TwoLayers())
    send, held = wrapped._reducer.send_rest, []

    def fail():
        wrapped._reducer.send_rest = send
        raise KeyboardInterrupt

    wrapped._reducer.send_rest = fail
    try:
        wrapped(inputs(world)).backward()
    except KeyboardInterrupt as error:
        held.append(error)  # as a notebook holds the last one
    wrapped(inputs(world)).backward()


def test_an_interrupt_at_the_end_of_backward_does_not_switch_averaging_off_in_silence():
    for rank, message in enumerate(expect_errors(2, fails_at_the_very_end)):
        assert message.startswith(
            f"ReductionError: rank {rank}: the backward before this one raised an error after part"
        )


def unfreeze_again(world):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    model.first.weight.requires_grad_(world.is_main)
    with pytest.raises(
        ReplicaMismatchError, match=r"'first.weight' has requires_grad=True on rank 0 and False on rank 1"
    ):
        wrapped(inputs(world)).backward()
    model.first.weight.requires_grad_(True)
    return step(wrapped, lambda: wrapped(inputs(world)), times=2)


def test_a_layer_frozen_on_one_rank_can_be_put_right():
    assert run_ranks(2, unfreeze_again) == [[[1.5, 1.5]] * 2] * 2


def unfreeze_while_much_is_under_way(world):
    """As above, with 16 MB beside it: how many elements of its gradient, 1/2 on average, are wrong."""
    model = nn.ParameterDict({"large": torch.zeros(4 << 20), "small": torch.zeros(8)})
    wrapped = DistributedDataParallel(model)
    num_wrong = 0
    for _ in range(3):
        model["small"].requires_grad_(world.is_main)
        with contextlib.suppress(ReplicaMismatchError):
            (model["large"].sum() * 1000 * (world.rank + 1) + model["small"].sum()).backward()
        model["small"].requires_grad_(True)
        wrapped.zero_grad()
        (model["large"].sum() * world.rank + model["small"].sum()).backward()
        num_wrong += int((model["large"].grad != 0.5).sum())
    return num_wrong


def test_what_was_under_way_has_ended_when_ranks_are_found_to_differ():
    assert run_ranks(2, unfreeze_while_much_is_under_way) == [0, 0]


def wrapped_again_after_failure(world):
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(3)))
    for layer in model:
        nn.init.ones_(layer.weight)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0)
    x = inputs(world).requires_grad_()
    broken = Boom.apply(model[0](x)) if world.is_main else model[0](Boom.apply(x))  # after one bucket, after two
    with pytest.raises(ValueError, match="boom"):
        model[2](model[1](broken)).backward()
    model.zero_grad()
    wrapped = None
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0)
    return step(wrapped, lambda: wrapped(inputs(world)), times=2)


def test_a_wrapper_made_after_a_failed_one_does_not_hear_what_that_one_sent():
    assert run_ranks(2, wrapped_again_after_failure) == [[[1.5] * 3] * 2] * 2


def gradient_for_the_input(world):
    wrapped = DistributedDataParallel(TwoLayers())
    if world.is_main:
        x = torch.ones(1, 1, requires_grad=True)
        assert torch.autograd.grad(wrapped(x), x)[0].item() == 1.0
    world.barrier(timeout=10)
    return step(wrapped, lambda: wrapped(inputs(world)))


def test_one_rank_may_ask_for_an_inputs_gradient_alone():
    assert run_ranks(2, gradient_for_the_input) == [[[1.5, 1.5]]] * 2


def changed_on_one_rank(world, change):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    wrapped = DistributedDataParallel(model)
    wrapped(torch.ones(2, 8)).sum().backward()
    wrapped.zero_grad()
    if world.rank == 1:
        change(model)
    model(torch.ones(2, 8, dtype=model[0].weight.dtype)).sum().backward()


def grow(model):
    model[1].weight.data = torch.ones(12, 8)
    model[1].bias.data = torch.ones(12)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda model: model.bfloat16(), "the dtype of '0.weight' is float32 on rank 0 and bfloat16 on rank 1"),
        (lambda model: model.double(), "the dtype of '0.weight' is float32 on rank 0 and float64 on rank 1"),
        (grow, "the shape of '1.weight' is (8, 8) on rank 0 and (12, 8) on rank 1"),
    ],
)
def test_a_model_cast_or_resized_on_one_rank_only_is_an_error_that_names_the_difference(change, difference):
    expected = f"ReplicaMismatchError: the ranks' models differ: {difference}"
    assert [message[: len(expected)] for message in expect_errors(2, changed_on_one_rank, change)] == [expected] * 2


def grown_everywhere(world):
    model = nn.ParameterList([torch.ones(3, 3), torch.ones(3, 3), torch.ones(5)])
    wrapped = DistributedDataParallel(model)
    seen = []
    for number in range(4):
        if number == 2:
            model[1].data = torch.ones(4, 3)
        wrapped.zero_grad()
        sum(p.sum() * (index + 1) * (world.rank + 1) for index, p in enumerate(model)).backward()
        seen.append([(tuple(p.grad.shape), p.grad.unique().tolist()) for p in model])
    return seen


def test_a_parameter_that_was_given_another_shape_on_all_ranks():
    before = [((3, 3), [1.5]), ((3, 3), [3.0]), ((5,), [4.5])]
    after = [((3, 3), [1.5]), ((4, 3), [3.0]), ((5,), [4.5])]
    assert run_ranks(2, grown_everywhere) == [[before, before, after, after]] * 2


def hooks_of_the_user(world):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0)
    seen = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))
    wrapped(inputs(world)).backward()
    return seen, grads(model)


def test_a_hook_registered_after_wrapping_finds_this_ranks_gradient():
    assert run_ranks(2, hooks_of_the_user) == [([1.0, 1.0], [1.5, 1.5]), ([2.0, 2.0], [1.5, 1.5])]


def cast_later(world, part):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    step(wrapped, lambda: wrapped(inputs(world)))
    (model if part == "model" else model.second).double()
    x = inputs(world).double()
    call = wrapped if part == "model" else lambda x: model.second(model.first(x.float()).double())
    seen = step(wrapped, lambda: call(x), times=2)
    return seen, str(model.second.weight.grad.dtype), str(model.first.weight.grad.dtype)


@pytest.mark.parametrize(("part", "first"), [("model", "torch.float64"), ("layer", "torch.float32")])
def test_a_model_or_a_layer_cast_after_wrapping(part, first):
    assert run_ranks(2, cast_later, part) == [([[1.5, 1.5]] * 2, "torch.float64", first)] * 2


def accumulated_in_place(world):
    model = nn.Linear(1, 1, bias=False)
    wrapped = DistributedDataParallel(model)
    seen = []
    for _ in range(3):
        wrapped.zero_grad()
        with wrapped.no_sync():
            wrapped(inputs(world)).backward()
        wrapped(inputs(world)).backward()
        seen.append((model.weight.grad.item(), model.weight.grad.data_ptr()))
    return [value for value, _ in seen], len({place for _, place in seen[1:]})


def test_an_accumulated_gradient_that_nobody_holds_is_stored_once():
    assert run_ranks(2, accumulated_in_place) == [([3.0] * 3, 1)] * 2


def huge_layers(world):
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    wrapped = DistributedDataParallel(model)
    seen = []
    model[0].weight.register_hook(lambda _: seen.append(model[1].weight.grad is None))
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(torch.full((1, 256), world.rank + 1.0)).sum().backward()
    return seen


def test_a_huge_gradient_is_in_its_bucket_before_the_next_arrives():
    assert run_ranks(2, huge_layers) == [[True, True]] * 2


def functional_sparse(world):
    table = nn.ParameterList([nn.Parameter(torch.ones(4, 2))])
    wrapped = DistributedDataParallel(table)
    for _ in range(2):
        rows = nn.functional.embedding(torch.tensor([world.rank]), table[0], sparse=True)
        rows.sum().backward()
    del wrapped
    return table[0].grad.to_dense()[:, 0].tolist()


def test_a_sparse_gradient_that_was_not_announced_accumulates_too():
    assert run_ranks(2, functional_sparse) == [[1.0, 1.0, 0.0, 0.0]] * 2


def tied_sparse(world):
    table = nn.Embedding(3, 2, sparse=True)
    nn.init.ones_(table.weight)
    wrapped = DistributedDataParallel(table)
    (table(torch.tensor([world.rank])) @ table.weight.t()).sum().backward()
    del wrapped
    return table.weight.grad.is_sparse, table.weight.grad.tolist() if not table.weight.grad.is_sparse else None


def test_a_sparse_table_tied_to_a_dense_layer_has_a_dense_gradient():
    # rows 0 and 1 are looked up by one rank each: 3 where looked up, halved, plus 1 from the product everywhere
    assert run_ranks(2, tied_sparse) == [(False, [[2.5, 2.5], [2.5, 2.5], [1.0, 1.0]])] * 2


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


def removed_layer(world):
    model = nn.ModuleDict({"kept": nn.Linear(1, 1, bias=False), "removed": nn.Linear(1, 1, bias=False)})
    wrapped = DistributedDataParallel(model)
    removed = model.pop("removed")
    step(wrapped, lambda: model["kept"](inputs(world)))
    removed.weight = nn.Parameter(torch.ones(1, 1))
    if world.is_main:
        removed(inputs(world)).backward()
    return removed.weight.grad is None or removed.weight.grad.item(), step(
        wrapped, lambda: model["kept"](inputs(world))
    )


def test_a_layer_taken_out_of_the_model_is_nobodys_business():
    assert run_ranks(2, removed_layer) == [(1.0, [[1.5]]), (True, [[1.5]])]


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


def deleted_before_backward(world):
    DistributedDataParallel(TwoLayers())(inputs(world)).backward()


def test_a_backward_after_the_wrapper_is_gone_is_an_error():
    for rank, message in enumerate(expect_errors(2, deleted_before_backward)):
        assert message == (
            f"ReductionError: rank {rank}: backward through an output of a DistributedDataParallel that has been "
            "deleted; its gradients would not be averaged. Keep the wrapper until backward has run."
        )


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


def removed_but_used(world):
    """The module loses a parameter that goes on being trained, from outside."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    wrapped = DistributedDataParallel(model)
    weight = model[0].weight
    told = []
    for k in range(4):
        if k == 1:
            del model[0].weight
        if k >= 1:
            model[0].weight = weight * 1.0  # no parameter any more
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrapped(torch.ones(1, 1)).sum().backward()
        told += [str(warning.message) for warning in caught]
    return told


def test_a_parameter_that_the_model_has_lost_and_that_still_gets_gradients_is_warned_of_once():
    for told in run_ranks(2, removed_but_used):
        assert told == [
            "'0.weight' is no parameter of the model any more, and yet backward computes a gradient of it, which is "
            "not averaged between ranks. Keep it in the model, or wrap what it belongs to on its own."
        ]
