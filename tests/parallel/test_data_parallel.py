"""DataParallel as torch's, on replicas on the CPU: splitting, replicas, threads, joining, and the wrapper."""

import collections
import copy
import dataclasses
import functools
import gc
import io
import pathlib
import pickle
import re
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional

import paceline
from paceline.errors import DataError, ReplicaError
from paceline.parallel import DataParallel, data_parallel, gather, parallel_apply, patch_torch, replicate, scatter
from support.ranks import run_ranks

TWO = ["cpu", "cpu"]
Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass(frozen=True)
class Record:
    value: torch.Tensor
    name: str = "record"


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


class Fn(nn.Module):
    """A module that calls a function."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, *args, **kwargs):
        return self.fn(*args, **kwargs)


class Affine(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, shift=0.0, *, factor=1.0):
        self.calls += 1
        self.seen = x.size(0)
        return factor * x * self.weight + shift


def rows(count, width=2):
    return torch.arange(count * width, dtype=torch.float32).view(count, width)


def double(*size):
    return torch.randn(size, dtype=torch.float64, requires_grad=True)


# -- the class ------------------------------------------------------------------------------------------------------


def test_it_is_an_instance_of_torchs_class_with_its_arguments():
    wrapped = DataParallel(Affine(), TWO, torch.device("cpu"), 1)
    assert isinstance(wrapped, nn.DataParallel)
    assert paceline.DataParallel is DataParallel
    assert (wrapped.device_ids, wrapped.output_device, wrapped.dim) == (
        [torch.device("cpu")] * 2,
        torch.device("cpu"),
        1,
    )
    assert wrapped.src_device_obj == torch.device("cpu")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("device_ids", [None, [0, 1], ["cuda:0"]])
def test_without_a_device_it_only_calls_the_module(device_ids):
    module = Affine()
    wrapped = DataParallel(module, device_ids)
    assert wrapped.device_ids == []
    wrapped(rows(3))
    assert (module.calls, module.seen) == (1, 3)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_the_functions_name_what_is_missing_without_a_device():
    with pytest.raises(RuntimeError, match=r"no available devices were found; for replicas on the CPU say device_ids="):
        data_parallel(Affine(), rows(2))
    with pytest.raises(DataError, match=r"^device 1: a number is an accelerator's, and there is none here"):
        scatter(rows(2), [1])


def test_devices_must_be_of_one_type_and_hold_data():
    with pytest.raises(DataError, match=r"^devices of one type are expected, not cpu, cuda:0\.$"):
        scatter(rows(2), ["cpu", "cuda:0"])
    with pytest.raises(DataError, match=r"^device 'meta' holds no data"):
        replicate(Affine(), ["meta"])


def test_a_patch_gives_scripts_that_import_torchs_name_this_one():
    with patch_torch():
        assert nn.DataParallel is DataParallel
        assert nn.parallel.DataParallel is DataParallel
        assert nn.parallel.data_parallel is data_parallel
    assert nn.DataParallel is not DataParallel


def test_the_advice_is_given_once(caplog):
    from paceline.parallel.data_parallel import wrapper

    wrapper._advise.cache_clear()
    for devices in (["cpu"], TWO, TWO):
        DataParallel(Affine(), devices)
    assert [record.name for record in caplog.records] == ["paceline.parallel.data_parallel"]
    assert "DistributedDataParallel" in caplog.text
    measured = re.search(r"took ([\d.]+) times as long", caplog.text)[1]
    page = pathlib.Path(__file__).parents[2] / "docs/data-parallel.md"
    assert f"and {measured} times as long with 200 small ones" in page.read_text()
    assert re.search(rf"^\| 200 small layers \|.*\| {measured}\d \|$", page.read_text(), re.MULTILINE)


def test_a_module_elsewhere_is_an_error_that_names_the_tensor():
    module = nn.Linear(1, 1, device="meta")
    for call in (DataParallel(module, TWO), lambda x: data_parallel(module, x, TWO)):
        with pytest.raises(
            RuntimeError,
            match=r"^module must have its parameters and buffers on device cpu \(device_ids\[0\]\) but found one of "
            r"them on device: meta: 'weight'\. Move it there: module\.to\('cpu'\)\.$",
        ):
            call(rows(2, 1))


def test_one_device_calls_the_module_itself():
    module = Affine()
    DataParallel(module, ["cpu"])(rows(3))
    assert module.seen == 3  # what forward assigns stays


# -- scatter --------------------------------------------------------------------------------------------------------


def test_shares_are_torchs_chunks():
    for count in range(1, 20):
        for num in range(1, 8):
            shares = scatter(rows(count), ["cpu"] * num)
            assert [share.tolist() for share in shares] == [chunk.tolist() for chunk in rows(count).chunk(num)]
    (wide, rest) = scatter(rows(2, 3), TWO, dim=1)
    assert (wide.tolist(), rest.tolist()) == ([[0, 1], [3, 4]], [[2], [5]])
    assert [share.shape for share in scatter(rows(0), TWO)] == [(0, 2)]


def test_containers_are_split_part_by_part_and_made_anew():
    x, marker = rows(3, 1), object()
    batch = [
        x,
        (x, 7),
        {"a": x, "empty": []},
        Pair(x, None),
        Record(x),
        collections.UserDict(u=x),
        torch.tensor(5.0),
        marker,
    ]
    first, second = scatter(batch, TWO)
    for share, expected in ((first, [[0], [1]]), (second, [[2]])):
        assert share[0].tolist() == expected
        assert (share[1][0].tolist(), share[1][1]) == (expected, 7)
        assert (share[2]["a"].tolist(), share[2]["empty"]) == (expected, [])
        assert isinstance(share[3], Pair)
        assert (share[3].left.tolist(), share[3].right) == (expected, None)
        assert (share[4].value.tolist(), share[4].name) == (expected, "record")
        assert (type(share[5]), share[5]["u"].tolist()) == (collections.UserDict, expected)
        assert (share[6].item(), share[7]) == (5.0, marker)
    assert batch[4].value is x
    assert scatter("text", TWO) == ["text", "text"]


class Output(collections.OrderedDict):
    """As in transformers: its items are attributes too, and it cannot be updated at once."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.__dict__[key] = value

    def update(self, *args):
        raise TypeError("not at once")


