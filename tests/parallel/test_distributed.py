"""The wrapper: what it takes, what it refuses, buffers, saving, and comparing models by name."""

import copy
import io
import pickle
import re
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline import DistributedDataParallel
from paceline.errors import PlanError, ReductionError, WorldError
from paceline.parallel.replicas.agreement import first_difference, specs_of
from support.ranks import RankError, expect_errors, run_ranks

# -- the same model everywhere --------------------------------------------------------------------------------------


def values_after_wrapping(world):
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].running_mean.fill_(world.rank + 1.0)
    model[1].num_batches_tracked.fill_(world.rank + 5)
    DistributedDataParallel(model)
    return [p.detach() for p in model.parameters()], model[1].running_mean, model[1].num_batches_tracked


def test_wrapping_copies_the_first_ranks_parameters_and_buffers():
    torch.manual_seed(0)
    expected = list(nn.Linear(2, 2).parameters())
    for params, mean, batches in run_ranks(3, values_after_wrapping):
        torch.testing.assert_close(params[:2], [p.detach() for p in expected])
        assert mean.tolist() == [1.0, 1.0]
        assert batches.item() == 5


def without_init_sync(world):
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, world.rank)
    DistributedDataParallel(model, init_sync=False)
    return model.weight.item()


def test_init_sync_false_leaves_parameters_alone():
    assert run_ranks(2, without_init_sync) == [0.0, 1.0]


def build(world, variant):
    layers = {"a": nn.Linear(2, 3), "b": nn.Linear(3, 1)}
    if world.rank == 1:
        if variant == "shape":
            layers["a"] = nn.Linear(3, 3)
        elif variant == "missing":
            del layers["b"]
        elif variant == "surplus":
            layers["c"] = nn.Linear(1, 1, bias=False)
        elif variant == "dtype":
            layers["b"].half()
        elif variant == "frozen":
            layers["b"].bias.requires_grad_(False)
        elif variant == "buffer":
            layers["a"].register_buffer("seen", torch.zeros(4))
    DistributedDataParallel(nn.ModuleDict(layers))


ADVICE = "Build, freeze and replace parameters alike on every rank."


@pytest.mark.parametrize(
    ("variant", "difference"),
    [
        ("shape", "the shape of 'a.weight' is (3, 2) on rank 0 and (3, 3) on rank 1."),
        ("missing", "rank 0 has 'b.weight', of shape (1, 3), and rank 1 has not (4 against 2 parameters and buffers)."),
        ("surplus", "rank 1 has 'c.weight', of shape (1, 1), and rank 0 has not (4 against 5 parameters and buffers)."),
        ("dtype", "the dtype of 'b.weight' is float32 on rank 0 and float16 on rank 1."),
        ("frozen", "requires_grad of 'b.bias' is True on rank 0 and False on rank 1."),
        ("buffer", "rank 1 has 'a.seen', of shape (4,), and rank 0 has not (4 against 5 parameters and buffers)."),
    ],
)
def test_models_built_differently_are_an_error_on_every_rank_that_names_the_first_difference(variant, difference):
    expected = f"ReplicaMismatchError: the ranks' models differ: {difference} {ADVICE}"
    assert expect_errors(2, build, variant) == [expected, expected]


def test_devices_are_told_by_type_and_by_which_of_a_ranks_own_they_are():
    """As on GPUs: each rank has two, of other numbers, and puts the second layer on the other one."""

    class On(NamedTuple):
        device: torch.device
        shape: tuple[int, ...] = ()
        dtype: torch.dtype = torch.float32
        requires_grad: bool = True
        layout: torch.layout = torch.sparse_coo

    def specs(**numbers):
        return specs_of({name: On(torch.device("cuda", number)) for name, number in numbers.items()})

    assert specs(a=0, b=1) == specs(a=2, b=3)
    assert [spec.device for spec in specs(a=1, b=1)] == ["cuda", "cuda"]
    assert [spec.device for spec in specs(b=3, a=2)] == ["cuda 2 of 2", "cuda 1 of 2"]
    difference = first_difference(specs(a=0, b=1, c=1), specs(a=2, b=2, c=3), "rank 0", "rank 1")
    assert difference == "the device of 'b' is cuda 2 of 2 on rank 0 and cuda 1 of 2 on rank 1"
    elsewhere = specs_of({"a": On(torch.device("cpu"))})
    assert first_difference(elsewhere, specs(a=0), "rank 0", "rank 1") == (
        "the device of 'a' is cpu on rank 0 and cuda on rank 1"
    )


