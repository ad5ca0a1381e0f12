"""DataParallel with a loss: gradients of the whole batch, computed and summed where the shares are."""

import copy
import functools
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from paceline.errors import DataError, ReplicaError
from paceline.parallel import DataParallel, DistributedDataParallel
from paceline.parallel.data_parallel.reduce import TreeReduction, plan_for
from paceline.parallel.data_parallel.weights import Weighing
from support.ranks import run_ranks

TWO = ["cpu", "cpu"]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def net(width=4, classes=3):
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, classes)).double()


def batch(count, width=4, classes=3):
    return torch.randn(count, width, dtype=torch.float64), torch.randint(classes, (count,))


def grads(module):
    return [None if param.grad is None else param.grad.clone() for param in module.parameters()]


def expect_bare(wrapped, bare, criterion, x, y, **kwargs):
    """Loss and gradients are those of the bare module."""
    bare.zero_grad()
    wrapped.zero_grad()
    expected = criterion(bare(x), y)
    expected.backward()
    loss = wrapped.forward_backward(x, target=y, **kwargs)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-9, equal_nan=True)
    torch.testing.assert_close(grads(wrapped), grads(bare), rtol=0, atol=1e-9, equal_nan=True)


# -- weights of unequal shares --------------------------------------------------------------------------------------

CRITERIA = {
    "cross entropy": nn.CrossEntropyLoss(),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "weighted": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.1, 5.0], dtype=torch.float64), label_smoothing=0.1),
    "ignoring": nn.CrossEntropyLoss(ignore_index=0),
    "function": functional.cross_entropy,
    "partial": functools.partial(functional.cross_entropy, ignore_index=1, reduction="mean"),
    "partial sum": functools.partial(functional.cross_entropy, reduction="sum"),
    "probabilities": lambda output, target: functional.cross_entropy(output, functional.one_hot(target, 3).double()),
    "mean square": lambda output, target: functional.mse_loss(output[:, 0], target.double()),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_unequal_shares_count_rightly(name):
    bare = net()
    wrapped = DataParallel(copy.deepcopy(bare), ["cpu"] * 3, loss=CRITERIA[name])
    for count in (1, 5, 7):
        expect_bare(wrapped, bare, CRITERIA[name], *batch(count))


def test_a_criterion_that_changes_counts_as_it_is_now():
    bare, criterion = net(), nn.CrossEntropyLoss(weight=torch.ones(3, dtype=torch.float64))
    wrapped = DataParallel(copy.deepcopy(bare), TWO, loss=criterion)
    criterion.weight = torch.tensor([1.0, 0.1, 5.0], dtype=torch.float64)
    criterion.ignore_index = 1
    expect_bare(wrapped, bare, criterion, *batch(7))


def test_a_share_in_which_nothing_counts_counts_nothing():
    bare, criterion = net(), nn.CrossEntropyLoss(ignore_index=-1)
    wrapped = DataParallel(copy.deepcopy(bare), TWO, loss=criterion)
    x, y = batch(4)
    y[:2] = -1
    expect_bare(wrapped, bare, criterion, x, y)
    y[:] = -1
    assert wrapped.forward_backward(x, target=y).isnan()  # as of the bare module


def test_a_loss_says_what_it_is_a_mean_over():
    def per_token(output, target):
        return (output[:, 0] * target).sum() / target.count_nonzero()

    bare = net()
    wrapped = DataParallel(copy.deepcopy(bare), TWO, loss=per_token, count=lambda target: target.count_nonzero())
    x, _ = batch(5)
    expect_bare(wrapped, bare, per_token, x, torch.tensor([1.0, 0, 0, 2, 1]))


def test_weights_of_a_mean_add_up_to_one():
    weighing = Weighing(nn.CrossEntropyLoss(ignore_index=0), None)
    targets = [torch.tensor([0, 1]), torch.tensor([1, 1, 2]), torch.tensor([0])]
    calls = [((), {}, (target,)) for target in targets]
    assert weighing.weigh(calls, 0) == [0.25, 0.75, 0.0]
    by_inputs = [((targets[1],), {}, ()), ((), {"x": [targets[2]]}, ())]
    assert Weighing(nn.MSELoss(), None).weigh(by_inputs, 0) == [0.75, 0.25]
    assert Weighing(nn.MSELoss(), lambda *, n: n).weigh([((), {"n": 3}, ()), ((), {"n": 1}, ())], 0) == [0.75, 0.25]
    assert Weighing(nn.MSELoss(reduction="sum"), None).weigh(calls, 0) == [1, 1, 1]


