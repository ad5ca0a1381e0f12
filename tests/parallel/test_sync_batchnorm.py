"""Batch normalisation over all ranks is that of one process, torch's own, on the concatenated batch."""

import copy
import functools
import inspect
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline
from paceline import DistributedDataParallel, SyncBatchNorm, global_mean
from support.ranks import RankError, expect_errors, run_ranks

BACKENDS = ["gloo", "shm"]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
KINDS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
NUM_CHANNELS = 3


def data_of(case):
    """The batch of all ranks together, what its output is multiplied by, weight and bias."""
    generator = torch.Generator().manual_seed(5)
    shape = (sum(case["sizes"]), NUM_CHANNELS, *case.get("trailing", ()))
    x, factors = (torch.randn(shape, generator=generator, dtype=torch.float64) * 2 + 1 for _ in range(2))
    weight, bias = (torch.randn(NUM_CHANNELS, generator=generator, dtype=torch.float64) for _ in range(2))
    dtype = case.get("dtype", torch.float64)
    memory_format = case.get("memory_format", torch.contiguous_format)
    x, factors = (t.to(dtype).to(memory_format=memory_format) for t in (x, factors))
    return x, factors, weight, bias


def prepare(layer, case, weight, bias):
    """Give ``layer`` the case's parameters, and running statistics of another batch."""
    layer.to(case.get("layer_dtype", torch.float32 if case.get("dtype") in LOW else case.get("dtype", torch.float64)))
    with torch.no_grad():
        for param, value in ((layer.weight, weight), (layer.bias, bias)):
            if param is not None:
                param.copy_(value)
        if layer.running_mean is not None:
            layer.running_mean.copy_(weight)
            layer.running_var.copy_(bias.abs())
    return layer


LOW = (torch.bfloat16, torch.float16)


def results(layer, x, factors):
    """What one forward and backward give."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    output = layer(x)
    (output * factors).sum().backward()
    grads = [None if p is None else p.grad for p in (layer.weight, layer.bias)]
    return [output.detach(), x.grad, *grads, layer.running_mean, layer.running_var, layer.num_batches_tracked]


def on_rank(world, cases):
    told = []
    for case in cases:
        x, factors, weight, bias = data_of(case)
        layer = prepare(SyncBatchNorm(NUM_CHANNELS, **case.get("options", {})), case, weight, bias)
        mine = slice(sum(case["sizes"][: world.rank]), sum(case["sizes"][: world.rank + 1]))
        for _ in range(case.get("times", 1)):
            layer.zero_grad()
            told_now = results(layer, x[mine], factors[mine])
        told.append(told_now)
    return told


def alone(case):
    x, factors, weight, bias = data_of(case)
    kind = KINDS[x.dim()]
    layer = prepare(kind(NUM_CHANNELS, **case.get("options", {})), case, weight, bias)
    for _ in range(case.get("times", 1)):
        layer.zero_grad()
        told = results(layer, x, factors)
    return told


def check(case, told, expected=None):
    """The ranks' outputs and input gradients together, their sums of parameters' gradients, each one's statistics."""
    expected = expected or alone(case)
    tolerance = case.get("tolerance", TOLERANCE[case.get("dtype", torch.float64)])
    outputs, input_grads, weight_grads, bias_grads, *statistics = zip(*told, strict=True)
    together = [torch.cat(outputs), torch.cat(input_grads)]
    together += [None if grads[0] is None else sum(grads) for grads in (weight_grads, bias_grads)]
    for ours, theirs in zip(together, expected, strict=False):
        if theirs is not None:
            assert ours.dtype == theirs.dtype, case
            largest = max(1.0, theirs.double().abs().max().item()) if theirs.numel() else 1.0
            torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * largest, msg=lambda m: f"{case}: {m}")
        else:
            assert ours is None, case
    for ours, theirs in zip(statistics, expected[4:], strict=True):
        for each in ours:
            torch.testing.assert_close(each, ours[0], rtol=0, atol=0)  # bit by bit on all ranks
            torch.testing.assert_close(each, theirs, rtol=tolerance, atol=tolerance)