def other_order(world):
    layers = [("a", nn.Linear(1, 1, bias=False)), ("b", nn.Linear(1, 1, bias=False))]
    model = nn.ModuleDict(dict(layers if world.is_main else layers[::-1]))
    for layer in model.values():
        nn.init.constant_(layer.weight, 1.0 + world.rank)
    wrapped = DistributedDataParallel(model)
    (model["a"](torch.ones(1, 1)) + 10 * model["b"](torch.ones(1, 1)) * (world.rank + 1)).sum().backward()
    del wrapped
    return {name: (p.item(), p.grad.item()) for name, p in sorted(model.named_parameters())}


def test_parameters_registered_in_another_order_are_matched_by_name():
    assert run_ranks(2, other_order) == [{"a.weight": (1.0, 1.0), "b.weight": (1.0, 15.0)}] * 2


def other_strides(world):
    conv = nn.Conv2d(2, 2, 2, bias=False)
    with torch.no_grad():
        conv.weight.copy_(torch.arange(16.0).view(2, 2, 2, 2) + world.rank)
    if world.rank == 1:
        conv = conv.to(memory_format=torch.channels_last)
    wrapped = DistributedDataParallel(conv)
    factor = torch.arange(16.0).view(2, 2, 2, 2)
    (wrapped.module.weight * factor * (world.rank + 1)).sum().backward()
    return conv.weight.detach().clone(), conv.weight.grad.clone()


def test_another_memory_format_on_one_rank_does_not_mix_up_elements():
    expected = torch.arange(16.0).view(2, 2, 2, 2)
    for weight, grad in run_ranks(2, other_strides):
        torch.testing.assert_close(weight.contiguous(), expected)
        torch.testing.assert_close(grad.contiguous(), expected * 1.5)


# -- buffers ---------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        return self.layer(x) + 0 * self.seen


def buffers(world, forward_sync_buffers):
    wrapped = DistributedDataParallel(Counting(), forward_sync_buffers=forward_sync_buffers)
    seen = wrapped.module.seen
    x = torch.ones(1, 1)
    history = []

    def note(mode):
        seen.fill_(world.rank + 1.0)
        mode()
        history.append(seen.item())

    note(lambda: wrapped(x))
    with torch.no_grad():
        note(lambda: wrapped(x))
    with wrapped.no_sync():
        note(lambda: wrapped(x))
    wrapped.eval()
    note(lambda: wrapped(x))
    return history


def test_buffers_are_copied_before_a_training_forward_only():
    assert run_ranks(2, buffers, True) == [[1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 2.0, 2.0]]


def test_forward_sync_buffers_false_leaves_them_alone():
    assert run_ranks(2, buffers, False) == [[1.0] * 4, [2.0] * 4]


def evaluate_alone(world):
    wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))
    if world.is_main:
        wrapped.eval()
        wrapped(torch.ones(2, 1))
        wrapped.train()
        with torch.no_grad():
            wrapped(torch.ones(2, 1))
    world.barrier()
    return True


def test_one_rank_may_evaluate_alone():
    assert run_ranks(2, evaluate_alone) == [True, True]


def train_in_eval_mode(world):
    wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(1, 1, bias=False), nn.Dropout()))
    wrapped.eval()
    wrapped(torch.ones(1, 1) * (world.rank + 1)).backward()
    return wrapped.module[0].weight.grad.item()


def test_a_backward_in_eval_mode_is_averaged_like_any_other():
    assert run_ranks(2, train_in_eval_mode) == [1.5, 1.5]


def two_forwards(world):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), Scaling())
    wrapped = DistributedDataParallel(model)
    x = torch.ones(3, 2) * torch.arange(3.0).view(3, 1) * (world.rank + 1)
    (wrapped(x) - wrapped(2 * x)).square().mean().backward()
    return True


class Scaling(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(2))
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x) * self.scale  # saved for backward