def test_a_dict_of_a_class_of_its_own_keeps_to_its_rules():
    class Makes(nn.Module):
        def forward(self, x):
            output = Output()
            output["logits"] = x
            return output

    joined = DataParallel(Makes(), TWO)(rows(3))
    assert type(joined) is Output
    assert joined.logits is joined["logits"]
    assert joined.logits.tolist() == rows(3).tolist()


def test_a_defaultdict_stays_one():
    batch = collections.defaultdict(list, x=rows(2))
    first, _ = scatter(batch, TWO)
    assert first["new"] == []
    assert gather([first, first], "cpu")["x"].shape == (2, 2)


def test_arguments_that_do_not_split_alike_are_an_error_that_names_both():
    with pytest.raises(
        DataError,
        match=r"^arguments that split alike over 3 devices are expected, but along dimension 0 inputs\[0\] has 5 "
        r"\(2 \+ 2 \+ 1\) and inputs\[1\]\['b'\] has 1 \(1\)\. A tensor that all replicas need whole",
    ):
        scatter((rows(5), {"b": rows(1)}), ["cpu"] * 3)


@pytest.mark.parametrize("counts", [(3, 2), (3, 6)])
def test_samples_are_never_paired_with_those_of_others(counts):
    with pytest.raises(DataError, match=r"inputs\[0\] has 3 \(2 \+ 1\) and inputs\[1\] has "):
        scatter(tuple(map(rows, counts)), TWO)


def test_a_sample_may_have_several_rows():
    shares = scatter((rows(4), rows(8)), TWO)
    assert [tuple(map(len, share)) for share in shares] == [(2, 4), (2, 4)]


