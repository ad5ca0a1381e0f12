"""Replicas that drift apart are found, and who drifted and where is said."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from paceline import DistributedDataParallel
from paceline.parallel.replicas import drift
from support.ranks import expect_errors, run_ranks


def deep(num_layers=2, width=4, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers))).to(dtype)


def train(world, spoil, num_steps=12, model=None, **kwargs):
    """Step on; before the third step, ``spoil(model, optimizer)`` on rank 1 alone. The number of steps that ran."""
    wrapped = DistributedDataParallel(model or deep(), **kwargs)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    x = torch.ones(1, next(wrapped.parameters()).shape[-1], dtype=next(wrapped.parameters()).dtype)
    for k in range(num_steps):
        if k == 2 and world.rank == 1:
            spoil(wrapped.module, optimizer)
        optimizer.zero_grad()
        wrapped(x).square().mean().backward()
        optimizer.step()
    return num_steps


@torch.no_grad()
def edit(model, _):
    model[1].weight += 1.0


def step_alone(model, optimizer):
    optimizer.step()


@torch.no_grad()
def lose(model, _):
    model[0].bias.fill_(float("nan"))


def load(model, _):
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


@pytest.mark.parametrize(
    ("spoil", "name"),
    [(edit, "1.weight"), (step_alone, "0."), (lose, "0.bias"), (load, "0.")],
    ids=["edited", "stepped alone", "NaN", "loaded"],
)
def test_a_change_on_one_rank_is_an_error_on_all_that_names_parameter_and_rank(spoil, name):
    errors = expect_errors(3, train, spoil)
    assert len(set(errors)) == 1
    assert errors[0].startswith("ReplicaMismatchError: the replicas have drifted apart: ")
    assert f"'{name}" in errors[0]
    assert "differs on rank 1 from ranks 0, 2." in errors[0]
    assert "Weights were changed there alone, by an edit, a checkpoint, or an optimizer step that" in errors[0]
    assert errors[0].endswith("to go on from here, load one checkpoint on all of them.")


def test_of_two_ranks_that_differ_neither_is_said_to_be_the_one_that_was_changed():
    (error,) = set(expect_errors(2, train, step_alone))
    assert "differs on rank 1 from rank 0." in error
    assert "Weights were changed on one side alone, by an edit, a checkpoint, or an optimizer step that" in error


def values(world):
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.5)

    def fill(module, _):
        nn.init.constant_(module.weight, 2.0)

    wrapped = DistributedDataParallel(model)
    if world.rank == 2:
        fill(model, None)
    wrapped(torch.ones(1, 1)).sum().backward()


def test_the_error_shows_both_values():
    for error in expect_errors(3, values):
        assert "'weight' differs on rank 2 from ranks 0, 1. An element is 2.0 on rank 2 and 0.5 elsewhere." in error


def steps_until_found(world, num_layers):
    model = deep(num_layers)

    def spoil(module, _):
        with torch.no_grad():
            module[num_layers // 2].weight += 1e-6

    wrapped = DistributedDataParallel(model)
    for k in range(20):
        if k == 2 and world.rank == 1:
            spoil(model, None)
        try:
            wrapped(torch.ones(1, 4)).sum().backward()
        except RuntimeError as error:
            return k - 2, f"'{num_layers // 2}.weight'" in str(error)
    return None


@pytest.mark.parametrize("num_layers", [1, 20, 100])
def test_a_tensor_that_one_rank_has_changed_is_found_within_eight_steps(num_layers):
    for steps, is_named in run_ranks(2, steps_until_found, num_layers):
        assert steps < 8
        assert is_named


def steps_until_a_part_is_found(world, rows):
    """Of a table of 5000 rows, rank 1 changes ``rows``."""
    table = nn.Embedding(5000, 16)
    model = nn.Sequential(table, nn.Linear(16, 1))
    wrapped = DistributedDataParallel(model)
    for k in range(400):
        if k == 2 and world.rank == 1:
            with torch.no_grad():
                table.weight[rows] += 1.0
        try:
            wrapped(torch.arange(4)).sum().backward()
        except RuntimeError as error:
            return k - 2, "'0.weight'" in str(error)
    return None


@pytest.mark.parametrize(
    ("rows", "most"), [(slice(0, 5000, 2), 4), (slice(3000, 3050), 100), (slice(7, 8), 400)], ids=["half", "50", "1"]
)
def test_the_smaller_the_part_that_changed_the_longer_it_takes(rows, most):
    for steps, is_named in run_ranks(2, steps_until_a_part_is_found, rows):
        assert steps < most
        assert is_named


@pytest.mark.parametrize("step", [1, 64, 1000, drift._STEP, 2 * drift._STEP])
def test_each_element_has_its_turn(step):
    assert {drift._start(position, step) for position in range(step)} == set(range(step))


def of_mixed_dtypes(world):
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.complex128]
    model = nn.ParameterList([torch.ones(20, 20, dtype=dtype) for dtype in dtypes])
    wrapped = DistributedDataParallel(model)
    for k in range(6):
        if k == 3 and world.rank == 1:
            with torch.no_grad():
                model[3].mul_(1j)
        wrapped.zero_grad()
        try:
            sum(p.abs().sum().double() for p in model).backward()
        except RuntimeError as error:
            return k, "'3' differs on rank 1" in str(error)
    return None


def test_parameters_of_several_dtypes_are_looked_at_together():
    assert run_ranks(2, of_mixed_dtypes) == [(3, True)] * 2


def of_any_layout(world, make):
    """Ten steps, then rank 1 changes one tensor: the step at which it is found."""
    weight = nn.Parameter(make())
    model = nn.ParameterList([weight])
    wrapped = DistributedDataParallel(model, forward_sync_buffers=False)
    for k in range(20):
        if k == 10 and world.rank == 1:
            with torch.no_grad():
                weight.mul_(2)
        wrapped.zero_grad()
        try:
            model[0].abs().sum().backward()
        except RuntimeError as error:
            return k, "drifted apart: '0' differs on rank 1" in str(error)
    return None


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, 3, 5, 5).to(memory_format=torch.channels_last),
        lambda: torch.ones(8, 8, dtype=torch.complex64).mul(1j).conj(),
        lambda: torch.ones(8, 8, dtype=torch.complex64).mul(1j).conj().imag,
        lambda: torch.ones(20, 20).t()[::2],
        lambda: torch.ones(300)[200:220],
        lambda: torch.tensor(1.0),
    ],
    ids=["channels last", "conjugate", "negative", "strided", "a part of another", "scalar"],
)
def test_tensors_of_any_layout_are_looked_at(make):
    assert run_ranks(2, of_any_layout, make) == [(10, True)] * 2


def resized(world):
    """All keep half of a weight, in the same memory or in other."""
    model = nn.ParameterList([torch.arange(400.0), torch.ones(1)])
    wrapped = DistributedDataParallel(model)
    for k in range(6):
        if k == 2:
            half = model[0].data[:200]
            model[0].data, model[0].grad = half.clone() if world.rank else half, None
        sum(param.sum() for param in wrapped.module).backward()
    return model[0].grad.shape


def test_weights_that_were_resized_alike_are_left_alone():
    assert run_ranks(2, resized) == [(200,)] * 2


def untouched(world, dtype):
    return train(world, lambda *_: None, model=deep(dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_replicas_that_train_alike_are_left_alone(dtype):
    assert run_ranks(2, untouched, dtype) == [12, 12]


def in_another_memory_format(world):
    torch.manual_seed(0)
    model = nn.Conv2d(3, 5, 3)
    if world.rank == 1:
        model = model.to(memory_format=torch.channels_last)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        wrapped(torch.full((2, 3, 4, 4), float(world.rank))).square().mean().backward()
        optimizer.step()
    return True


def test_strides_do_not_count():
    assert run_ranks(2, in_another_memory_format) == [True, True]


def strange(world):
    model = nn.ParameterDict(
        {
            "scalar": nn.Parameter(torch.tensor(1.0)),
            "empty": nn.Parameter(torch.empty(0, 3)),
            "complex": nn.Parameter(torch.ones(2, dtype=torch.complex64)),
            "frozen": nn.Parameter(torch.arange(3), requires_grad=False),
        }
    )

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.params = model

        def forward(self):
            return self.params["scalar"] + self.params["complex"].abs().sum()

    wrapped = DistributedDataParallel(Model())
    for _ in range(3):
        wrapped().backward()
    if world.rank == 1:
        model["frozen"] += 1
    wrapped().backward()


def test_scalars_and_odd_dtypes_are_compared_and_frozen_weights_too():
    for error in expect_errors(2, strange):
        assert "'params.frozen' differs on rank 1 from rank 0. An element is 1 on rank 1 and 0 elsewhere." in error


def switched_off(world):
    return train(world, edit, detect_drift=False), train(world, edit, detect_drift=world.is_main)


def test_it_can_be_switched_off_by_any_rank_for_all():
    assert run_ranks(2, switched_off) == [(12, 12)] * 2


def hooked(world):
    wrapped = DistributedDataParallel(deep())
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    if world.rank == 1:
        edit(wrapped.module, None)
    wrapped(torch.ones(1, 4)).sum().backward()
    return True


def test_with_a_communication_hook_replicas_may_differ():
    assert run_ranks(2, hooked) == [True, True]


def failed_backward(world):
    """A forward and backward that fail before anything was sent do not count, on whichever rank they happen."""
    wrapped = DistributedDataParallel(deep(40))
    for k in range(6):
        if world.rank == 1 and k % 2:
            output = wrapped.module(torch.ones(1, 4))
            torch.autograd.grad(output.sum(), [next(wrapped.parameters())])
        wrapped(torch.ones(1, 4)).sum().backward()
    return True


def test_other_passes_through_the_model_on_one_rank_do_not_matter():
    assert run_ranks(2, failed_backward) == [True, True]
