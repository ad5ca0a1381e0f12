"""Which dtype each function has within a model under O1, and that nothing else is touched."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline import amp
from paceline.errors import AmpError

HALVES = [torch.float16, torch.bfloat16]
FLOAT = torch.float32


@pytest.fixture(autouse=True)
def off():
    yield
    amp.deactivate()
    amp.functions._registered.clear()


class Calls(nn.Module):
    """Calls a function, and notes the dtype of what it returns."""

    def __init__(self, fn, *layers):
        super().__init__()
        self.fn, self.layers = fn, nn.ModuleList(layers)
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, *args):
        output = self.fn(*args)
        self.seen = output.dtype
        return output


def dtype_within(fn, *args, half=torch.float16, layers=()):
    model = amp.initialize(Calls(fn, *layers), patch_torch_functions_type=half, verbosity=0)
    model(*args)
    return model.seen


def square(dtype):
    return torch.rand(4, 4).add(0.5).to(dtype).requires_grad_()


OTHER = torch.rand(4, 4)
CONV = nn.Conv2d(1, 2, 3)
GIVES_HALF = {
    "linear": lambda x: F.linear(x, OTHER),
    "matmul": lambda x: x.matmul(OTHER),
    "@ from the right": lambda x: OTHER @ x,
    "mv": lambda x: x.mv(OTHER[0]),
    "addmv": lambda x: torch.addmv(OTHER[0], x, OTHER[0]),
    "bmm": lambda x: torch.bmm(x[None], OTHER[None]),
    "conv2d": lambda x: CONV(x[None, None]),
    "prelu": lambda x: F.prelu(F.linear(x, OTHER), OTHER[0, :1]),
}
GIVES_FLOAT = {
    "softmax": lambda x: F.softmax(x, dim=1),
    "softmax of a tensor": lambda x: x.softmax(1),
    "log_softmax": lambda x: torch.log_softmax(x, 1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "group_norm": nn.GroupNorm(2, 4),
    "mse_loss": lambda x: F.mse_loss(x, OTHER),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long)),
    "pow": lambda x: x.pow(2.0),
    "**": lambda x: x**2.0,
    "2 **": lambda x: 2.0**x,
    "sum": lambda x: x.sum(),
    "torch.sum": lambda x: torch.sum(x, dim=1),
    "exp": torch.exp,
    "norm": lambda x: x.norm(),
    "cumsum": lambda x: x.cumsum(0),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.clamp(0.0, 1.0), OTHER),
}
MATCHES = {
    "relu": F.relu,
    "batch_norm": lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4), training=True),
    "mul by a number": lambda x: x * 2,
    "max": lambda x: x.max(),
}
WIDENS = {
    "mul": torch.mul,
    "add": lambda x, y: x + y,
    "atan2": torch.atan2,
    "atan2 of a tensor": lambda x, y: x.atan2(y),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y]),
    "dot": lambda x, y: torch.dot(x[0], y[0]),
    "bilinear": lambda x, y: F.bilinear(x, y, torch.ones(2, 4, 4, dtype=x.dtype)),
    "addcmul": lambda x, y: torch.addcmul(x, y, y),
    "eq": lambda x, y: torch.eq(x, y).to(torch.promote_types(x.dtype, y.dtype)),
}


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_functions_that_gain_from_fewer_bits_have_them(half):
    for name, fn in GIVES_HALF.items():
        for dtype in (FLOAT, half):
            assert dtype_within(fn, square(dtype), half=half, layers=[CONV]) == half, name


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_functions_that_need_them_have_all_bits(half):
    for name, fn in GIVES_FLOAT.items():
        for dtype in (FLOAT, half):
            x = square(dtype)
            model = amp.initialize(Calls(fn), patch_torch_functions_type=half, verbosity=0)
            output = model(x)
            output.sum().backward()
            assert (model.seen, x.grad.dtype) == (FLOAT, dtype), name


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_the_rest_follow_their_input(half):
    for name, fn in MATCHES.items():
        for dtype in (FLOAT, half):
            assert dtype_within(fn, square(dtype), half=half) == dtype, name


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_of_several_tensors_the_widest_counts(half):
    for name, fn in WIDENS.items():
        for first in (FLOAT, half):
            for second in (FLOAT, half):
                widest = FLOAT if FLOAT in (first, second) else half
                assert dtype_within(fn, square(first), square(second), half=half) == widest, name


def test_in_place_the_tensor_that_is_written_counts():
    assert dtype_within(lambda x: x.clone().add_(OTHER), square(torch.float16)) == torch.float16


def test_where_a_result_is_written_to_a_tensor_of_the_callers_nothing_is_cast():
    def sum_into(x):
        told = torch.zeros(3, dtype=torch.float16)
        torch.sum(x.half(), 0, out=told)
        return told

    assert Calls(sum_into)(torch.ones(2, 3)).tolist() == [2.0] * 3


def test_large_sums_do_not_overflow():
    model = amp.initialize(Calls(lambda x: F.linear(x, torch.full((1, 1), 300.0)).pow(2.0).sum()), verbosity=0)
    assert model(torch.full((4, 1), 100.0)).item() == 4 * 30_000.0**2


def test_outputs_are_float32_and_so_are_the_weights_and_their_gradients():
    model = amp.initialize(nn.Linear(4, 4), verbosity=0)
    output = model(square(FLOAT))
    output.sum().backward()
    assert {output.dtype, model.weight.dtype, model.weight.grad.dtype} == {FLOAT}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_outputs_have_the_dtype_that_was_asked_for(dtype):
    for level in ("O0", "O1", "O3"):
        model = amp.initialize(nn.Linear(4, 4), opt_level=level, cast_model_outputs=dtype, verbosity=0)
        assert model(torch.ones(1, 4)).dtype == dtype


def test_another_module_stays_float32_and_deactivating_restores_torch():
    """One of two modules under O1: no function of torch is another one, during or after."""
    names = [(F, "linear"), (F, "softmax"), (torch, "matmul"), (torch.Tensor, "sum"), (torch.Tensor, "__matmul__")]
    before = [getattr(place, name) for place, name in names]
    hooks = torch.nn.modules.module._global_module_registration_hooks
    hooks_before = list(hooks)
    other, inner = nn.Linear(4, 4), nn.Linear(4, 4)
    seen = []
    other.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    inner.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model = amp.initialize(nn.Sequential(inner), verbosity=0)
    x = torch.ones(1, 4)
    other(x)
    model(x)
    other(model(x))
    assert seen == [FLOAT, torch.float16, torch.float16, FLOAT]
    assert [getattr(place, name) for place, name in names] == before
    amp.deactivate()
    seen.clear()
    model(x)
    assert seen == [FLOAT]
    assert not {"forward", "_replicate_for_data_parallel"} & vars(model).keys()
    assert not model._state_dict_hooks
    assert list(hooks) == hooks_before
    assert model.forward.__func__ is nn.Sequential.forward


def test_after_an_exception_within_nothing_is_cast():
    model = amp.initialize(Calls(lambda x: x @ "no tensor"), verbosity=0)
    with pytest.raises(TypeError):
        model(OTHER)
    assert (OTHER @ OTHER).dtype == FLOAT
    assert OTHER.half().sum().dtype == torch.float16


def test_casts_can_be_disabled_within():
    def fn(x):
        with amp.disable_casts():
            assert x.half().sum().dtype == torch.float16
            return x @ OTHER

    assert dtype_within(fn, square(FLOAT)) == FLOAT


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_compute_the_same_in_backward(use_reentrant):
    class Model(nn.Module):
        def __init__(self, saves_memory):
            super().__init__()
            self.weight, self.saves_memory = nn.Parameter(torch.ones(4, 4)), saves_memory

        def layer(self, x):
            probabilities = (x @ self.weight).softmax(1)
            seen.append(probabilities.dtype)
            return probabilities.square()

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=use_reentrant) if self.saves_memory else self.layer(x)

    seen = []
    results = []
    for saves_memory in (False, True):
        model = Model(saves_memory)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = amp.initialize(model, optimizer, loss_scale=4.0, verbosity=0)
        x = torch.arange(16.0).view(4, 4).requires_grad_()
        loss = model(x).sum()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        results.append((loss, x.grad, model.weight.grad))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert seen == [FLOAT] * 3


# -- caches: a weight that is used twice, an evaluation between two steps --------------------------------------------


@pytest.mark.parametrize("dtype", [FLOAT, torch.float16], ids=str)
@pytest.mark.parametrize(
    "ops",
    [lambda x, w: x.mm(w).mm(w).sum(), lambda x, w: (x + w.pow(2) + w.pow(2)).sum(), lambda x, w: (x * w * w).sum()],
    ids=["half", "float", "widest"],
)
def test_gradients_are_right_around_an_evaluation(ops, dtype):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.arange(16.0).view(4, 4).div(16).to(dtype))

        def forward(self, x):
            return ops(x, self.weight)

    amp._amp_state.allow_incoming_model_not_fp32 = True
    model = Model()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), verbosity=0)
    amp._amp_state.allow_incoming_model_not_fp32 = False
    amp._amp_state.loss_scalers[0]._loss_scale = 4.0
    x = torch.ones(4, 4)
    for _ in range(2):
        optimizer.zero_grad()
        with amp.scale_loss(model(x), optimizer) as scaled:
            scaled.backward()
        weight = model.weight.detach().float().requires_grad_()
        ops(x, weight).backward()
        torch.testing.assert_close(model.weight.grad.float(), weight.grad, rtol=2e-3, atol=2e-3)
        with torch.no_grad():
            model(x)
            model.weight.sub_(0.25)


# -- the user's own functions ----------------------------------------------------------------------------------------


def test_decorated_functions_cast_within_a_model_under_o1_only():
    def dtypes(x, y):
        return x.dtype, y.dtype

    half, x, y = torch.float16, torch.ones(1), torch.ones(1, dtype=torch.float16)
    expected = {
        amp.half_function: (half, half),
        amp.float_function: (FLOAT, FLOAT),
        amp.promote_function: (FLOAT, FLOAT),
    }
    for decorate, inside in expected.items():
        fn = decorate(dtypes)
        assert fn.__name__ == "dtypes"
        seen = []
        model = amp.initialize(Calls(lambda x, y, fn=fn, seen=seen: seen.append(fn(x, y=y)) or x), verbosity=0)
        model(x, y)
        assert (seen, fn(x, y)) == ([inside], (FLOAT, half))


def test_functions_registered_by_name_cast_within_until_amp_is_turned_off():
    class Module:
        @staticmethod
        def triple(x):
            return x * 3

    original = Module.__dict__["triple"]
    amp.register_half_function(Module, "triple")
    amp.register_float_function(torch, "sigmoid")
    sigmoid = torch.sigmoid
    assert dtype_within(lambda x: Module.triple(x), square(FLOAT)) == torch.float16
    assert dtype_within(lambda x: torch.sigmoid(x), square(torch.float16)) == FLOAT
    assert Module.triple(OTHER).dtype == FLOAT
    assert torch.sigmoid(OTHER.half()).dtype == torch.float16
    assert Module().triple(OTHER).dtype == FLOAT
    amp.deactivate()
    assert Module.__dict__["triple"] is original
    assert torch.sigmoid is sigmoid


def test_promotion_registered_by_name():
    class Module:
        minimum = staticmethod(lambda x, y: x)

    amp.register_promote_function(Module, "minimum")
    assert dtype_within(lambda x: Module.minimum(x, OTHER), square(torch.float16)) == FLOAT


def test_a_function_that_is_not_there_cannot_be_registered():
    for register in (amp.register_half_function, amp.register_float_function, amp.register_promote_function):
        with pytest.raises(AmpError, match=r"^torch\.nn\.functional has no function 'nothing' to register\.$"):
            register(F, "nothing")


def test_recurrent_layers_compute_in_few_bits_and_train():
    for kind in (nn.RNN, nn.LSTM, nn.GRU):
        layer = kind(4, 3, num_layers=2)
        reference = copy.deepcopy(layer)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        layer, optimizer = amp.initialize(layer, optimizer, loss_scale=4.0, verbosity=0)
        x = torch.linspace(-1, 1, 40).view(5, 2, 4)
        with amp.scale_loss(layer(x)[0].sum(), optimizer) as scaled:
            scaled.backward()
        reference(x)[0].sum().backward()
        for ours, theirs in zip(layer.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.02, atol=0.02)