def test_shares_are_copies_that_replicas_may_write_into():
    x = rows(4)
    out = DataParallel(Fn(lambda share: share.add_(1)), TWO)(x)
    assert (out - x).tolist() == [[1.0, 1.0]] * 4


def test_scatter_and_gather_are_differentiable_twice():
    assert gradcheck(lambda x: scatter(x, ["cpu"] * 3), double(4, 2))
    assert gradgradcheck(lambda x: scatter(x, ["cpu"] * 3), double(4, 2))
    assert gradgradcheck(lambda x, y: gather((x, y), "cpu"), (double(2, 2), double(1, 2)))
    assert gradgradcheck(lambda x, y: gather((x, y), -1), (double(), double()))


# -- gather ---------------------------------------------------------------------------------------------------------


def test_outputs_are_joined_part_by_part():
    def output(first):
        x = torch.full((2, 1), first)
        return [
            x,
            (x, [x]),
            collections.OrderedDict(a=x, b=[x]),
            Pair(x, None),
            Record(x),
            "same",
            None,
            torch.max(x, 0),
        ]

    joined = gather([output(1.0), output(2.0)], "cpu")
    expected = [[1], [1], [2], [2]]
    for tensor in (joined[0], joined[1][0], joined[1][1][0], joined[2]["a"], joined[2]["b"][0], joined[3].left):
        assert tensor.tolist() == expected
    assert isinstance(joined[1], tuple)
    assert isinstance(joined[2], collections.OrderedDict)
    assert (joined[4].value.tolist(), joined[4].name) == (expected, "record")
    assert joined[5:7] == ["same", None]
    assert joined[7].values.tolist() == [1, 2]


def test_scalars_become_a_vector_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gather([torch.tensor(1.0), torch.tensor(2.0)], "cpu").tolist() == [1, 2]
        assert DataParallel(Fn(lambda x: x.sum()), TWO)(rows(2)).tolist() == [1, 5]
        assert DataParallel(Fn(lambda x: x.sum()), TWO)(rows(1)).tolist() == [1]


def test_outputs_of_different_structure_are_errors_that_name_the_place():
    x = rows(1)
    with pytest.raises(DataError, match=r"^output\[0\]: all dicts must have the same number of keys, and the same"):
        gather([[{"a": x}], [{"a": x, "b": x}]], "cpu")
    with pytest.raises(DataError, match=r"^output\['a'\]: replicas returned different types: Tensor, float\."):
        gather([{"a": x}, {"a": 1.0}], "cpu")
    with pytest.raises(DataError, match=r"^output\.name: replicas returned objects of type str that differ"):
        gather([Record(x, "one"), Record(x, "two")], "cpu")
    with pytest.raises(DataError, match=r"^output: replicas returned objects of type object that differ"):
        gather([object(), object()], "cpu")


# -- replicas -------------------------------------------------------------------------------------------------------


def test_replicas_compute_what_the_module_does_and_have_parameters():
    module = nn.Sequential(nn.Linear(3, 2), nn.Sequential(nn.Linear(2, 2)))
    x = torch.randn(4, 3)
    for detach in (False, True):
        replicas = replicate(module, TWO, detach)
        for index, replica in enumerate(replicas):
            assert torch.equal(replica(x), module(x))
            params = dict(replica.named_parameters())
            assert params.keys() == dict(module.named_parameters()).keys()
            for name, param in module.named_parameters():
                assert (params[name].data_ptr() == param.data_ptr()) == (index == 0)
                assert params[name].requires_grad != detach
    assert replicate(module, []) == []


def test_gradients_of_all_replicas_are_summed_and_unused_ones_stay_none():
    module = nn.ModuleDict({"used": nn.Linear(1, 1), "other": nn.Linear(1, 1)})
    replicas = replicate(module, ["cpu"] * 3)
    sum(replica["used"](torch.ones(1, 1)) * (index + 1) for index, replica in enumerate(replicas)).sum().backward()
    assert module["used"].weight.grad.item() == 6
    assert module["other"].weight.grad is None


