"""Gradients of any dtype and layout are averaged, and lie in whose memory they should; over both kinds of bucket.

Two ranks, whose inputs are ones times 1 and 2: a linear layer's gradient is 1.5 on average.
"""

import pytest
import torch
from torch import nn

from paceline import DistributedDataParallel
from support.models import TwoLayers, inputs
from support.ranks import run_ranks
from support.steps import grads

pytestmark = pytest.mark.usefixtures("both_ways")


def mixed_dtypes(world):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
            self.weights = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes])

        def forward(self, x):
            return sum((w.real if w.is_complex() else w).double().sum() * x for w in self.weights)

    wrapped = DistributedDataParallel(Mixed())
    wrapped(inputs(world).double().squeeze()).backward()
    return [
        (str(p.grad.dtype), p.grad.real.tolist() if p.is_complex() else p.grad.tolist()) for p in wrapped.parameters()
    ]


def test_parameters_of_five_dtypes():
    names = ["float64", "float32", "bfloat16", "float16", "complex64"]
    assert run_ranks(2, mixed_dtypes) == [[(f"torch.{name}", [1.5] * 3) for name in names]] * 2


def layouts(world):
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten()).to(memory_format=torch.channels_last)
    model.register_parameter("transposed", nn.Parameter(torch.ones(3, 2).t()))
    wrapped = DistributedDataParallel(model)
    x = torch.arange(2 * 2 * 9, dtype=torch.float32).view(2, 2, 3, 3) * (world.rank + 1)
    factor = torch.arange(6.0).view(2, 3) * (world.rank + 1)
    (wrapped(x).sum() + (model.transposed * factor).sum()).backward()
    return model[0].weight.grad.clone(), model.transposed.grad.clone(), model[0].weight.grad.stride()


def test_gradients_that_are_not_contiguous():
    x = torch.arange(36.0).view(2, 2, 3, 3).sum(0) * 1.5
    for conv, transposed, stride in run_ranks(2, layouts):
        torch.testing.assert_close(conv, x.expand(3, 2, 3, 3), rtol=1e-6, atol=0)
        torch.testing.assert_close(transposed, torch.arange(6.0).view(2, 3) * 1.5)
        assert stride == (18, 1, 6, 2)  # channels last, as the weight is


def sparse(world):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 2, sparse=True)
            self.head = nn.Linear(2, 1, bias=False)

        def forward(self, rows):
            return self.head(self.table(rows)).sum()

    model = Model()
    nn.init.ones_(model.head.weight)
    wrapped = DistributedDataParallel(model)
    seen = []
    for number in range(3):
        wrapped.zero_grad()
        if number < 2:
            wrapped(torch.tensor([world.rank, 5])).backward()
        elif world.is_main:
            wrapped(torch.tensor([7])).backward()
        else:
            model.head(torch.ones(1, 2)).sum().backward()
        grad = model.table.weight.grad
        seen.append((grad.is_sparse, grad.to_dense()[:, 0].tolist()))
    return seen


def test_sparse_gradients_stay_sparse():
    first = [0.5, 0.5, 0, 0, 0, 1.0, 0, 0, 0, 0]
    last = [0, 0, 0, 0, 0, 0, 0, 0.5, 0, 0]
    assert run_ranks(2, sparse) == [[(True, first), (True, first), (True, last)]] * 2


def kept_gradients(world):
    model = nn.Linear(1, 1, bias=False)
    wrapped = DistributedDataParallel(model)
    history, views = [], []
    for number in range(3):
        wrapped.zero_grad()
        wrapped(inputs(world) * (number + 1)).backward()
        history.append(model.weight.grad)
        views.append(model.weight.grad.detach().view(-1))
    return [g.item() for g in history], [v.item() for v in views]


def test_gradients_that_somebody_keeps_are_not_overwritten_by_later_steps():
    assert run_ranks(2, kept_gradients) == [([1.5, 3.0, 4.5], [1.5, 3.0, 4.5])] * 2


def own_buffer(world):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    flat = torch.zeros(2)
    for position, param in enumerate(model.parameters()):
        param.grad = flat[position].view(1, 1)
    before = [param.grad for param in model.parameters()]
    seen = []
    for _ in range(2):
        flat.zero_()
        wrapped(inputs(world)).backward()
        seen.append(flat.tolist())
    return seen, all(param.grad is grad for param, grad in zip(model.parameters(), before, strict=True))


