"""Ranks that run out of batches at different times."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel.distributed import _MixedPrecision

from paceline import DistributedDataParallel
from support.ranks import RankError, expect_errors, run_ranks

BACKENDS = ["gloo", "shm"]


def ones(bias=False):
    model = nn.Linear(1, 1, bias=bias)
    for param in model.parameters():
        nn.init.constant_(param, 1.0)
    return model


def gradients(world, counts, mixed_precision=None, **kwargs):
    """The gradient after each step; the inputs are 1, so that of one rank is 1."""
    model = DistributedDataParallel(ones(), mixed_precision=mixed_precision)
    seen = []
    with model.join(**kwargs):
        for _ in range(counts[world.rank]):
            model.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            seen.append(model.module.weight.grad.item())
    return seen


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_divided_by_the_ranks_still_live(backend):
    assert run_ranks(2, gradients, (1, 2), backend=backend) == [[1.0], [1.0, 1.0]]


def test_gradients_may_be_divided_by_all_ranks_as_in_torch():
    def by_all(world):
        return gradients(world, (1, 2), divide_by_initial_world_size=True)

    assert run_ranks(2, by_all) == [[1.0], [1.0, 0.5]]


def test_gradients_that_are_averaged_in_few_bits_are_divided_alike():
    config = _MixedPrecision(reduce_dtype=torch.bfloat16)
    assert run_ranks(2, gradients, (1, 2), config) == [[1.0], [1.0, 1.0]]


def on_another_default_device(world):
    model = DistributedDataParallel(ones())
    x = torch.ones(1, 1)
    with torch.device("meta"), model.join():
        for _ in range(1 + world.rank):
            model.zero_grad()
            model(x).sum().backward()
    return model.module.weight.grad.item()


def test_the_roll_is_called_on_the_cpu_whatever_the_default_device():
    assert run_ranks(2, on_another_default_device) == [1.0, 1.0]


def test_ranks_may_leave_in_any_order_and_one_may_have_nothing_at_all():
    assert run_ranks(4, gradients, (3, 0, 1, 2)) == [[1.0] * 3, [], [1.0], [1.0] * 2]


def trained(world, counts, momentum, keep):
    """Rank r's k-th input is 10 r + k; afterwards one step more, on all ranks."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)

    def step(value):
        optimizer.zero_grad()
        model(torch.tensor([[value]], dtype=torch.float64)).square().sum().backward()
        optimizer.step()

    with model.join(states=[optimizer] if keep else []):
        for k in range(counts[world.rank]):
            step(10.0 * world.rank + k)
    step(0.5)
    step(0.25)
    return [param.detach() for param in model.parameters()]


def alone(counts, momentum):
    """The same in one process: the mean over the ranks that have a k-th input."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)

    def step(values):
        optimizer.zero_grad()
        model(torch.tensor(values, dtype=torch.float64)[:, None]).square().mean().backward()
        optimizer.step()

    for k in range(max(counts)):
        step([10.0 * rank + k for rank, count in enumerate(counts) if k < count])
    step([0.5])
    step([0.25])
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("counts", [(1, 4), (4, 1), (2, 2), (0, 3)])
def test_training_equals_one_process_that_sees_what_is_there(counts):
    expected = alone(counts, 0.0)
    for params in run_ranks(2, trained, counts, 0.0, False):
        torch.testing.assert_close(params, expected, rtol=0, atol=1e-12)


def test_an_optimizer_with_momentum_is_brought_along_where_it_is_registered():
    expected = alone((1, 4), 0.9)
    for params in run_ranks(2, trained, (1, 4), 0.9, True):
        torch.testing.assert_close(params, expected, rtol=0, atol=1e-12)


def test_an_optimizer_that_was_left_behind_is_found_out():
    for error in expect_errors(2, trained, (1, 4), 0.9, False):
        assert "the replicas have drifted apart" in error


def with_buffers(world):
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
    wrapped = DistributedDataParallel(model)
    with wrapped.join():
        for _ in range(1 + 2 * world.rank):
            wrapped(torch.randn(4, 1)).sum().backward()
    return model[1].num_batches_tracked.item(), model[1].running_mean


def test_buffers_follow_the_live_ranks_and_are_the_last_ones_in_the_end():
    (first, mean), (second, other_mean) = run_ranks(2, with_buffers)
    assert (first, second) == (3, 3)
    torch.testing.assert_close(mean, other_mean, rtol=0, atol=0)


def accumulated(world):
    """Micro-steps under no_sync: rank 0 has one group of two, rank 1 two."""
    model = DistributedDataParallel(ones())
    seen = []
    with model.join():
        for _ in range(1 + world.rank):
            model.zero_grad()
            with model.no_sync():
                model(torch.ones(1, 1)).sum().backward()
            model(torch.ones(1, 1)).sum().backward()
            seen.append(model.module.weight.grad.item())
    return seen


def test_micro_steps_without_sync_are_kept_company_too():
    assert run_ranks(2, accumulated) == [[2.0], [2.0, 2.0]]


def evaluating(world):
    model = DistributedDataParallel(ones())
    with model.join():
        for _ in range(1 + world.rank):
            model.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            with torch.no_grad():
                model(torch.ones(1, 1))
    return model.module.weight.grad.item()


def test_evaluation_in_between_needs_no_company():
    assert run_ranks(2, evaluating)[1] == 1.0


def gradients_left(world, zero_first):
    model = DistributedDataParallel(ones())
    with model.join():
        for _ in range(1 + 2 * world.rank):
            if zero_first:
                model.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            if not zero_first:
                model.zero_grad()
    return model.module.weight.grad is None


@pytest.mark.parametrize("zero_first", [True, False])
def test_gradients_are_there_afterwards_as_the_ranks_own_loop_leaves_them(zero_first):
    assert run_ranks(2, gradients_left, zero_first) == [not zero_first] * 2


def first_to_end(world):
    model = DistributedDataParallel(ones())
    steps = 0
    told = ""
    try:
        with model.join(throw_on_early_termination=True):
            for _ in range(2 + world.rank):
                model(torch.ones(1, 1)).sum().backward()
                steps += 1
    except RuntimeError as error:
        told = str(error)
    assert "exhausted" in told
    model.zero_grad()
    model(torch.ones(1, 1) * (world.rank + 1)).sum().backward()  # outside, all is as ever
    return steps, model.module.weight.grad.item()


def test_all_ranks_may_be_told_when_the_first_has_run_out():
    assert run_ranks(2, first_to_end) == [(2, 1.5), (2, 1.5)]


def disabled(world):
    model = DistributedDataParallel(ones())
    with model.join(enable=False):
        model(torch.ones(1, 1)).sum().backward()
    return model.module.weight.grad.item()


def test_a_join_that_is_not_enabled_is_an_ordinary_context():
    assert run_ranks(2, disabled) == [1.0, 1.0]


def with_zero(world):
    """torch's Join, over the wrapper and an optimizer that is sharded over the ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of itself when it is imported
        from torch.distributed.optim import ZeroRedundancyOptimizer
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1)).double())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)
    with Join([model, optimizer]):
        for k in range(1 + 2 * world.rank):
            optimizer.zero_grad()
            model(torch.tensor([[float(k + 1)]], dtype=torch.float64)).square().sum().backward()
            optimizer.step()
    return [param.detach() for param in model.parameters()]