def test_frozen_parameters_stay_frozen():
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    for replica in replicate(module, TWO):
        assert (replica.weight.requires_grad, replica.bias.requires_grad) == (True, False)


def test_a_shared_module_is_one_in_each_replica():
    shared = nn.Linear(2, 2, bias=False)
    module = nn.Sequential(shared, shared)
    tied = nn.Linear(2, 2, bias=False)
    tied.weight = shared.weight
    module.append(tied)
    bare = copy.deepcopy(module)
    for replica in replicate(module, TWO):
        assert replica[0] is replica[1]
        assert replica[0].weight is replica[2].weight
    x = torch.randn(4, 2)
    DataParallel(module, TWO)(x).sum().backward()
    bare(x).sum().backward()
    torch.testing.assert_close(shared.weight.grad, bare[0].weight.grad)


def test_buffers_of_replica_0_are_the_modules_and_attributes_are_lost():
    module = Affine()
    wrapped = DataParallel(module, TWO)
    for calls in (1, 2):
        wrapped(rows(4))
        assert module.calls == calls  # not 2 * calls
    assert not hasattr(module, "seen")


def test_running_statistics_are_those_of_replica_0():
    module = nn.BatchNorm1d(2)
    alone = copy.deepcopy(module)
    x = torch.randn(6, 2)
    DataParallel(module, TWO)(x)
    alone(x[:3])
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, alone.get_buffer(name)), name


def test_batch_norm_may_run_twice_before_backward():
    wrapped = DataParallel(nn.BatchNorm1d(2), TWO)
    x = torch.randn(6, 2)
    (wrapped(x).sum() + wrapped(x + 1).square().sum()).backward()
    assert wrapped.module.weight.grad is not None


def test_buffers_that_need_gradients_get_them():
    class Scaled(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.register_buffer("scale", scale)
            self.register_buffer("fixed", scale.detach().clone())

        def forward(self, x):
            return x * self.scale + self.fixed

    module = Scaled(double(3))
    x = torch.randn(2, 3, dtype=torch.float64)
    assert gradcheck(lambda _: DataParallel(module, TWO)(x), (module.scale,))


def test_attributes_set_between_calls_reach_the_replicas():
    module = Fn(lambda x: x)
    wrapped = DataParallel(module, TWO)
    assert wrapped(rows(2)).tolist() == rows(2).tolist()
    module.fn = lambda x: x + 1
    assert wrapped(rows(2)).tolist() == (rows(2) + 1).tolist()
    wrapped.eval()
    modes = []
    module.forward = lambda x: modes.append(module.training) or x
    wrapped(rows(2))
    assert modes == [False, False]


def test_hooks_run_in_each_replica():
    module, sizes = nn.Linear(2, 1), []
    module.register_forward_pre_hook(lambda _, args: sizes.append(args[0].size(0)))
    module.register_forward_hook(lambda _, args, output: output + 1)
    x = rows(3)
    out = DataParallel(module, TWO)(x)
    assert sorted(sizes) == [1, 2]
    torch.testing.assert_close(out, functional.linear(x, module.weight, module.bias) + 1)


def test_a_hook_on_a_parameter_sees_the_sum_once():
    module, seen = Affine(), []
    module.weight.register_hook(lambda grad: seen.append(grad.tolist()))
    DataParallel(module, TWO)(torch.ones(3, 2)).sum().backward()
    assert seen == [[3.0, 3.0]]


@pytest.mark.parametrize(
    ("holder", "keys"),
    [(lambda p, q: nn.ParameterList([p, q]), (0, 1)), (lambda p, q: nn.ParameterDict({"p": p, "q": q}), ("p", "q"))],
)
def test_parameter_lists_and_dicts(holder, keys):
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.data = holder(nn.Parameter(torch.ones(2)), nn.Parameter(torch.full((2,), 2.0)))

        def forward(self, x):
            assert len(self.data) == 2
            assert len(list(self.parameters())) == 2
            return x * self.data[keys[0]] + self.data[keys[1]]

    module = Holds()
    out = DataParallel(module, TWO)(rows(3))
    assert out.tolist() == (rows(3) + 2).tolist()
    out.sum().backward()
    assert module.data[keys[1]].grad.tolist() == [3.0, 3.0]


def test_recurrent_layers():
    bare = nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True)
    module = copy.deepcopy(bare)
    x = torch.randn(4, 5, 3)
    with torch.no_grad():
        torch.testing.assert_close(DataParallel(module, TWO)(x)[0], bare(x)[0])
    DataParallel(module, TWO)(x)[0].square().sum().backward()
    bare(x)[0].square().sum().backward()
    for ours, theirs in zip(module.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_weight_norm_spectral_norm_and_parametrizations():
    bare = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)),
    )
    module = copy.deepcopy(bare)
    x = torch.randn(4, 3)
    torch.testing.assert_close(DataParallel(module, TWO)(x), bare(x))
    for name, buffer in bare.named_buffers():
        assert torch.equal(buffer, module.get_buffer(name)), name


