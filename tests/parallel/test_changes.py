"""A model that changes after it was wrapped is averaged all the same, or is an error that names the difference.

Two ranks, whose inputs are ones times 1 and 2: a linear layer's gradient is 1.5 on average.
"""

import warnings

import pytest
import torch
from torch import nn

from paceline import DistributedDataParallel
from paceline.errors import ReplicaMismatchError
from support.models import TwoLayers, inputs
from support.ranks import expect_errors, run_ranks
from support.steps import step


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


@pytest.mark.usefixtures("both_ways")
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


@pytest.mark.usefixtures("both_ways")
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


@pytest.mark.usefixtures("both_ways")
def test_a_parameter_that_was_given_another_shape_on_all_ranks():
    before = [((3, 3), [1.5]), ((3, 3), [3.0]), ((5,), [4.5])]
    after = [((3, 3), [1.5]), ((4, 3), [3.0]), ((5,), [4.5])]
    assert run_ranks(2, grown_everywhere) == [[before, before, after, after]] * 2


def cast_later(world, part):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    step(wrapped, lambda: wrapped(inputs(world)))
    (model if part == "model" else model.second).double()
    x = inputs(world).double()
    call = wrapped if part == "model" else lambda x: model.second(model.first(x.float()).double())
    seen = step(wrapped, lambda: call(x), times=2)
    return seen, str(model.second.weight.grad.dtype), str(model.first.weight.grad.dtype)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(("part", "first"), [("model", "torch.float64"), ("layer", "torch.float32")])
def test_a_model_or_a_layer_cast_after_wrapping(part, first):
    assert run_ranks(2, cast_later, part) == [([[1.5, 1.5]] * 2, "torch.float64", first)] * 2


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
