"""What other people's code does with torch's wrapper, it can do with this one."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel.distributed import _MixedPrecision

from paceline import DistributedDataParallel
from paceline.parallel import patch_torch
from support.ranks import expect_errors, run_ranks

TORCHS = nn.parallel.DistributedDataParallel


def linear(*size):
    model = nn.Linear(*size, bias=False)
    nn.init.constant_(model.weight, 1.0)
    return model


# -- the class ------------------------------------------------------------------------------------------------------


def kinship(world):
    model = DistributedDataParallel(linear(1, 1))
    return isinstance(model, TORCHS), isinstance(TORCHS(linear(1, 1)), DistributedDataParallel)


def test_it_is_an_instance_of_torchs_class_and_torchs_is_none_of_it():
    assert run_ranks(1, kinship) == [(True, False)]


def test_importing_paceline_patches_nothing():
    assert nn.parallel.DistributedDataParallel is TORCHS
    assert issubclass(DistributedDataParallel, TORCHS)


def patched(world):
    with patch_torch():
        from torch.nn.parallel import DistributedDataParallel as Named

        inside = type(Named(linear(1, 1))) is DistributedDataParallel, nn.SyncBatchNorm(1).__module__
    outside = nn.parallel.DistributedDataParallel is TORCHS
    patch = patch_torch()
    again = nn.parallel.DistributedDataParallel is DistributedDataParallel
    patch.undo()
    patch.undo()
    return *inside, outside, again, nn.parallel.DistributedDataParallel is TORCHS


def test_a_patch_gives_scripts_that_import_torchs_name_this_one():
    assert run_ranks(1, patched) == [(True, "paceline.parallel.sync_batchnorm", True, True, True)]


def private(world):
    model = DistributedDataParallel(linear(1, 1))
    return [hasattr(model, name) for name in ("_get_ddp_logging_data", "_register_buffer_comm_hook", "logger")]


def test_what_is_private_to_torchs_machinery_is_not_there():
    assert run_ranks(1, private) == [[False, False, False]]


def helpers(world):
    model = DistributedDataParallel(linear(1, 1))
    assert model.train(mode=False) is model
    assert not model.module.training
    (moved,), (named,) = model.to_kwargs((torch.ones(1),), {"shift": torch.zeros(1)}, 0)
    return moved[0].tolist(), named["shift"].tolist()


def test_torchs_other_public_methods_are_there():
    assert run_ranks(1, helpers) == [([1.0], [0.0])]


def as_lightning_does(world):
    """Prepares the reducer by hand for a backward that no forward of the wrapper precedes."""
    model = DistributedDataParallel(linear(1, 1))
    output = model.module(torch.full((1, 1), world.rank + 1.0))
    if torch.is_grad_enabled() and model.require_backward_grad_sync:
        model.require_forward_param_sync = True
        model.reducer._rebuild_buckets()
        model.reducer.prepare_for_backward([output])
    output.sum().backward()
    return model.module.weight.grad.item()


@pytest.mark.parametrize("size", [1, 2])
def test_code_that_prepares_torchs_reducer_by_hand_works(size):
    assert run_ranks(size, as_lightning_does) == [(1 + size) / 2] * size


# -- arguments ------------------------------------------------------------------------------------------------------


def with_arguments(world, **kwargs):
    model = nn.Sequential(linear(2, 2), linear(2, 1))
    if kwargs.pop("delays", False):
        kwargs["delay_all_reduce_named_params"] = [("0.weight", model[0].weight)]
        kwargs["param_to_hook_all_reduce"] = model[1].weight
    wrapped = DistributedDataParallel(model, **kwargs)
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(torch.full((1, 2), world.rank + 1.0)).sum().backward()
    return [param.grad.tolist() for param in model.parameters()]


AVERAGE = [[[1.5, 1.5], [1.5, 1.5]], [[3.0, 3.0]]]


def caps(world):
    return with_arguments(world, bucket_cap_mb_list=[0, 1])


def delayed(world):
    return with_arguments(world, delays=True)


def batched(world):
    return with_arguments(world, batched_grad_copy=True, bucket_cap_mb=1)


@pytest.mark.parametrize("case", [caps, delayed, batched])
def test_arguments_that_choose_how_gradients_travel_change_no_gradient(case):
    assert run_ranks(2, case) == [AVERAGE, AVERAGE]


def bucket_shapes(world):
    shapes = []

    def hook(_, bucket):
        shapes.append([tuple(param.shape) for param in bucket.parameters()])
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    mib = 1 << 18  # elements
    model = nn.ParameterList([nn.Parameter(torch.zeros(mib)) for _ in range(6)])
    wrapped = DistributedDataParallel(_Sum(model), bucket_cap_mb_list=[1, 3, 2])
    wrapped.register_comm_hook(None, hook)
    wrapped().backward()
    return [len(bucket) for bucket in shapes]


class _Sum(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.params = params

    def forward(self):
        return sum(param.sum() for param in self.params)


def test_a_list_of_caps_counts_in_the_order_in_which_gradients_arrive():
    assert run_ranks(1, bucket_shapes) == [[1, 3, 2]]


def refused(world, kind):
    model = linear(1, 1)
    if kind == "delays":
        DistributedDataParallel(model, param_to_hook_all_reduce=model.weight)
    elif kind == "caps":
        DistributedDataParallel(model, bucket_cap_mb_list=[1, -1])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("delays", "ValueError: delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same"),
        ("caps", "PlanError: bucket_cap_mb_list=[1, -1]: expected MiB, none less than 0."),
    ],
)
def test_arguments_that_contradict_themselves_are_refused(kind, message):
    for error in expect_errors(2, refused, kind):
        assert error.startswith(message)


# -- saving and copying ---------------------------------------------------------------------------------------------


def pickled_over_a_group(world):
    model = DistributedDataParallel(linear(1, 1), process_group=dist.new_group([0, 1]))
    copy.deepcopy(model)
    pickle.dumps(model)


def test_a_wrapper_over_another_group_is_not_pickled_without_it():
    for error in expect_errors(2, pickled_over_a_group):
        assert error.startswith("RuntimeError: a DistributedDataParallel over another process group than the default")


def regrouped(world):
    model = DistributedDataParallel(linear(1, 1))
    pair = dist.new_group([0, 1])
    if world.rank < 2:
        model._update_process_group(pair)
        model(torch.full((1, 1), world.rank + 1.0)).sum().backward()
        return model.module.weight.grad.item()
    return None


def test_a_wrapper_may_go_on_over_fewer_ranks():
    assert run_ranks(3, regrouped) == [1.5, 1.5, None]


# -- precision ------------------------------------------------------------------------------------------------------


def in_low_precision(world, reduce_dtype):
    torch.manual_seed(0)
    seen = []

    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x, *, shift):
            seen.extend([x.dtype, shift.dtype, self.inner.weight.dtype, self.norm.running_mean.dtype])
            return self.inner(x) + shift

    model = Spy()
    config = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, buffer_dtype=torch.bfloat16)
    wrapped = DistributedDataParallel(model, mixed_precision=config)
    output = wrapped(torch.ones(1, 4) * (world.rank + 1), shift=torch.ones(4))
    output.sum().backward()
    grad = model.inner.weight.grad
    return seen, output.dtype, model.inner.weight.dtype, grad.dtype, grad[0].tolist()


@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_mixed_precision_computes_in_few_bits_and_keeps_weights_in_all(reduce_dtype):
    for seen, output, weight, grad, values in run_ranks(2, in_low_precision, reduce_dtype):
        assert seen == [torch.bfloat16] * 4
        assert (output, weight, grad) == (torch.bfloat16, torch.float32, torch.float32)
        assert values == [1.5] * 4


# -- optimizers within backward -------------------------------------------------------------------------------------


def in_backward(world):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of itself when it is imported
        from torch.distributed.optim import _apply_optimizer_in_backward
    model = nn.Sequential(linear(1, 1), linear(1, 1))
    _apply_optimizer_in_backward(torch.optim.SGD, model[0].parameters(), {"lr": 0.5})
    wrapped = DistributedDataParallel(model)
    for _ in range(2):
        wrapped(torch.full((1, 1), world.rank + 1.0)).sum().backward()
    return model[0].weight.item(), model[0].weight.grad, model[1].weight.grad.item()


def test_an_optimizer_within_backward_steps_with_the_average():
    # x = 1, 2: 0.weight 1 -> 1 - 0.5 * 1.5 = 0.25 -> -0.5; 1.weight's gradient is 1.5 * 1 + 1.5 * 0.25.
    assert run_ranks(2, in_backward) == [(-0.5, None, 1.875)] * 2


# -- compilers and meshes -------------------------------------------------------------------------------------------


def compiled(world, outside):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    reference = copy.deepcopy(model)
    if outside:
        wrapped = DistributedDataParallel(model)
        run = torch.compile(wrapped, backend="aot_eager")
    else:
        run = wrapped = DistributedDataParallel(torch.compile(model, backend="aot_eager"))
    xs = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]])]
    for _ in range(3):
        wrapped.zero_grad()
        run(xs[world.rank]).sum().backward()
    (reference(torch.cat(xs)).sum() / 2).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])
    return True


@pytest.mark.parametrize("outside", [True, False])
def test_it_works_around_compiled_models_and_inside_of_compiled_ones(outside):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run_ranks(2, compiled, outside, timeout_s=100) == [True, True]


def over_a_slice(world):
    """Rows of the model split over one dimension of a mesh, data over the other."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(2, 4, bias=False))
    whole = model[0].weight.detach().clone()
    model = parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    wrapped = DistributedDataParallel(model, device_mesh=mesh["dp"])
    (param,) = wrapped.parameters()
    seen = []
    for _ in range(3):
        param.grad = None
        wrapped(torch.full((1, 2), mesh.get_local_rank("dp") + 1.0)).sum().backward()
        seen.append(param.grad.tolist())
    return tuple(whole.shape), seen


def test_it_composes_with_a_model_that_is_split_over_another_dimension_of_the_mesh():
    for shape, seen in run_ranks(4, over_a_slice, timeout_s=60):
        assert shape == (4, 2)
        assert seen == [[[1.5, 1.5], [1.5, 1.5]]] * 3


def loads_with_and_without_the_prefix(world):
    source = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    plain = {name: value + 1.0 for name, value in source.state_dict().items()}
    for state in (plain, {f"module.{name}": value for name, value in plain.items()}):
        names = list(state)
        outer = nn.ModuleList([wrapped])
        said = outer.load_state_dict({f"0.{name}": value for name, value in state.items()})
        assert str(said) == "<All keys matched successfully>"
        assert torch.equal(wrapped.module[0].weight, source[0].weight + 1.0)
        assert list(state) == names
    with pytest.raises(RuntimeError, match="Unexpected key"):
        wrapped.load_state_dict({**plain, "more": torch.ones(1)})
    return True


def test_states_load_with_and_without_the_prefix():
    assert run_ranks(1, loads_with_and_without_the_prefix) == [True]