def test_sparse_gradients():
    bare = nn.Embedding(10, 5, sparse=True)
    module = copy.deepcopy(bare)
    index = torch.randint(10, (7, 2))
    DataParallel(module, ["cpu"] * 3)(index).sum().backward()
    bare(index).sum().backward()
    assert module.weight.grad.is_sparse
    torch.testing.assert_close(module.weight.grad.to_dense(), bare.weight.grad.to_dense())


def test_complex_parameters():
    module = Affine()
    module.weight = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
    x = rows(3).to(torch.complex64)
    out = DataParallel(module, TWO)(x)
    assert torch.equal(out, x * module.weight)
    out.abs().sum().backward()
    assert module.weight.grad.is_complex()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_lie_as_the_weights_do(layout):
    module = nn.Conv2d(4, 8, 2).to(memory_format=layout)
    DataParallel(module, TWO)(torch.randn(4, 4, 5, 5)).square().sum().backward()
    assert module.weight.grad.is_contiguous(memory_format=layout)


def test_uninitialised_parameters_are_torchs_error():
    with pytest.raises(RuntimeError, match="Modules with uninitialized parameters"):
        DataParallel(nn.LazyLinear(2), TWO)(rows(2))


def test_double_backward_goes_through_the_replicas():
    module = nn.Linear(4, 1)
    x = torch.ones(2, 4, requires_grad=True)
    out = DataParallel(module, TWO)(x)
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    grad.mean().backward()
    assert module.weight.grad.tolist() == [[0.25] * 4]
    assert module.bias.grad is None  # as of the bare module