def test_losses_that_cannot_be_used_are_errors():
    with pytest.raises(DataError, match=r"^loss: expected a callable that returns a scalar, not str\.$"):
        DataParallel(net(), TWO, loss="mse")
    with pytest.raises(DataError, match=r"^loss: reduction='none' gives no scalar to differentiate"):
        DataParallel(net(), TWO, loss=nn.MSELoss(reduction="none"))
    x, y = batch(4)
    with pytest.raises(
        DataError, match=r"^forward_backward needs a loss: DataParallel\(module, \.\.\., loss=criterion\)\.$"
    ):
        DataParallel(net(), TWO).forward_backward(x, target=y)
    with pytest.raises(
        DataError, match=r"^replica 0 on cpu: loss: expected a scalar tensor, not a tensor of shape \(2, 3\)\."
    ):
        DataParallel(net(), TWO, loss=lambda output, target: output).forward_backward(x, target=y)
    with pytest.raises(DataError, match=r"^replica 0 on cpu: loss: expected a scalar tensor, not float\."):
        DataParallel(net(), TWO, loss=lambda output, target: 1.0).forward_backward(x, target=y)


def test_a_replaced_forward_that_would_not_be_called_is_refused():
    parallel = DataParallel(nn.Linear(2, 2), ["cpu", "cpu"], loss=lambda output: output.sum())
    parallel.forward = parallel.forward
    with pytest.raises(
        DataError, match=r"^this DataParallel's forward has been replaced, as amp\.initialize does, but"
    ):
        parallel.forward_backward(torch.ones(2, 2))


# -- how it is called -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [None, ["cpu"], TWO])
def test_every_number_of_devices_gives_the_same(devices):
    bare, criterion = net(), nn.CrossEntropyLoss()
    expect_bare(DataParallel(copy.deepcopy(bare), devices, loss=criterion), bare, criterion, *batch(5))


def test_a_loss_without_a_target_and_arguments_by_name():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x, *, labels):
            return {"loss": functional.cross_entropy(self.net(x), labels, reduction="sum")}

    bare = Model()
    loss = functools.partial(lambda output, reduction: output["loss"], reduction="sum")
    wrapped = DataParallel(copy.deepcopy(bare), TWO, loss=loss)
    x, y = batch(5)
    value = wrapped.forward_backward(x, labels=y)
    expected = bare(x, labels=y)["loss"]
    expected.backward()
    torch.testing.assert_close((value, grads(wrapped)), (expected.detach(), grads(bare)))


def test_gradients_are_added_to_those_that_are_there_and_scaled():
    wrapped = DataParallel(net(), TWO, loss=nn.CrossEntropyLoss())
    x, y = batch(6)
    loss = wrapped.forward_backward(x, target=y)
    once, held = grads(wrapped), [param.grad for param in wrapped.parameters()]
    assert wrapped.forward_backward(x, target=y, scale=torch.tensor(0.5)) == loss
    torch.testing.assert_close(grads(wrapped), [1.5 * grad for grad in once])
    assert all(param.grad is grad for param, grad in zip(wrapped.parameters(), held, strict=True))


def test_hooks_and_optimizers_in_backward_see_the_sum_once():
    module, seen = nn.Linear(1, 1, bias=False), []
    module.weight.register_hook(lambda grad: seen.append(grad.item()))
    module.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.item()))
    DataParallel(module, TWO, loss=lambda output: output.mean()).forward_backward(torch.tensor([[1.0], [2.0], [6.0]]))
    assert seen == [3.0, 3.0]


def test_inputs_get_their_gradients():
    module = net()
    wrapped = DataParallel(module, TWO, loss=nn.CrossEntropyLoss())
    x, y = batch(5)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    wrapped.forward_backward(2 * ours, target=y)
    functional.cross_entropy(module(2 * theirs), y).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_unused_and_frozen_parameters_get_none():
    module = nn.ModuleDict({"used": nn.Linear(2, 1), "other": nn.Linear(2, 1)})
    module["used"].bias.requires_grad_(False)

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = module

        def forward(self, x):
            return self.parts["used"](x)

    wrapped = DataParallel(First(), TWO, loss=lambda output: output.mean())
    wrapped.forward_backward(torch.ones(3, 2))
    assert module["used"].weight.grad.tolist() == [[1.0, 1.0]]
    assert [module["used"].bias.grad, module["other"].weight.grad, module["other"].bias.grad] == [None] * 3