def test_gradients_that_lie_in_somebodys_buffer_stay_there():
    assert run_ranks(2, own_buffer) == [([[1.5, 1.5]] * 2, True)] * 2


def zeroed_in_place(world):
    model = nn.Linear(1, 1, bias=False)
    wrapped = DistributedDataParallel(model)
    seen, places = [], set()
    for _ in range(4):
        wrapped.zero_grad(set_to_none=False)
        wrapped(inputs(world)).backward()
        seen.append(model.weight.grad.item())
        places.add(model.weight.grad.data_ptr())
    return seen, len(places)


def test_gradients_zeroed_in_place_stay_in_place():
    seen, places = zip(*run_ranks(2, zeroed_in_place), strict=True)
    assert list(seen) == [[1.5] * 4] * 2
    assert places == (1, 1)


def places_of_fresh_gradients(world):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    places = []
    for _ in range(6):
        wrapped.zero_grad()
        wrapped(inputs(world)).backward()
        places.append([p.grad.data_ptr() for p in model.parameters()])
    return places[1:]  # after the first step buckets are laid out anew


def test_gradients_that_nobody_keeps_lie_in_the_same_memory_in_every_step():
    for places in run_ranks(2, places_of_fresh_gradients):
        assert places == [places[0]] * 5


def hooks_of_the_user(world):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0)
    seen = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))
    wrapped(inputs(world)).backward()
    return seen, grads(model)


def test_a_hook_registered_after_wrapping_finds_this_ranks_gradient():
    assert run_ranks(2, hooks_of_the_user) == [([1.0, 1.0], [1.5, 1.5]), ([2.0, 2.0], [1.5, 1.5])]


def accumulated_in_place(world):
    model = nn.Linear(1, 1, bias=False)
    wrapped = DistributedDataParallel(model)
    seen = []
    for _ in range(3):
        wrapped.zero_grad()
        with wrapped.no_sync():
            wrapped(inputs(world)).backward()
        wrapped(inputs(world)).backward()
        seen.append((model.weight.grad.item(), model.weight.grad.data_ptr()))
    return [value for value, _ in seen], len({place for _, place in seen[1:]})


def test_an_accumulated_gradient_that_nobody_holds_is_stored_once():
    assert run_ranks(2, accumulated_in_place) == [([3.0] * 3, 1)] * 2


def huge_layers(world):
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    wrapped = DistributedDataParallel(model)
    seen = []
    model[0].weight.register_hook(lambda _: seen.append(model[1].weight.grad is None))
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(torch.full((1, 256), world.rank + 1.0)).sum().backward()
    return seen


def test_a_huge_gradient_is_in_its_bucket_before_the_next_arrives():
    assert run_ranks(2, huge_layers) == [[True, True]] * 2


def functional_sparse(world):
    table = nn.ParameterList([nn.Parameter(torch.ones(4, 2))])
    wrapped = DistributedDataParallel(table)
    for _ in range(2):
        rows = nn.functional.embedding(torch.tensor([world.rank]), table[0], sparse=True)
        rows.sum().backward()
    del wrapped
    return table[0].grad.to_dense()[:, 0].tolist()


def test_a_sparse_gradient_that_was_not_announced_accumulates_too():
    assert run_ranks(2, functional_sparse) == [[1.0, 1.0, 0.0, 0.0]] * 2


def tied_sparse(world):
    table = nn.Embedding(3, 2, sparse=True)
    nn.init.ones_(table.weight)
    wrapped = DistributedDataParallel(table)
    (table(torch.tensor([world.rank])) @ table.weight.t()).sum().backward()
    del wrapped
    return table.weight.grad.is_sparse, table.weight.grad.tolist() if not table.weight.grad.is_sparse else None


def test_a_sparse_table_tied_to_a_dense_layer_has_a_dense_gradient():
    # rows 0 and 1 are looked up by one rank each: 3 where looked up, halved, plus 1 from the product everywhere
    assert run_ranks(2, tied_sparse) == [(False, [[2.5, 2.5], [2.5, 2.5], [1.0, 1.0]])] * 2