def test_buffers_may_be_copied_between_a_forward_and_its_backward():
    assert run_ranks(2, two_forwards) == [True, True]


class LateBuffer(Counting):
    def forward(self, x):
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.zeros(1))
        return super().forward(x)


def late_buffer(world):
    wrapped = DistributedDataParallel(LateBuffer())
    for number in range(2):
        wrapped(torch.ones(1, 1)).backward()
        if number == 0:
            wrapped.module.late.fill_(world.rank + 4.0)
    return wrapped.module.late.item()


def test_a_buffer_made_in_the_first_forward_is_copied_from_the_second_on():
    assert run_ranks(2, late_buffer) == [4.0, 4.0]


def buffer_changed_on_one(world, change):
    wrapped = DistributedDataParallel(Counting())
    if world.rank == 1:
        if change == "dtype":
            wrapped.module.seen = torch.zeros(1, dtype=torch.float64)
        elif change == "shape":
            wrapped.module.seen = torch.zeros(3)
        else:
            del wrapped.module.seen
            wrapped.module.seen = 0.0
    wrapped(torch.ones(1, 1)).sum().backward()


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ("dtype", "the dtype of 'seen' is float32 on rank 0 and float64 on rank 1."),
        ("shape", "the shape of 'seen' is (1,) on rank 0 and (3,) on rank 1."),
        ("gone", "rank 0 has 'seen', of shape (1,), and rank 1 has not (3 against 2 parameters and buffers)."),
    ],
)
def test_a_buffer_that_changed_on_one_rank_is_an_error_that_names_it(change, difference):
    expected = f"ReplicaMismatchError: the ranks' models differ: {difference} {ADVICE}"
    assert expect_errors(2, buffer_changed_on_one, change) == [expected] * 2


def buffers_cast_on_all(world):
    wrapped = DistributedDataParallel(Counting())
    wrapped.double()
    seen = []
    for _ in range(2):
        wrapped.module.seen.fill_(world.rank + 1.0)
        wrapped(torch.ones(1, 1, dtype=torch.float64)).backward()
        seen.append(wrapped.module.seen.item())
    return seen[1], str(wrapped.module.seen.dtype)


def test_buffers_cast_on_all_ranks_are_copied_again_after_one_backward():
    assert run_ranks(2, buffers_cast_on_all) == [(1.0, "torch.float64")] * 2


def own_buffers(world):
    layer = nn.Linear(1, 1, bias=False)
    layer.register_buffer("local", torch.zeros(world.rank + 1))
    with pytest.warns(FutureWarning):
        wrapped = DistributedDataParallel(layer, broadcast_buffers=False)
    wrapped(torch.ones(1, 1) * (world.rank + 1)).backward()
    return layer.weight.grad.item()


def test_buffers_that_are_never_copied_may_differ():
    assert run_ranks(2, own_buffers) == [1.5, 1.5]


def odd_layouts(world):
    model = nn.Module()
    model.column = nn.Parameter(torch.arange(6.0)[::2] + world.rank)
    model.register_buffer("strided", (torch.arange(6.0).view(3, 2) + world.rank)[:, 0])
    model.register_buffer("conjugate", torch.tensor([1 + 1j * (world.rank + 1)]).conj())
    wrapped = DistributedDataParallel(model)
    (model.column * (world.rank + 1)).sum().backward()
    del wrapped
    grad = model.column.grad.tolist()
    return model.column.tolist(), model.strided.tolist(), model.conjugate.tolist(), grad


def test_tensors_that_are_strided_or_conjugate():
    expected = ([0.0, 2.0, 4.0], [0.0, 2.0, 4.0], [1 - 1j], [1.5, 1.5, 1.5])
    assert run_ranks(2, odd_layouts) == [expected] * 2


def unequal_forwards(world):
    wrapped = DistributedDataParallel(Counting())
    if world.is_main:
        return
    wrapped(torch.ones(1, 1))
    return


@pytest.mark.slow  # the first rank waits ten seconds for the other before it leaves
def test_a_training_forward_that_the_first_rank_does_not_run_is_an_error_that_names_the_buffers():
    with pytest.raises(RankError) as caught:
        run_ranks(2, unequal_forwards)
    assert re.search(
        r"ReductionError: rank 1: the buffers \('seen' to 'seen'\) could not be copied from the first rank\. Either "
        r"another rank has ended, and its output says why, or the ranks run unequal numbers of training forwards: call "
        r"eval\(\), or use no_grad\(\), where a rank evaluates\. The backend reports: \S",
        str(caught.value),
    )