def check_all(cases, backend="shm"):
    world_size = len(cases[0]["sizes"])
    told = run_ranks(world_size, on_rank, cases, backend=backend)
    for case, of_ranks in zip(cases, zip(*told, strict=True), strict=True):
        check(case, of_ranks)


# -- one batch, however split -----------------------------------------------------------------------------------------

TRAILING = [(), (5,), (4, 3), (2, 3, 2)]
SPLITS = {
    1: [(6,), (2,)],
    2: [(4, 4), (1, 7), (7, 1), (1, 1), (0, 5), (5, 0)],
    3: [(3, 3, 3), (1, 1, 1), (5, 1, 2), (0, 4, 0), (2, 0, 3), (0, 0, 2), (1, 0, 1)],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", SPLITS)
def test_any_split_over_ranks_is_one_batch(world_size, backend):
    check_all(
        [
            {"sizes": sizes, "trailing": trailing, "dtype": dtype}
            for sizes, trailing, dtype in itertools.product(
                SPLITS[world_size], TRAILING, [torch.float64, torch.float32]
            )
        ],
        backend,
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_random_splits_are_one_batch_too(world_size):
    generator = torch.Generator().manual_seed(world_size)
    cases = []
    for _ in range(60):
        sizes = [int(size) for size in torch.randint(0, 6, (world_size,), generator=generator)]
        trailing = TRAILING[int(torch.randint(len(TRAILING), (1,), generator=generator))]
        if sum(sizes) > 1:
            cases.append({"sizes": sizes, "trailing": trailing})
    assert len(cases) > 50
    check_all(cases)


def test_a_sample_on_one_rank_alone_is_enough_where_it_has_several_values():
    check_all([{"sizes": (0, 1), "trailing": (4,)}, {"sizes": (1, 0), "trailing": (2, 2)}])


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("layer_dtype", ["float32", "same"])
def test_half_precision_has_statistics_in_float32(dtype, layer_dtype):
    """torch's kernel on one process, fed with the same values in float64, says what comes out."""
    cases = [
        {"sizes": sizes, "trailing": trailing, "dtype": dtype}
        | ({"layer_dtype": dtype} if layer_dtype == "same" else {})
        for sizes, trailing in itertools.product([(4, 4), (1, 6), (0, 5)], TRAILING)
    ]
    told = run_ranks(2, on_rank, cases)
    for case, of_ranks in zip(cases, zip(*told, strict=True), strict=True):
        x, factors, weight, bias = data_of(case)
        stored = case.get("layer_dtype", torch.float32)
        layer = prepare(KINDS[x.dim()](NUM_CHANNELS), {"dtype": torch.float64}, weight.to(stored), bias.to(stored))
        exact = results(layer, x.double(), factors.double())
        dtypes = [dtype, dtype, *[stored] * 4, torch.int64]
        check(case, of_ranks, [value.to(kind) for value, kind in zip(exact, dtypes, strict=True)])
        if stored == torch.float32:  # what was rounded are inputs and outputs alone
            mean, var = of_ranks[0][4:6]
            torch.testing.assert_close([mean.double(), var.double()], exact[4:6], rtol=1e-6, atol=1e-6)


FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.mark.parametrize("num_dims", FORMATS)
def test_channels_last_stays_channels_last(num_dims):
    case = {"sizes": (3, 5), "trailing": (4, 2, 3)[: num_dims - 2], "memory_format": FORMATS[num_dims]}
    told = run_ranks(2, on_rank, [case])
    check(case, [of_rank[0] for of_rank in told])
    for ((output, grad, *_),) in told:
        assert output.is_contiguous(memory_format=FORMATS[num_dims])
        assert grad.is_contiguous(memory_format=FORMATS[num_dims])


def strided(world):
    base = torch.arange(48.0, dtype=torch.float64).view(3, 2, 8).sin()
    x = base.transpose(0, 1)[:, :, ::2].requires_grad_()  # (2, 3, 4)
    layer = SyncBatchNorm(3).double()
    output = layer(x)
    (grad,) = torch.autograd.grad(output, x, torch.ones(1, dtype=torch.float64).expand_as(output) * x.detach())
    return output.detach(), grad


def test_tensors_with_gaps_are_normalised_like_any_other():
    x = torch.arange(48.0, dtype=torch.float64).view(3, 2, 8).sin().transpose(0, 1)[:, :, ::2]
    x = torch.cat([x, x]).requires_grad_()
    output = nn.BatchNorm1d(3).double()(x)
    (grad,) = torch.autograd.grad(output, x, x.detach())
    for rank, (ours, our_grad) in enumerate(run_ranks(2, strided)):
        torch.testing.assert_close(ours, output[2 * rank : 2 * rank + 2].detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(our_grad, grad[2 * rank : 2 * rank + 2], rtol=0, atol=1e-12)


OPTIONS = [
    {"momentum": None},
    {"momentum": 1.0},
    {"momentum": 0.0},
    {"affine": False},
    {"track_running_stats": False},
    {"affine": False, "track_running_stats": False, "momentum": None},
    {"eps": 0.5},
]
if "bias" in inspect.signature(nn.BatchNorm1d).parameters:
    OPTIONS.append({"bias": False})


def test_every_option_means_what_it_means_to_torch():
    check_all(
        [
            {"sizes": sizes, "trailing": (3,), "options": options, "times": 3}
            for sizes, options in itertools.product([(4, 2), (0, 3)], OPTIONS)
        ]
    )


def far_from_zero(world):
    generator = torch.Generator().manual_seed(3)
    x = 1000 + torch.randn(64, 2, generator=generator, dtype=torch.float64)
    layer = SyncBatchNorm(2, momentum=1.0)
    layer(x[world.rank :: world.world_size].float())
    return layer.running_var


def test_the_variance_of_values_far_from_zero_keeps_its_digits():
    x = 1000 + torch.randn(64, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for var in run_ranks(3, far_from_zero):
        torch.testing.assert_close(var, x.float().double().var(0).float(), rtol=1e-6, atol=0)


def constant(world):
    layer = SyncBatchNorm(1, momentum=1.0, eps=0.0)
    layer(torch.full((5, 1, 7), 0.1))
    return layer.running_var.item()


def test_the_variance_of_equal_values_is_not_below_zero():
    for var in run_ranks(2, constant):
        assert 0 <= var < 1e-16


def nothing_anywhere(world):
    layer = SyncBatchNorm(2)
    x = torch.empty(0, 2, 4, requires_grad=True)
    output = layer(x)
    output.sum().backward()
    return output.shape, x.grad.shape, layer.weight.grad.tolist(), layer.running_var.tolist(), layer.bias.grad.tolist()


def test_empty_batches_everywhere_change_nothing():
    shape = torch.Size([0, 2, 4])
    assert run_ranks(2, nothing_anywhere) == [(shape, shape, [0.0, 0.0], [1.0, 1.0], [0.0, 0.0])] * 2


# -- forward and backward in all their uses ---------------------------------------------------------------------------


class Twice(nn.Module):
    """One layer in two places, the second on what came out of the first."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(self.layer(x).relu() * 3 + x)


def used_twice(world):
    x = torch.arange(24.0, dtype=torch.float64).view(8, 3).sin()
    model = Twice(SyncBatchNorm(3).double())
    x = x[:2] if world.is_main else x[2:]
    x.requires_grad_()
    model(x).square().sum().backward()
    layer = model.layer
    return x.grad, layer.weight.grad, layer.running_mean, layer.running_var, layer.num_batches_tracked


def test_a_layer_may_be_used_twice_in_a_forward():
    x = torch.arange(24.0, dtype=torch.float64).view(8, 3).sin().requires_grad_()
    layer = nn.BatchNorm1d(3).double()
    Twice(layer)(x).square().sum().backward()
    told = run_ranks(2, used_twice)
    grads, weight_grads, *statistics = zip(*told, strict=True)
    torch.testing.assert_close(torch.cat(grads), x.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(sum(weight_grads), layer.weight.grad, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(
        statistics, (layer.running_mean, layer.running_var, layer.num_batches_tracked), strict=True
    ):
        torch.testing.assert_close(list(ours), [theirs] * 2, rtol=0, atol=1e-12)


def partial_gradients(world, which):
    """Rank 0 alone runs backward, which must need no other rank unless it reaches the input."""
    layer = SyncBatchNorm(2).double()
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64) * (world.rank + 1)
    x.requires_grad_(which in ("input", "input by name"))
    layer.weight.requires_grad_(which not in ("input", "bias"))
    layer.bias.requires_grad_(which == "bias")
    loss = (layer(x) * torch.tensor([[1.0, -1.0], [2.0, 0.5]], dtype=torch.float64)).sum()
    if which in ("weight", "bias"):
        if world.is_main:
            loss.backward()
        return [t.grad for t in (x, layer.weight, layer.bias)]
    if which == "weight by name":
        return [None, *torch.autograd.grad(loss, [layer.weight]), None] if world.is_main else None
    if which == "input by name":
        return [*torch.autograd.grad(loss, [x]), None, None]
    loss.backward()
    return [t.grad for t in (x, layer.weight, layer.bias)]


@pytest.mark.parametrize(
    ("which", "position"), [("weight", 1), ("bias", 2), ("weight by name", 1), ("input by name", 0), ("input", 0)]
)
def test_gradients_come_of_what_wants_them_and_of_nothing_else(which, position):
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0], [2.0, 4.0], [6.0, 10.0]], dtype=torch.float64, requires_grad=True)
    factors = torch.tensor([[1.0, -1.0], [2.0, 0.5]] * 2, dtype=torch.float64)
    layer = nn.BatchNorm1d(2).double()
    products = layer(x) * factors
    mine = torch.autograd.grad(products[:2].sum(), [layer.weight, layer.bias], retain_graph=True)
    (for_input,) = torch.autograd.grad(products.sum(), [x])
    expected = [for_input[:2], *mine]
    for place, grad in enumerate(run_ranks(2, partial_gradients, which)[0]):
        if place == position:
            torch.testing.assert_close(grad, expected[place], rtol=1e-12, atol=1e-12)
        else:
            assert grad is None


def differentiated_twice(world):
    x = torch.randn(4, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(SyncBatchNorm(2)(x).square().sum(), x, create_graph=True)
    grad.sum().backward()


def test_a_second_derivative_is_an_error():
    with pytest.raises(RankError, match="differentiate twice a function that was marked with @once_differentiable"):
        run_ranks(2, differentiated_twice)


def messages(world, training, with_grad):
    """How many numbers each collective carries, in a forward and a backward."""
    sent = []

    def counted(collective):
        @functools.wraps(collective)
        def call(*args, **kwargs):
            sent.append((collective.__name__, args[-1].numel()))
            return collective(*args, **kwargs)

        return call

    dist.all_gather, dist.all_reduce = counted(dist.all_gather), counted(dist.all_reduce)
    layer = SyncBatchNorm(5).train(training)
    x = torch.randn(4, 5, 2, requires_grad=True)
    with torch.set_grad_enabled(with_grad):
        loss = layer(x).square().sum()
    if with_grad:
        loss.backward()
    return sent


FORWARD, BACKWARD = ("all_gather", 11), ("all_reduce", 10)


@pytest.mark.parametrize(
    ("world_size", "training", "with_grad", "expected"),
    [
        (2, True, True, [FORWARD, BACKWARD]),
        (2, True, False, [FORWARD]),
        (2, False, True, []),
        (2, False, False, []),
        (1, True, True, []),
    ],
)
def test_a_forward_is_one_message_and_a_backward_another(world_size, training, with_grad, expected):
    assert run_ranks(world_size, messages, training, with_grad) == [expected] * world_size


def evaluated_by_one(world, tracked):
    layer = SyncBatchNorm(2, track_running_stats=tracked).eval()
    if world.is_main:
        x = torch.tensor([[1.0, 2.0], [3.0, 6.0]], requires_grad=True)
        output = layer(x)
        output.sum().backward()
        with torch.no_grad():
            layer(x)
        return output.detach()
    return None


@pytest.mark.parametrize("tracked", [True, False])
def test_one_rank_may_evaluate_alone(tracked):
    x = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    expected = nn.BatchNorm1d(2, track_running_stats=tracked).eval()(x).detach()
    torch.testing.assert_close(run_ranks(2, evaluated_by_one, tracked)[0], expected)


def test_without_a_process_group_it_is_a_batch_norm():
    x = torch.randn(4, 3, 2)
    layer, theirs = SyncBatchNorm(3), nn.BatchNorm1d(3)
    torch.testing.assert_close(layer(x), theirs(x), rtol=0, atol=0)
    torch.testing.assert_close(layer.state_dict(), theirs.state_dict(), rtol=0, atol=0)


def in_pairs(world):
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    layer = SyncBatchNorm(1, momentum=1.0, process_group=pairs[world.rank // 2])
    layer(torch.tensor([[0.0], [1.0]]) + 10 * world.rank)
    return layer.running_mean.item()


def test_statistics_are_those_of_the_layers_group():
    assert run_ranks(3, in_pairs) == [5.5, 5.5, 20.5]


def checkpointed(world, use):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), SyncBatchNorm(3), nn.Tanh()).double()
    x = torch.arange(12.0, dtype=torch.float64).view(4, 3).sin()[world.rank :]
    x.requires_grad_()
    (checkpoint(model, x, use_reentrant=False) if use else model(x)).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def test_checkpointing_changes_no_gradient():
    torch.testing.assert_close(run_ranks(2, checkpointed, True), run_ranks(2, checkpointed, False), rtol=0, atol=0)


def under_autocast(world):
    model = nn.Sequential(nn.Linear(3, 3), SyncBatchNorm(3))
    with torch.autocast("cpu", torch.bfloat16):
        output = model(torch.randn(4, 3))
    output.float().sum().backward()
    return output.dtype, model[1].weight.grad.dtype, model[1].running_var.dtype


def test_autocast_leaves_statistics_in_float32():
    assert run_ranks(2, under_autocast) == [(torch.bfloat16, torch.float32, torch.float32)] * 2


# -- errors ----------------------------------------------------------------------------------------------------------


def one_value(world):
    SyncBatchNorm(2)(torch.ones(world.rank, 2))


def test_one_value_per_channel_over_all_ranks_is_an_error_on_every_rank():
    message = "ValueError: Expected more than 1 value per channel when training, got 1 over all ranks together."
    assert expect_errors(2, one_value) == [message] * 2


def too_flat(world):
    SyncBatchNorm(2)(torch.ones(2))


def no_channels(world):
    SyncBatchNorm(0)(torch.ones(2, 0))


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (too_flat, "ValueError: expected at least 2D input (got 1D input)"),
        (no_channels, "ValueError: SyncBatchNorm number of input channels should be non-zero"),
    ],
)
def test_inputs_without_channels_are_refused_as_by_torch(fn, message):
    assert expect_errors(2, fn) == [message] * 2


def on_another_device(world):
    layer = SyncBatchNorm(2, device="meta")
    with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on GPU"):
        layer(torch.empty(4, 2, device="meta"))
    return layer.process_group


def test_devices_of_which_torch_has_no_kernels_are_refused_as_by_torch():
    assert run_ranks(2, on_another_device) == [None, None]


# -- in training -------------------------------------------------------------------------------------------------------

NUM_STEPS = 5


def net(normalise, dtype):
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), normalise(4), nn.ReLU(), nn.Conv2d(4, 4, 2), normalise(4), nn.Flatten(), nn.Linear(16, 3)
    ).to(dtype)


def train(rank, splits, dtype, wrap, normalise):
    """Five steps on the samples of ``splits`` that are ``rank``'s; None for all of them."""
    model = net(normalise, dtype)
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(11)
    for sizes in splits:
        x = torch.randn(sum(sizes), 2, 5, 5, generator=data, dtype=torch.float64).to(dtype)
        y = torch.randint(3, (sum(sizes),), generator=data)
        mine = slice(None) if rank is None else slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        optimizer.zero_grad()
        loss_sum = nn.functional.cross_entropy(wrapped(x[mine]), y[mine], reduction="sum")
        global_mean(loss_sum, len(y[mine])).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def train_on_ranks(world, splits, dtype):
    return train(world.rank, splits, dtype, DistributedDataParallel, SyncBatchNorm)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "splits",
    [
        [(4,), (3,), (5,), (2,), (6,)],
        [(4, 4), (1, 7), (5, 0), (3, 3), (0, 6)],
        [(2, 2, 2), (1, 3, 2), (0, 5, 1), (4, 1, 1), (1, 0, 0)],
    ],
    ids=["1", "2", "3"],
)
def test_five_steps_under_the_wrapper_are_those_of_one_process(splits, dtype, backend):
    alone = train(None, splits, dtype, lambda model: model, nn.BatchNorm2d)
    together = run_ranks(len(splits[0]), train_on_ranks, splits, dtype, backend=backend)
    for state in together:
        torch.testing.assert_close(state, together[0], rtol=0, atol=0)
    for name, value in alone.items():
        largest = value.double().abs().max().item()
        torch.testing.assert_close(together[0][name], value, rtol=0, atol=TOLERANCE[dtype] * max(1.0, largest))


def joined(world, num_batches):
    model = net(SyncBatchNorm, torch.float64)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wrapped.join():
        for number in range(num_batches[world.rank]):
            x = torch.randn(3, 2, 5, 5, generator=torch.Generator().manual_seed(10 * number + world.rank)).double()
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_with_fewer_batches_leave_the_statistics_to_the_others(backend):
    num_batches = [2, 4, 3]
    model = net(nn.BatchNorm2d, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(4):
        live = [rank for rank in range(3) if num_batches[rank] > number]
        seeds = [torch.Generator().manual_seed(10 * number + rank) for rank in live]
        x = torch.cat([torch.randn(3, 2, 5, 5, generator=seed) for seed in seeds]).double()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    expected = dict(model.state_dict())
    for state in run_ranks(3, joined, num_batches, backend=backend):
        torch.testing.assert_close(state, expected, rtol=1e-10, atol=1e-12)


# -- a drop-in for torch's ---------------------------------------------------------------------------------------------


def test_the_constructor_is_torchs():
    assert inspect.signature(SyncBatchNorm) == inspect.signature(nn.SyncBatchNorm)
    assert issubclass(SyncBatchNorm, nn.SyncBatchNorm)
    assert paceline.SyncBatchNorm is SyncBatchNorm


def test_states_are_exchanged_with_torchs_layers():
    theirs, ours = nn.BatchNorm2d(3), SyncBatchNorm(3)
    theirs(torch.randn(2, 3, 2, 2))
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))
    nn.SyncBatchNorm(3).load_state_dict(ours.state_dict())
    assert "running_mean" not in SyncBatchNorm(3, track_running_stats=False).state_dict()


def test_a_converted_layer_keeps_parameters_buffers_and_settings():
    layer = nn.BatchNorm2d(3, eps=0.25, momentum=None, dtype=torch.float64).eval()
    layer.weight.requires_grad_(False)
    layer.qconfig = "a qconfig"
    converted = SyncBatchNorm.convert_sync_batchnorm(layer, process_group="a group")
    assert type(converted) is SyncBatchNorm
    assert (converted.num_features, converted.eps, converted.momentum) == (3, 0.25, None)
    assert (converted.affine, converted.track_running_stats, converted.training) == (True, True, False)
    assert converted.process_group == "a group"
    assert converted.qconfig == "a qconfig"
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        assert getattr(converted, name) is getattr(layer, name)
    assert not converted.weight.requires_grad
    assert converted.bias.requires_grad


def test_a_converted_layer_without_parameters_or_statistics_has_none():
    converted = SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3, affine=False, track_running_stats=False))
    assert converted.weight is None
    assert converted.bias is None
    assert converted.running_mean is None
    assert converted.num_batches_tracked is None
    assert not hasattr(converted, "qconfig")