def test_torchs_join_takes_the_wrapper_and_a_sharded_optimizer():
    """A rank that has run out still steps its shard, with the others' average."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for k in range(3):
        optimizer.zero_grad()
        model(torch.tensor([[float(k + 1)]], dtype=torch.float64)).square().sum().backward()
        optimizer.step()
    for params in run_ranks(2, with_zero):
        torch.testing.assert_close(params, [p.detach() for p in model.parameters()], rtol=0, atol=1e-12)


def with_a_hook(world):
    model = DistributedDataParallel(ones())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    seen = []
    with model.join():
        for _ in range(1 + world.rank):
            model.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            seen.append(model.module.weight.grad.item())
    return seen


def test_a_hook_finds_zeros_of_a_rank_that_has_run_out_and_divides_by_itself():
    assert run_ranks(2, with_a_hook) == [[1.0], [1.0, 0.5]]


def scaled(world):
    """Loss scaling: the scale halves at an overflow that only the last rank meets, after the other has run out."""
    model = DistributedDataParallel(ones())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with model.join(states=[optimizer, scaler]):
        for k in range(1 + world.rank):
            optimizer.zero_grad()
            x = torch.full((1, 1), float("inf") if k else 1.0)
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    return model.module.weight.item(), scaler.get_scale()


def test_a_grad_scaler_is_brought_along():
    assert run_ranks(2, scaled) == [(pytest.approx(0.9), 2.0)] * 2


def nested(world):
    """Two wrappers in one step, each with a join of its own."""
    first, second = DistributedDataParallel(ones()), DistributedDataParallel(ones())
    with Join([first, second]):
        for _ in range(1 + world.rank):
            first.zero_grad()
            second.zero_grad()
            second(first(torch.ones(1, 1))).sum().backward()
    return first.module.weight.grad.item(), second.module.weight.grad.item()


def test_two_wrappers_join_together():
    assert run_ranks(2, nested)[1] == (1.0, 1.0)


def killed(world):
    model = DistributedDataParallel(ones())
    with model.join():
        for k in range(1 + 5 * world.rank):
            if k == 3:
                raise ValueError("no more")
            model(torch.ones(1, 1)).sum().backward()


def test_a_rank_that_keeps_company_is_told_when_the_live_one_fails():
    with pytest.raises(RankError) as raised:
        run_ranks(2, killed)
    assert "ValueError: no more" in str(raised.value)


def edited_while_one_has_joined(world):
    model, x = DistributedDataParallel(nn.Linear(2, 2)), torch.ones(1, 2)
    with torch.device("meta"), model.join():  # what ranks tell one another is on the CPU all the same
        for k in range(1 if world.rank == 0 else 4):
            if k == 2 and world.rank == 2:
                with torch.no_grad():
                    model.module.bias += 1.0
            model(x).sum().backward()


def test_drift_among_the_live_ranks_is_named_and_who_has_run_out_does_not_count():
    for error in expect_errors(3, edited_while_one_has_joined):
        assert "'bias' differs on rank 2 from rank 1." in error