def test_replicas_can_be_saved():
    for detach in (False, True):
        torch.save(replicate(nn.Linear(2, 2), TWO, detach), io.BytesIO())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_zero_grad_in_a_replica_warns():
    class Zeroes(nn.Linear):
        def forward(self, x):
            self.zero_grad()
            return super().forward(x)

    with pytest.warns(
        UserWarning, match=r"Calling \.zero_grad\(\) from a module created with nn\.DataParallel\(\) has no"
    ):
        DataParallel(Zeroes(2, 1), TWO)(rows(2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_script_modules_and_graph_modules():
    bare = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    x = torch.randn(3, 2)
    for module in (torch.jit.script(copy.deepcopy(bare)), torch.fx.symbolic_trace(copy.deepcopy(bare))):
        out = DataParallel(module, TWO)(x)
        torch.testing.assert_close(out, bare(x))
        out.sum().backward()
        assert all(param.grad is not None for param in module.parameters())


# -- threads --------------------------------------------------------------------------------------------------------


def test_parallel_apply_takes_arguments_in_collections_or_alone():
    modules = nn.Linear(3, 2), nn.Linear(3, 2)
    inputs = torch.randn(2, 3), torch.randn(1, 3)
    expected = [module(x).tolist() for module, x in zip(modules, inputs, strict=True)]
    for given in (inputs, [(x,) for x in inputs]):
        assert [out.tolist() for out in parallel_apply(modules, given, None)] == expected
    (named,) = parallel_apply([Fn(lambda x, y: x + y)], [1], [{"y": 2}], ["cpu"])
    assert named == 3
    with pytest.raises(AssertionError, match="The number of modules 1 is not equal to the number of inputs 2"):
        parallel_apply(modules[:1], inputs)


def test_replicas_run_at_the_same_time():
    meeting = threading.Barrier(3, timeout=60)
    DataParallel(Fn(lambda x: (meeting.wait(), x)[1]), ["cpu"] * 3)(rows(3))


class CodeError(Exception):
    def __init__(self, code, *, hint):
        super().__init__(code)


def raises(kind, *args, **kwargs):
    def forward(x):
        if x[0, 0] > 0:
            raise kind(*args, **kwargs)
        return x

    return Fn(forward)


def test_an_exception_keeps_its_type_and_says_which_replica():
    with pytest.raises(KeyError, match=r"replica 1 on cpu: 'wonderful'") as caught:
        DataParallel(raises(KeyError, "wonderful"), TWO)(rows(2))
    cause = caught.value.__cause__
    assert (type(cause), cause.args) == (KeyError, ("wonderful",))
    frames = [frame.name for frame in pytest.ExceptionInfo.from_exception(cause).traceback]
    assert frames[-1] == "forward"


def test_all_exceptions_are_told():
    with pytest.raises(ValueError, match=r"^replica 1 on cpu: no\nalso replica 2 on cpu: ValueError: no$"):
        DataParallel(raises(ValueError, "no"), ["cpu"] * 3)(rows(3))


def test_an_exception_that_cannot_be_made_anew_is_a_replica_error():
    with pytest.raises(ReplicaError, match=r"^replica 1 on cpu: 7\n\(CodeError\)$") as caught:
        DataParallel(raises(CodeError, 7, hint="x"), TWO)(rows(2))
    assert isinstance(caught.value.__cause__, CodeError)


def test_a_single_replica_says_so_too():
    with pytest.raises(ValueError, match=r"^replica 0 on cpu: no$"):
        DataParallel(raises(ValueError, "no"), TWO)(rows(2)[1:])


def test_what_ends_a_process_is_passed_on_as_it_is():
    with pytest.raises(SystemExit) as caught:
        DataParallel(raises(SystemExit, 3), TWO)(rows(2))
    assert caught.value.code == 3


def test_no_thread_outlives_an_exception():
    going_on = threading.Event()

    def forward(x):
        if x[0, 0] > 0:
            going_on.set()
            raise ValueError("at once")
        assert going_on.wait(60)
        return x

    with pytest.raises(ValueError, match="at once"):
        DataParallel(Fn(forward), TWO)(rows(2))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica")]


def test_an_interrupted_wait_goes_on_until_the_threads_have_ended(monkeypatch):
    class Interrupted(threading.Thread):
        times = 0

        def join(self, timeout=None):
            if self.is_alive() and Interrupted.times == 0:
                Interrupted.times += 1
                may_end.set()
                raise KeyboardInterrupt
            super().join(timeout)

    may_end = threading.Event()
    monkeypatch.setattr(threading, "Thread", Interrupted)
    ended = []
    with pytest.raises(KeyboardInterrupt):
        DataParallel(Fn(lambda x: (may_end.wait(60), ended.append(1), x)[2]), TWO)(rows(2))
    assert ended == [1, 1]


def test_threads_that_cannot_be_started_leave_none_behind(monkeypatch):
    class Scarce(threading.Thread):
        num_started = 0

        def start(self):
            if Scarce.num_started == 1:
                raise RuntimeError("can't start new thread")
            Scarce.num_started += 1
            super().start()

    monkeypatch.setattr(threading, "Thread", Scarce)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        DataParallel(Fn(lambda x: x), TWO)(rows(2))
    assert Scarce.num_started == 1


def state():
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_device().type,
    )


@pytest.mark.parametrize(
    "context",
    [
        torch.enable_grad,
        torch.no_grad,
        torch.inference_mode,
        functools.partial(torch.autocast, "cpu", dtype=torch.float16, cache_enabled=False),
        functools.partial(torch.device, "meta"),
    ],
)
def test_replicas_run_in_the_callers_state(context):
    seen = []
    wrapped = DataParallel(Fn(lambda x: (seen.append(state()), x)[1]), TWO)
    x = rows(2)
    with context():
        wrapped(x)
        assert seen == [state()] * 2


def test_autocast_and_no_grad():
    wrapped = DataParallel(nn.Linear(2, 2), TWO)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = wrapped(rows(4))
    assert out.dtype is torch.bfloat16
    out.float().sum().backward()
    assert wrapped.module.weight.grad.dtype is torch.float32
    with torch.no_grad():
        assert not wrapped(rows(4)).requires_grad
    with torch.inference_mode():
        wrapped(rows(4))
    wrapped(rows(4)).sum().backward()  # what was copied in inference mode can be differentiated


def test_several_threads_may_call_one_wrapper():
    wrapped = DataParallel(nn.Linear(2, 2), TWO)
    expected, results = wrapped.module(rows(4)).tolist(), []
    callers = [threading.Thread(target=lambda: results.append(wrapped(rows(4)).tolist())) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert results == [expected] * 4


def test_replicas_divide_the_callers_threads():
    before = torch.get_num_threads()
    seen = []
    try:
        torch.set_num_threads(5)
        DataParallel(Fn(lambda x: (seen.append(torch.get_num_threads()), x)[1]), TWO)(rows(2))
        later = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert (seen, later, torch.get_num_threads()) == ([2, 2], [5], 5)
    finally:
        torch.set_num_threads(before)


def who_asks_for_torchs_pool(rank, world_size, directory):
    asked, set_num_threads = [], torch.set_num_threads
    torch.set_num_threads = lambda count: (asked.append(threading.current_thread().name), set_num_threads(count))
    for _ in range(2):
        DataParallel(Affine(), TWO)(rows(2))
    return asked


def test_in_a_forked_process_torchs_pool_is_made_anew_before_there_are_threads():
    # torch would do so in the first replicas, without a lock
    assert run_ranks(1, who_asks_for_torchs_pool, join=False) == [["MainThread"]]


# -- the wrapper ----------------------------------------------------------------------------------------------------


def test_a_batch_of_one_with_a_keyword_equals_the_bare_module():
    out = DataParallel(Affine(), TWO)(rows(1), factor=3.0)
    assert out.tolist() == Affine()(rows(1), factor=3.0).tolist()


def test_36_rows_on_7_replicas_equal_the_bare_module():
    assert DataParallel(Affine(), ["cpu"] * 7)(rows(36), 1.0).tolist() == Affine()(rows(36), 1.0).tolist()


def test_keywords_only_tensors_in_keywords_and_empty_containers():
    module = Fn(lambda data, unused=None: data["x"] + data["y"])
    wrapped = DataParallel(module, TWO)
    for empty in ([], {}, ()):
        assert wrapped(data={"x": rows(3), "y": rows(3), "unused": empty}).tolist() == (2 * rows(3)).tolist()
    assert wrapped({"x": rows(1), "y": rows(1)}, unused=[1, 2, 3]).tolist() == [[0.0, 2.0]]


def test_a_module_without_a_batch_is_called_once():
    wrapped = DataParallel(Fn(lambda size=2: torch.ones(size)), TWO)
    assert wrapped().tolist() == [1, 1]
    assert wrapped(3).tolist() == [1, 1, 1]
    assert wrapped(size=1).tolist() == [1]
    assert data_parallel(Fn(lambda: torch.ones(2)), None, TWO).tolist() == [1, 1]


def test_an_empty_batch_is_one_share():
    assert DataParallel(Affine(), TWO)(rows(0)).shape == (0, 2)


def test_data_parallel_as_a_function():
    module, x = Affine(), rows(5)
    expected = module(x, 1.0, factor=2.0).tolist()
    for devices in (["cpu"], TWO):
        out = data_parallel(module, (x, torch.tensor(1.0)), devices, "cpu", module_kwargs={"factor": 2.0})
        assert out.tolist() == expected
        assert data_parallel(module, x, devices, -1).tolist() == module(x).tolist()


def test_methods_can_be_overridden_as_torchs():
    class Doubles(DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            shares, named = super().scatter(inputs, kwargs, device_ids)
            return [(2 * x,) for (x,) in shares], named

        def gather(self, outputs, output_device):
            return list(outputs)

    assert [out.tolist() for out in Doubles(Affine(), TWO)(torch.ones(2, 2))] == [[[4.0, 6.0]]] * 2


def test_wrappers_within_wrappers():
    bare = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    module = copy.deepcopy(bare)
    nested = DataParallel(nn.Sequential(DataParallel(module, TWO), nn.Tanh()), TWO)
    x = torch.randn(7, 2, dtype=torch.float64)
    out = nested(x)
    torch.testing.assert_close(out, bare(x).tanh())
    out.sum().backward()
    bare(x).tanh().sum().backward()
    for ours, theirs in zip(module.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_states_load_with_and_without_the_prefix():
    source = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    wrapped = DataParallel(copy.deepcopy(source), TWO)
    assert set(wrapped.state_dict()) == {f"module.{name}" for name in source.state_dict()}
    assert wrapped.module.state_dict().keys() == source.state_dict().keys()
    for state in (source.state_dict(), DataParallel(source, TWO).state_dict()):
        names = list(state)
        fresh = DataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), TWO)
        outer = nn.ModuleList([fresh])
        assert (
            str(outer.load_state_dict({f"0.{name}": value for name, value in state.items()}))
            == "<All keys matched successfully>"
        )
        assert torch.equal(fresh.module[0].weight, source[0].weight)
        assert list(state) == names
    with pytest.raises(RuntimeError, match="Unexpected key"):
        wrapped.load_state_dict({**source.state_dict(), "more": torch.ones(1)})


def test_a_wrapper_can_be_copied_and_pickled():
    wrapped = DataParallel(nn.Linear(2, 2), TWO, loss=nn.MSELoss())
    wrapped(rows(3))
    for other in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert torch.equal(other(rows(3)), wrapped(rows(3)))
        other.forward_backward(rows(3), target=rows(3))
        assert wrapped.module.weight.grad is None


def test_calls_leave_no_reference_cycles():
    wrapped = DataParallel(nn.Sequential(nn.Linear(2, 2)), TWO, loss=nn.MSELoss())
    fails = DataParallel(raises(ValueError, "no"), TWO)

    def calls():
        wrapped(rows(3)).sum().backward()
        wrapped.forward_backward(rows(3), target=rows(3))
        try:
            fails(rows(2))
        except ValueError:
            return

    calls()
    gc.collect()
    gc.disable()
    try:
        calls()
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_inside_and_around_torch_compile():
    torch._dynamo.reset()
    bare = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    x = torch.randn(4, 2)
    in_place = copy.deepcopy(bare)
    in_place.compile(backend="eager")
    inside = DataParallel(torch.compile(copy.deepcopy(bare), backend="eager"), TWO, loss=nn.MSELoss())
    around = torch.compile(DataParallel(copy.deepcopy(bare), TWO), backend="eager")
    try:
        for wrapped in (inside, around, DataParallel(in_place, TWO)):
            out = wrapped(x)
            torch.testing.assert_close(out, bare(x))
            out.sum().backward()
            bare.zero_grad()
            bare(x).sum().backward()
            for ours, theirs in zip(wrapped.parameters(), bare.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)
        inside.zero_grad()
        bare.zero_grad()
        inside.forward_backward(x, target=torch.zeros(4, 3))
        functional.mse_loss(bare(x), torch.zeros(4, 3)).backward()
        for ours, theirs in zip(inside.parameters(), bare.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    finally:
        torch._dynamo.reset()