@pytest.mark.skipif("bias" not in inspect.signature(nn.BatchNorm1d).parameters, reason="this torch has no such option")
def test_a_converted_layer_without_a_bias_has_none():
    converted = SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3, bias=False))
    assert converted.bias is None
    assert converted.weight is not None


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, SyncBatchNorm])
def test_every_kind_of_batch_norm_is_converted(kind):
    layer = kind(3)
    converted = SyncBatchNorm.convert_sync_batchnorm(layer)
    assert type(converted) is SyncBatchNorm
    assert converted is not layer


def test_other_layers_are_not_converted():
    for layer in (nn.InstanceNorm2d(3), nn.GroupNorm(1, 3), nn.LayerNorm(3), nn.Linear(2, 2)):
        assert SyncBatchNorm.convert_sync_batchnorm(layer) is layer


def test_lazy_layers_are_converted_as_by_torch():
    lazy = nn.LazyBatchNorm2d()
    lazy(torch.randn(2, 3, 2, 2))  # knows its features from here on
    assert SyncBatchNorm.convert_sync_batchnorm(lazy).num_features == 3
    ours, theirs = SyncBatchNorm.convert_sync_batchnorm, nn.SyncBatchNorm.convert_sync_batchnorm
    unknown = nn.LazyBatchNorm2d(momentum=0.5)
    assert ours(unknown).weight is theirs(unknown).weight is unknown.weight
    assert ours(unknown).num_features == theirs(unknown).num_features


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
        self.again = self.first[1]
        self.deeper = nn.ModuleDict({"a": nn.ModuleList([nn.Identity(), nn.BatchNorm1d(4)])})
        self.absent = None
        self.register_module("nothing", None)


