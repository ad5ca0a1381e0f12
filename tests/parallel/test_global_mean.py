"""The mean over all ranks' tokens, and the gradient of one process that holds them all."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline import DistributedDataParallel, global_mean
from paceline.errors import DataError
from paceline.parallel.live import declare_live
from support.ranks import expect_errors, run_ranks

BACKENDS = ["gloo", "shm"]


def value_and_gradient(world, sums, counts, dtype=torch.float64, as_tensor=False):
    """Rank r holds ``counts[r]`` tokens, whose losses add up to ``sums[r]``."""
    loss_sum = torch.tensor(sums[world.rank], dtype=dtype, requires_grad=True)
    count = torch.tensor(counts[world.rank]) if as_tensor else counts[world.rank]
    mean = global_mean(loss_sum, count)
    mean.backward()
    assert (mean.dtype, mean.shape, loss_sum.grad.dtype) == (dtype, (), dtype)
    return mean.item(), loss_sum.grad.item()


CASES = [
    ([6.0], [3], 2.0, 1 / 3),
    ([6.0, 34.0], [3, 17], 2.0, 2 / 20),
    ([6.0, 0.0], [3, 0], 2.0, 2 / 3),
    ([0.0, 0.0], [0, 0], 0.0, 0.0),
    ([0.0], [0], 0.0, 0.0),
    ([1.0, 2.0, 6.0], [1, 0, 5], 1.5, 3 / 6),
    ([1.0, 2.0], [0.25, 0.5], 4.0, 2 / 0.75),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize(("sums", "counts", "mean", "gradient"), CASES)
def test_it_is_the_sum_over_all_ranks_by_the_count_of_all_ranks(sums, counts, mean, gradient, as_tensor, backend):
    told = run_ranks(len(sums), value_and_gradient, sums, counts, torch.float64, as_tensor, backend=backend)
    assert told == [(mean, pytest.approx(gradient, rel=1e-15))] * len(sums)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_has_the_losss_dtype_and_adds_up_in_float64(dtype):
    told = run_ranks(2, value_and_gradient, [2.0**14, 2.0**14], [2**15, 2**15], dtype)
    assert told == [(0.5, 2.0**-15)] * 2


def large_counts(world):
    count = torch.tensor(2**24 + 1)  # which float32 does not know
    return global_mean(torch.tensor(2.0**24 + 1, dtype=torch.float64), count).item()


def test_large_counts_are_exact():
    assert run_ranks(2, large_counts) == [1.0, 1.0]


def other_dtype_on_another_rank(world):
    dtype = torch.bfloat16 if world.is_main else torch.float32
    return global_mean(torch.tensor(1.0 + world.rank, dtype=dtype), 1).item()


def test_ranks_may_differ_in_dtype():
    assert run_ranks(2, other_dtype_on_another_rank) == [1.5, 1.5]


def bits(world):
    generator = torch.Generator().manual_seed(world.rank)
    sums = torch.rand(200, generator=generator, dtype=torch.float64) / 3
    counts = torch.randint(0, 9, (200,), generator=generator)
    return [global_mean(loss, count).item() for loss, count in zip(sums, counts, strict=True)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_the_same_on_all_ranks_bit_by_bit(backend):
    told = run_ranks(3, bits, backend=backend)
    assert told[0] == told[1] == told[2]


def test_without_a_process_group_it_is_the_quotient():
    loss_sum = torch.tensor(6.0, requires_grad=True)
    mean = global_mean(loss_sum, 3)
    mean.backward()
    assert (mean.item(), loss_sum.grad.item()) == (2.0, pytest.approx(1 / 3))
    assert global_mean(torch.tensor(0.0), 0).item() == 0.0


def test_it_may_be_differentiated_twice():
    x = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(global_mean(x**3, 2), x, create_graph=True)
    slope.backward()
    assert x.grad.item() == 9.0  # (x^3 / 2)'' = 3x


def without_a_graph(world):
    loss_sum = torch.tensor(4.0 * world.rank, requires_grad=bool(world.rank))
    mean = global_mean(loss_sum, 2 * world.rank)
    return mean.item(), mean.requires_grad


def test_a_sum_of_nothing_without_a_graph_takes_part_and_has_none():
    assert run_ranks(2, without_a_graph) == [(2.0, False), (2.0, True)]


def not_a_number(world):
    return global_mean(torch.tensor(float("nan") if world.is_main else 1.0), 1).item()


def test_a_loss_that_is_no_number_is_seen_everywhere():
    assert all(value != value for value in run_ranks(2, not_a_number))


def of_a_pair(world):
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    loss_sum = torch.tensor(float(world.rank), requires_grad=True)
    mean = global_mean(loss_sum, 1 + world.rank, group=pairs[world.rank // 2])
    mean.backward()
    return mean.item(), loss_sum.grad.item()


def test_it_may_be_over_a_smaller_group():
    pair, alone = (pytest.approx(1 / 3), pytest.approx(2 / 3)), (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert run_ranks(3, of_a_pair) == [pair, pair, alone]


def messages(world):
    """How many numbers of what dtype travel."""
    sent, all_reduce = [], dist.all_reduce

    def counted(tensor, *args, **kwargs):
        sent.append((tensor.numel(), tensor.dtype))
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted
    global_mean(torch.tensor(1.0, requires_grad=True), 1).backward()
    return sent


def test_it_is_one_message_of_two_numbers_and_none_alone():
    assert run_ranks(2, messages) == [[(2, torch.float64)]] * 2
    assert run_ranks(1, messages) == [[]]


# -- under join --------------------------------------------------------------------------------------------------------


def among_live_ranks(world, divides_by_initial):
    declare_live(dist.distributed_c10d._get_default_group(), [0, 2], divides_by_initial=divides_by_initial)
    if world.rank == 1:
        return None
    return value_and_gradient(world, [6.0, 100.0, 34.0], [3, 100, 17])


@pytest.mark.parametrize(("divides_by_initial", "gradient"), [(False, 2 / 20), (True, 3 / 20)])
def test_it_is_over_live_ranks_and_makes_up_for_what_gradients_are_divided_by(divides_by_initial, gradient):
    expected = (2.0, pytest.approx(gradient, rel=1e-15))
    assert run_ranks(3, among_live_ranks, divides_by_initial) == [expected, None, expected]


def last_one(world, divides_by_initial):
    declare_live(dist.distributed_c10d._get_default_group(), [0], divides_by_initial=divides_by_initial)
    return value_and_gradient(world, [6.0], [3]) if world.is_main else None


@pytest.mark.parametrize(("divides_by_initial", "gradient"), [(False, 1 / 3), (True, 2 / 3)])
def test_so_it_is_for_the_last_one(divides_by_initial, gradient):
    assert run_ranks(2, last_one, divides_by_initial) == [(2.0, pytest.approx(gradient)), None]


# -- in training -------------------------------------------------------------------------------------------------------

NUM_TOKENS = 8  # of each sequence, not all of which count
IGNORED = -100


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(11, 6, dtype=torch.float64)
        self.head = nn.Linear(6, 5, dtype=torch.float64)

    def forward(self, tokens):
        return self.head(self.embed(tokens).tanh())


def batch(num_valid, seed):
    """A sequence for each number in ``num_valid``, of which so many tokens count. (2, B, NUM_TOKENS)"""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(11, (len(num_valid), NUM_TOKENS), generator=generator)
    targets = torch.randint(5, tokens.shape, generator=generator)
    for row, valid in zip(targets, num_valid, strict=True):
        row[valid:] = IGNORED
    return tokens, targets


def loss_sum_of(model, tokens, targets):
    return nn.functional.cross_entropy(
        model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def train_on_ranks(world, plan):
    """``plan[step][rank]`` are the numbers of valid tokens in each micro-step of a rank."""
    model = Tagger()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    means = []
    for step, of_ranks in enumerate(plan):
        optimizer.zero_grad()
        micro_steps = of_ranks[world.rank]
        pieces = [batch(valid, 100 * step + 10 * world.rank + at) for at, valid in enumerate(micro_steps)]
        count = sum((targets != IGNORED).sum() for _, targets in pieces)
        mean = 0.0
        for at, (tokens, targets) in enumerate(pieces):
            with contextlib.nullcontext() if at == len(pieces) - 1 else wrapped.no_sync():
                part = global_mean(loss_sum_of(wrapped, tokens, targets), count)
                part.backward()
            mean += part.item()
        optimizer.step()
        means.append(mean)
    return means, [p.detach() for p in model.parameters()]


def train_alone(plan):
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    means = []
    for step, of_ranks in enumerate(plan):
        optimizer.zero_grad()
        pieces = [
            batch(valid, 100 * step + 10 * rank + at)
            for rank, micro_steps in enumerate(of_ranks)
            for at, valid in enumerate(micro_steps)
        ]
        tokens, targets = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        mean = loss_sum_of(model, tokens, targets) / max(1, int((targets != IGNORED).sum()))
        mean.backward()
        optimizer.step()
        means.append(mean.item())
    return means, [p.detach() for p in model.parameters()]


PLANS = {
    "3 and 17 tokens": [[[(3,)], [(8, 8, 1)]]] * 2,
    "3 and 17 tokens in two micro-steps": [[[(1,), (2,)], [(8, 1), (8,)]]] * 3,
    "a rank without tokens": [[[(0,)], [(5, 1)]], [[(4,)], [(0, 0)]]],
    "a rank without sequences": [[[()], [(5, 1)]], [[(4,), ()], [(), (2,)]]],
    "a micro-step without tokens": [[[(0,), (3,)], [(2,), (0,)]]] * 2,
    "no tokens at all in the second step": [[[(2,)], [(5,)]], [[(0,)], [(0,)]], [[(1,)], [(8,)]]],
    "three ranks": [[[(3,), (1,)], [(8, 2), (0,)], [(1,), (7,)]]] * 3,
    "one rank": [[[(3,), (5, 1)]]] * 2,
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_is_that_of_one_process_with_all_tokens(plan, backend):
    expected_means, expected = train_alone(plan)
    for means, params in run_ranks(len(plan[0]), train_on_ranks, plan, backend=backend):
        assert means == pytest.approx(expected_means, rel=1e-12, abs=1e-12)
        torch.testing.assert_close(params, expected, rtol=0, atol=1e-12)


def test_random_plans_too():
    generator = torch.Generator().manual_seed(1)

    def draw(high):
        return int(torch.randint(high, (1,), generator=generator))

    plan = []
    for _ in range(25):
        num_micro_steps = 1 + draw(3)
        plan.append(
            [[tuple(draw(NUM_TOKENS + 1) for _ in range(draw(4))) for _ in range(num_micro_steps)] for _ in range(2)]
        )
    expected_means, expected = train_alone(plan)
    for means, params in run_ranks(2, train_on_ranks, plan):
        assert means == pytest.approx(expected_means, rel=1e-9, abs=1e-9)
        torch.testing.assert_close(params, expected, rtol=0, atol=1e-9)


def joined(world, valid, divide_by_initial_world_size):
    model = Tagger()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with wrapped.join(divide_by_initial_world_size=divide_by_initial_world_size):
        for step, num_valid in enumerate(valid[world.rank]):
            tokens, targets = batch([num_valid], 100 * step + world.rank)
            optimizer.zero_grad()
            global_mean(loss_sum_of(wrapped, tokens, targets), (targets != IGNORED).sum()).backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("divide_by_initial_world_size", [True, False])
def test_ranks_may_run_out_of_data(divide_by_initial_world_size, backend):
    valid = [[3, 2], [8, 5, 1, 2], [7]]
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(4):
        pieces = [batch([of_rank[step]], 100 * step + r) for r, of_rank in enumerate(valid) if step < len(of_rank)]
        tokens, targets = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        optimizer.zero_grad()
        (loss_sum_of(model, tokens, targets) / (targets != IGNORED).sum()).backward()
        optimizer.step()
    expected = [p.detach() for p in model.parameters()]
    for params in run_ranks(3, joined, valid, divide_by_initial_world_size, backend=backend):
        torch.testing.assert_close(params, expected, rtol=0, atol=1e-12)


# -- errors ------------------------------------------------------------------------------------------------------------

ADVICE = "Pass the *sum* of this rank's losses, as loss functions give it with reduction='sum'."


@pytest.mark.parametrize(
    ("loss_sum", "count", "message"),
    [
        (
            torch.ones(3),
            3,
            f"loss_sum: expected a 0-d floating-point tensor, got torch.float32 of shape (3,). {ADVICE}",
        ),
        (torch.tensor(3), 3, f"loss_sum: expected a 0-d floating-point tensor, got torch.int64 of shape (). {ADVICE}"),
        (2.5, 3, f"loss_sum: expected a 0-d floating-point tensor, got 2.5. {ADVICE}"),
        (torch.tensor(1.0), -3, "count: expected a finite number, not less than 0, got -3.0."),
        (torch.tensor(1.0), torch.tensor(-3), "count: expected a finite number, not less than 0, got -3.0."),
        (torch.tensor(1.0), float("nan"), "count: expected a finite number, not less than 0, got nan."),
        (torch.tensor(1.0), torch.tensor(float("nan")), "count: expected a finite number, not less than 0, got nan."),
        (torch.tensor(1.0), float("inf"), "count: expected a finite number, not less than 0, got inf."),
        (torch.tensor(1.0), torch.ones(2), "count: expected a number or a 0-d tensor, got shape (2,)."),
        (
            torch.tensor(1.0),
            torch.tensor(1.0, requires_grad=True),
            "count wants a gradient, which would not be computed. Pass count.detach().",
        ),
        (
            torch.tensor(1.0),
            torch.tensor(1, device="meta"),
            "count is on meta and loss_sum on cpu. Count where the loss is computed, or pass a number.",
        ),
    ],
)
def test_what_has_no_mean_is_refused_at_once(loss_sum, count, message):
    with pytest.raises(DataError) as caught:
        global_mean(loss_sum, count)
    assert str(caught.value) == message


def the_mean_instead_of_the_sum(world):
    if world.rank == 1:
        global_mean(nn.functional.mse_loss(torch.ones(2), torch.zeros(2), reduction="none"), 2)
    raise ValueError("rank 0 has nothing to wait for")


def test_in_a_world_the_error_names_the_rank():
    message = expect_errors(2, the_mean_instead_of_the_sum)[1]
    assert message.startswith("DataError: rank 1: loss_sum: expected a 0-d floating-point tensor, got torch.float32 of")


def from_outside(world):
    pair = dist.new_group([0, 1])
    if world.rank < 2:
        raise ValueError("these are inside")
    global_mean(torch.tensor(1.0), 1, group=pair)


def test_a_rank_outside_of_the_group_is_told_so():
    assert expect_errors(3, from_outside)[2] == (
        "DataError: rank 2: it is not in the group whose mean it asks for. Call global_mean on the group's ranks only."
    )


def test_it_is_exported():
    assert paceline.global_mean is global_mean


# -- on GPUs -----------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize(("count", "expected"), [(3, 2.0), (0, 0.0), (-1, None), (float("nan"), None)])
def test_on_a_gpu_the_host_waits_for_nothing(count, expected):
    loss_sum = torch.tensor(6.0 if count else 0.0, device="cuda", requires_grad=True)
    counts = [torch.tensor(count, device="cuda"), count]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        means = [global_mean(loss_sum, each) for each in (counts if expected is not None else counts[:1])]
        for mean in means:
            mean.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for mean in means:
        assert mean.isnan() if expected is None else mean.item() == expected


def on_gpu(world):
    loss_sum = torch.tensor([6.0, 34.0][world.rank], device=world.device, requires_grad=True)
    mean = global_mean(loss_sum, torch.tensor([3, 17][world.rank], device=world.device))
    mean.backward()
    return mean.item(), loss_sum.grad.item()


@pytest.mark.cuda
def test_on_a_gpu_it_is_the_same_mean():
    assert run_ranks(2, on_gpu, device="cuda:0", timeout_s=90) == [(2.0, pytest.approx(0.1))] * 2


@pytest.mark.cuda
@pytest.mark.parametrize(("loss_device", "count_device"), [("cpu", "cuda:0"), ("cuda:0", "cpu")])
def test_a_count_on_another_device_is_refused(loss_device, count_device):
    with pytest.raises(DataError, match=f"count is on {count_device} and loss_sum on {loss_device}"):
        global_mean(torch.tensor(1.0, device=loss_device), torch.tensor(1, device=count_device))