class Branches(nn.Module):
    """The first or the second weight, as the first number of the share says."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(()), torch.ones(())])

    def forward(self, x):
        return x * self.weights[int(x[0] > 2)]


def test_replicas_may_use_different_parameters():
    wrapped = DataParallel(
        Branches(), TWO, loss=functools.partial(lambda output, reduction: output.sum(), reduction="sum")
    )
    wrapped.forward_backward(torch.tensor([1.0, 2.0, 3.0]))
    assert [weight.grad.item() for weight in wrapped.module.weights] == [3, 3]


def test_a_layer_that_is_used_twice_under_reentrant_checkpointing():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net(4, 4)

        def forward(self, x):
            for _ in range(2):
                x = checkpoint(self.inner, x, use_reentrant=True)
            return x

    def loss(output, target):
        return functional.mse_loss(output, target)

    bare = Twice()
    wrapped = DataParallel(copy.deepcopy(bare), ["cpu"] * 3, loss=loss)
    x = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    expect_bare(wrapped, bare, loss, x, torch.zeros(7, 4, dtype=torch.float64))


def test_sparse_and_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(6, 4, sparse=True)
            self.head = nn.Linear(4, 6, bias=False)

        def forward(self, index):
            return self.head(self.embed(index))

    for ties in (False, True):
        bare = Tied().double()
        if ties:
            bare.embed.sparse = False
            bare.embed.weight = bare.head.weight
        wrapped = DataParallel(copy.deepcopy(bare), TWO, loss=nn.CrossEntropyLoss())
        x = torch.randint(6, (5,))
        wrapped.forward_backward(x, target=x)
        functional.cross_entropy(bare(x), x).backward()
        for ours, theirs in zip(wrapped.parameters(), bare.parameters(), strict=True):
            assert ours.grad.is_sparse == theirs.grad.is_sparse
            torch.testing.assert_close(ours.grad.to_dense(), theirs.grad.to_dense())


def test_running_statistics_are_those_of_replica_0():
    bare = nn.BatchNorm1d(2)
    wrapped = DataParallel(copy.deepcopy(bare), TWO, loss=lambda output: output.square().mean())
    x = torch.randn(6, 2)
    wrapped.forward_backward(x)
    bare(x[:3])
    assert torch.equal(wrapped.module.running_mean, bare.running_mean)


def test_a_loss_with_weights_of_its_own_learns_them():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, output, target):
            return functional.cross_entropy(self.scale * output, target)

    bare, criterion = net(), Scaled()
    wrapped = DataParallel(copy.deepcopy(bare), TWO, loss=copy.deepcopy(criterion))
    assert set(wrapped.state_dict()) == {f"module.{name}" for name in bare.state_dict()}
    x, y = batch(5)
    wrapped.forward_backward(x, target=y)
    criterion(bare(x), y).backward()
    torch.testing.assert_close(wrapped._loss[0].scale.grad, criterion.scale.grad)


def test_under_no_grad_and_autocast_it_computes_gradients_all_the_same():
    module = nn.Linear(2, 2)
    dtypes = []
    wrapped = DataParallel(module, TWO, loss=lambda output: (dtypes.append(output.dtype), output.float().mean())[1])
    x = torch.randn(4, 2)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        wrapped.forward_backward(x)
    assert dtypes == [torch.bfloat16] * 2
    assert module.weight.grad.dtype is torch.float32
    with torch.inference_mode():
        wrapped.forward_backward(x)


def test_a_replica_whose_loss_depends_on_nothing_trained_adds_nothing():
    weight = nn.Parameter(torch.ones(()))

    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            return x * self.weight if x[0] > 2 else x

    wrapped = DataParallel(Sometimes(), TWO, loss=lambda output: output.mean())
    assert wrapped.forward_backward(torch.tensor([1.0, 2.0, 3.0, 4.0])) == 2.5
    assert weight.grad == 3.5 / 2
    with pytest.raises(ReplicaError, match=r"^no replica's loss depends on a tensor that needs a gradient"):
        wrapped.forward_backward(torch.tensor([1.0, 2.0]))


def test_with_a_grad_scaler():
    wrapped = DataParallel(net(), TWO, loss=nn.CrossEntropyLoss())
    x, y = batch(4)
    bare = copy.deepcopy(wrapped.module)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (bare, wrapped)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    functional.cross_entropy(bare(x), y).backward()
    optimizers[0].step()
    wrapped.forward_backward(x, target=y, scale=scaler.scale(torch.ones(())))
    scaler.step(optimizers[1])
    for ours, theirs in zip(wrapped.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def train_on_ranks(world):
    torch.manual_seed(0)
    module = net()
    bare = copy.deepcopy(module)
    wrapped = DataParallel(module, TWO, loss=nn.CrossEntropyLoss())
    across = DistributedDataParallel(wrapped)
    x, y = batch(8)
    ours = slice(4 * world.rank, 4 * world.rank + 4)
    functional.cross_entropy(bare(x), y).backward()
    functional.cross_entropy(across(x[ours]), y[ours]).backward()
    torch.testing.assert_close(grads(module), grads(bare))
    across.zero_grad()
    wrapped.forward_backward(x[ours], target=y[ours])
    torch.testing.assert_close(grads(module), grads(bare))


def test_inside_a_distributed_data_parallel_gradients_are_averaged_over_ranks():
    run_ranks(2, train_on_ranks, timeout_s=60)


# -- exceptions -----------------------------------------------------------------------------------------------------


def test_after_an_exception_gradients_are_what_they_were():
    def loss(output, target):
        if target[0] < 0:
            raise ValueError("bad target")
        return functional.cross_entropy(output, target)

    wrapped = DataParallel(net(), ["cpu"] * 3, loss=loss)
    x, y = batch(6)
    wrapped.forward_backward(x, target=y)
    before = grads(wrapped)
    y[4] = -1
    with pytest.raises(ValueError, match=r"^replica 2 on cpu: bad target$"):
        wrapped.forward_backward(x, target=y)
    torch.testing.assert_close(grads(wrapped), before, rtol=0, atol=0)
    wrapped.zero_grad()
    wrapped.forward_backward(x[:2], target=y[:2])  # nothing of the failed call is left


# -- the reduction --------------------------------------------------------------------------------------------------


def leaves(num_replicas, num_params=3):
    return [[torch.zeros(2, requires_grad=True) for _ in range(num_params)] for _ in range(num_replicas)]


@pytest.mark.parametrize("num_replicas", range(1, 9))
def test_sums_do_not_depend_on_who_comes_first(num_replicas):
    orders = [list(range(num_replicas)), list(reversed(range(num_replicas))), torch.randperm(num_replicas).tolist()]
    values = torch.randn(num_replicas, 3, 2)
    totals = []
    for order in orders:
        rows = leaves(num_replicas)
        reduction = TreeReduction(rows, ((2, 1), (0,)))
        for index in order:
            sum((rows[index][n] * values[index, n]).sum() for n in range(3)).backward()
            reduction.end_backward(index)
            assert all(leaf.grad is None for leaf in rows[index])
        totals.append(reduction.total())
        reduction.close()
    for total in totals:
        for number in range(3):
            torch.testing.assert_close(total[number], values[:, number].sum(0))
            assert torch.equal(total[number], totals[0][number])


def test_a_bucket_is_summed_while_backward_goes_on():
    """Replica 0's first layer waits, in backward, until the last layer's gradients have been added up."""
    summed = threading.Event()

    class Sums(TreeReduction):
        def _offer(self, index, at):
            super()._offer(index, at)
            if self._nodes[0].num_taken[0] == 1:
                summed.set()

    rows = leaves(2, 2)
    reduction = Sums(rows, ((1,), (0,)))

    def backward(index):
        early = rows[index][0] * 1.0
        early.register_hook(lambda grad: None if summed.wait(60) else pytest.fail("not summed in time"))
        (early * rows[index][1]).sum().backward()

    with torch.no_grad():
        for row in rows:
            for leaf in row:
                leaf.fill_(1.0)
    threads = [threading.Thread(target=backward, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        reduction.end_backward(index)
    assert {number: total.tolist() for number, total in reduction.total().items()} == {0: [2.0, 2.0], 1: [2.0, 2.0]}
    reduction.close()


def test_buckets_hold_what_needs_gradients_last_first():
    sources = [torch.ones(1 << 18), torch.ones(1 << 18), torch.ones(4), torch.ones(4, dtype=torch.float64)]
    for source in (sources[0], sources[1], sources[3]):
        source.requires_grad_()
    assert plan_for(sources) == ((1,), (3,), (0,))
    assert plan_for([torch.ones(2)]) == ()


# -- who holds how much ---------------------------------------------------------------------------------------------


def peaks_of(train, num_replicas=4):
    module = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2000))
    wrapped = DataParallel(module, ["cpu"] * num_replicas, loss=nn.CrossEntropyLoss())
    x, y = torch.randn(256, 16), torch.randint(2000, (256,))
    for _ in range(2):
        wrapped.zero_grad()
        with wrapped.measure_bytes() as peaks:
            train(wrapped, x, y)
    return peaks


def test_no_device_holds_more_than_its_share():
    peaks = peaks_of(lambda wrapped, x, y: wrapped.forward_backward(x, target=y))
    others = [peaks[index] for index in (1, 2, 3)]
    share_bytes = 64 * 2000 * 4  # a share's outputs
    params_bytes = (16 * 32 + 32 + 32 * 2000 + 2000) * 4
    assert min(others) >= params_bytes + 2 * share_bytes
    assert max(others) <= 1.02 * min(others)
    assert peaks[0] <= 1.1 * max(others)  # the batch lies there too


def test_gathering_puts_all_outputs_on_the_first_device():
    peaks = peaks_of(lambda wrapped, x, y: functional.cross_entropy(wrapped(x), y).backward())
    assert peaks[0] >= 2 * peaks[1]