def test_layers_are_converted_at_any_depth_in_place_under_their_names():
    model = Nested()
    names = list(model.state_dict())
    params = list(model.parameters())
    converted = SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert list(model.state_dict()) == names
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), params, strict=True))
    assert type(model.first[1]) is type(model.deeper["a"][1]) is SyncBatchNorm
    assert type(model.deeper["a"][0]) is nn.Identity
    assert model.nothing is None


def test_a_layer_in_two_places_stays_one_layer():
    model = SyncBatchNorm.convert_sync_batchnorm(Nested())
    assert type(model.again) is SyncBatchNorm
    assert model.again is model.first[1]


def test_a_subclass_converts_to_itself():
    class Mine(SyncBatchNorm):
        pass

    assert type(Mine.convert_sync_batchnorm(nn.BatchNorm1d(2))) is Mine


def test_copies_are_layers_of_their_own():
    layer = SyncBatchNorm(2)
    other = copy.deepcopy(layer)
    other(torch.randn(4, 2))
    assert layer.num_batches_tracked.item() == 0
    assert other.num_batches_tracked.item() == 1


# -- on GPUs -----------------------------------------------------------------------------------------------------------


def on_gpu(world, sizes, dtype):
    x, factors, weight, bias = data_of({"sizes": sizes, "trailing": (4, 3), "dtype": dtype})
    layer = prepare(SyncBatchNorm(NUM_CHANNELS), {"dtype": torch.float32}, weight, bias).to(world.device)
    mine = slice(sum(sizes[: world.rank]), sum(sizes[: world.rank + 1]))
    told = results(layer, x[mine].to(world.device), factors[mine].to(world.device))
    assert layer.process_group is None
    return [None if value is None else value.cpu() for value in told]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(4, 4), (1, 7), (5, 0), (0, 5)], ids=str)