# -- torch's call ----------------------------------------------------------------------------------------------------


def refusals(world):
    model = nn.Linear(1, 1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    wide = dist.device_mesh.init_device_mesh("cpu", (2, 1))
    cases = {
        "nothing to train": lambda: DistributedDataParallel(nn.Linear(1, 1).requires_grad_(False)),
        "lazy": lambda: DistributedDataParallel(nn.LazyLinear(1)),
        "two devices": lambda: DistributedDataParallel(model, device_ids=[0, 1]),
        "device of a CPU module": lambda: DistributedDataParallel(model, device_ids=[0]),
        "negative cap": lambda: DistributedDataParallel(model, bucket_cap_mb=-1),
        "two groups": lambda: DistributedDataParallel(model, process_group=dist.group.WORLD, device_mesh=mesh),
        "two dimensions": lambda: DistributedDataParallel(model, device_mesh=wide),
    }
    told = {}
    for name, call in cases.items():
        try:
            call()
        except Exception as error:
            told[name] = type(error), str(error).partition(", but got DeviceMesh")[0]
    return told


def test_what_torch_refuses_is_refused():
    assert run_ranks(2, refusals)[1] == {
        "nothing to train": (
            RuntimeError,
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient.",
        ),
        "lazy": (
            RuntimeError,
            "the module has uninitialised parameters, of unknown shapes. Run one forward pass before wrapping it.",
        ),
        "two devices": (
            ValueError,
            "device_ids=[0, 1], output_device=None: expected None or one device: each rank trains on its own.",
        ),
        "device of a CPU module": (
            ValueError,
            "device_ids=[0], output_device=None: they are for a module on one GPU, but its parameters are on cpu. "
            "Leave them out.",
        ),
        "negative cap": (PlanError, "bucket_cap_mb=-1: expected MiB, not less than 0."),
        "two dimensions": (RuntimeError, "Only 1D device mesh is supported"),
        "two groups": (RuntimeError, "Cannot specify both process_group and device_mesh arguments."),
    }


def test_without_a_process_group_the_error_says_what_to_call():
    with pytest.raises(WorldError, match=r"^there is no process group yet: call paceline.init\(\) before wrapping"):
        DistributedDataParallel(nn.Linear(1, 1))


def test_a_world_of_one_is_the_bare_module():
    with paceline.init(device="cpu"):
        model = nn.Linear(2, 2)
        wrapped = DistributedDataParallel(model)
        with wrapped.no_sync():
            wrapped(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
        assert list(wrapped.state_dict()) == ["module.weight", "module.bias"]


def warns(world):
    model = nn.Linear(1, 1)
    with pytest.warns(FutureWarning, match="use `forward_sync_buffers`"):
        wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    with pytest.warns(FutureWarning, match="check_reduction is not needed"):
        DistributedDataParallel(model, check_reduction=True)
    return wrapped.forward_sync_buffers, wrapped.broadcast_buffers


def test_deprecated_arguments_warn():
    assert run_ranks(2, warns) == [(False, False)] * 2


def accepted_without_effect(world):
    wrapped = DistributedDataParallel(
        nn.Linear(1, 1, bias=False),
        find_unused_parameters=True,
        static_graph=True,
        gradient_as_bucket_view=True,
        skip_all_reduce_unused_params=True,
    )
    wrapped._set_static_graph()
    wrapped(torch.ones(1, 1) * (world.rank + 1)).backward()
    with pytest.raises(RuntimeError, match=r"^_set_static_graph\(\) should be called before training loop starts"):
        wrapped._set_static_graph()
    return wrapped.module.weight.grad.item()


def test_modes_that_are_not_needed_are_accepted():
    assert run_ranks(2, accepted_without_effect) == [1.5, 1.5]


def subgroups(world):
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    wrapped = DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=groups[world.rank % 2])
    grads = []
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(torch.ones(1, 1) * (world.rank + 1)).backward()
        grads.append(wrapped.module.weight.grad.item())
    return grads


def test_groups_of_ranks_train_apart():
    assert run_ranks(4, subgroups) == [[2.0, 2.0], [3.0, 3.0], [2.0, 2.0], [3.0, 3.0]]


def mesh(world):
    device_mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    wrapped = DistributedDataParallel(nn.Linear(1, 1, bias=False), device_mesh=device_mesh)
    wrapped(torch.ones(1, 1) * (world.rank + 1)).backward()
    return wrapped.module.weight.grad.item(), wrapped.device_mesh is device_mesh


def test_a_device_mesh_instead_of_a_group():
    assert run_ranks(2, mesh) == [(1.5, True)] * 2


class Pickled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return self.layer(x)


def saved_and_loaded(world):
    wrapped = DistributedDataParallel(Pickled(), static_graph=True)
    x = torch.ones(1, 1) * (world.rank + 1)
    wrapped(x).backward()
    file = io.BytesIO()
    torch.save(wrapped, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    seen = []
    for copied in (again, copy.deepcopy(wrapped), pickle.loads(pickle.dumps(again))):
        copied.zero_grad()
        copied(x).backward()
        seen.append(copied.module.layer.weight.grad.item())
    return seen


def test_a_saved_wrapper_still_reduces_after_loading():
    assert run_ranks(2, saved_and_loaded) == [[1.5] * 3] * 2


def ignored(world):
    model = nn.ModuleDict({"shared": nn.Linear(1, 1, bias=False), "own": nn.Linear(1, 1, bias=False)})
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["own.weight"])
    nn.init.constant_(model["own"].weight, world.rank)
    wrapped = DistributedDataParallel(model)
    x = torch.ones(1, 1) * (world.rank + 1)
    for _ in range(2):
        wrapped.zero_grad()
        (model["shared"](x) + model["own"](x)).backward()
    return model["own"].weight.item(), model["shared"].weight.grad.item(), model["own"].weight.grad.item()


def test_ignored_parameters_stay_local():
    assert run_ranks(2, ignored) == [(0.0, 1.5, 1.0), (1.0, 1.5, 2.0)]


def module_swapped(world):
    wrapped = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    wrapped.module = nn.Linear(1, 1, bias=False)
    wrapped(torch.ones(1, 1) * (world.rank + 1)).backward()
    return wrapped.module.weight.grad.item(), wrapped.module.weight.item()


def test_another_module_put_into_the_wrapper_is_averaged_too():
    (grad, weight), other = run_ranks(2, module_swapped)
    assert (grad, weight) == other
    assert grad == 1.5


def copied_in_no_sync(world):
    wrapped = DistributedDataParallel(Pickled())
    with wrapped.no_sync():
        copied = copy.deepcopy(wrapped)
    copied(torch.ones(1, 1) * (world.rank + 1)).backward()
    return copied.module.layer.weight.grad.item()


def test_a_copy_made_within_no_sync_averages():
    assert run_ranks(2, copied_in_no_sync) == [1.5, 1.5]


def copied_in_subgroup(world):
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    wrapped = DistributedDataParallel(Pickled(), process_group=groups[world.rank % 2])
    copied = copy.deepcopy(wrapped)
    copied(torch.ones(1, 1) * (world.rank + 1)).backward()
    return copied.module.layer.weight.grad.item()


def test_a_copy_stays_in_its_group():
    assert run_ranks(4, copied_in_subgroup) == [2.0, 3.0, 2.0, 3.0]


def copied_on_one(world):
    wrapped = DistributedDataParallel(Pickled())
    if world.is_main:
        average = copy.deepcopy(wrapped).eval()
        average(torch.ones(1, 1))
        average.train()
        with torch.no_grad():
            average(torch.ones(1, 1))
        with pytest.raises(
            ReductionError, match=r"^rank 0: a backward through a copied or loaded Dist.* that has not joined"
        ):
            average.module(torch.ones(1, 1)).backward()
    world.barrier(timeout=10)
    wrapped(torch.ones(1, 1) * (world.rank + 1)).backward()
    return wrapped.module.layer.weight.grad.item()


def test_one_rank_may_copy_a_wrapper_and_evaluate_the_copy():
    assert run_ranks(2, copied_on_one) == [1.5, 1.5]