def test_ranks_that_share_a_gpu_are_one_batch(sizes, dtype):
    case = {"sizes": sizes, "trailing": (4, 3), "dtype": dtype}
    x, factors, weight, bias = data_of(case)
    layer = prepare(nn.BatchNorm2d(NUM_CHANNELS), {"dtype": torch.float64}, weight, bias)
    exact = results(layer, x.double(), factors.double())
    outputs, grads, *_ = zip(*run_ranks(2, on_gpu, sizes, dtype, device="cuda:0", timeout_s=90), strict=True)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(torch.cat(outputs), exact[0].to(dtype), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(torch.cat(grads), exact[1].to(dtype), rtol=tolerance, atol=tolerance)


def joined_on_gpu(world):
    model = nn.Sequential(nn.Linear(4, 4), SyncBatchNorm(4)).to(world.device)
    wrapped = DistributedDataParallel(model)
    with wrapped.join():
        for number in range(1 + world.rank):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(number), device="cpu").to(world.device)
            wrapped(x).square().sum().backward()
    return model[1].num_batches_tracked.item()


@pytest.mark.cuda
def test_on_a_gpu_too_ranks_with_fewer_batches_leave_the_statistics_to_the_others():
    assert run_ranks(2, joined_on_gpu, device="cuda:0", timeout_s=90) == [2, 2]
