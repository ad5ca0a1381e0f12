"""Casts around a model's forward: containers, copies, replicas."""

import collections
import copy
import dataclasses
import inspect
import io

import pytest
import torch
from torch import nn

import paceline
from paceline import amp

FLOAT, HALF = torch.float32, torch.float16
Pair = collections.namedtuple("Pair", "first second")


@pytest.fixture(autouse=True)
def off():
    yield
    amp.deactivate()


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    name: str


class OwnBatch:
    """A class of the user's, with a ``to`` of its own."""

    def __init__(self, x):
        self.x = x

    def to(self, dtype):
        return OwnBatch(self.x.to(dtype))


class Echo(nn.Module):
    """Notes what it was given, and returns it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, item, *, other=None):
        self.seen = item, other
        return item


X = torch.ones(2)
CASES = [
    (X, lambda item: item.dtype),
    (X.double(), lambda item: item.dtype),
    ([X, "text"], lambda item: item[0].dtype),
    ((X, 3), lambda item: item[0].dtype),
    ({"x": [X]}, lambda item: item["x"][0].dtype),
    (Pair(X, None), lambda item: item.first.dtype),
    (Batch(X, "a"), lambda item: item.x.dtype),
    (collections.OrderedDict(x=X), lambda item: item["x"].dtype),
]


@pytest.mark.parametrize(("item", "dtype_of"), CASES, ids=lambda value: type(value).__name__)
def test_inputs_are_cast_and_outputs_are_float32_in_containers_of_the_same_type(item, dtype_of):
    model = amp.initialize(Echo(), opt_level="O2", verbosity=0)
    output = model(item, other=item)
    assert [dtype_of(given) for given in model.seen] == [HALF, HALF]
    assert dtype_of(output) == FLOAT
    assert {type(given) for given in (*model.seen, output)} == {type(item)}
    assert dtype_of(item) in (FLOAT, torch.float64)  # the caller's own is left alone


def test_integers_and_what_holds_no_tensor_come_through_as_they_are():
    model = amp.initialize(Echo(), opt_level="O2", verbosity=0)
    for item in (torch.arange(3), "text", None, 1.5, ["a", {"b": 1}], nn.Linear(1, 1)):
        assert model(item) is item


def test_a_batch_of_the_users_own_class_is_cast_by_its_own_method():
    model = amp.initialize(Echo(), opt_level="O3", verbosity=0)
    model(OwnBatch(X))
    assert model.seen[0].x.dtype == HALF


def test_o0_makes_float32_of_all_that_comes_in():
    model = amp.initialize(Echo(), opt_level="O0", verbosity=0)
    model(X.double())
    assert model.seen[0].dtype == FLOAT


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_forward_called_by_name_is_cast_too_and_keeps_its_signature(level):
    model = amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
    assert model.forward(X).dtype == FLOAT
    assert list(inspect.signature(model.forward).parameters) == ["input"]


def test_a_forward_that_the_instance_had_is_called_and_comes_back():
    model = Echo()
    model.forward = lambda item: (item, "own")
    own = model.forward
    amp.initialize(model, opt_level="O2", verbosity=0)
    assert model(X)[1] == "own"
    amp.deactivate()
    assert model.forward is own


def test_a_second_initialize_takes_the_place_of_the_first():
    model = amp.initialize(Echo(), opt_level="O1", verbosity=0)
    amp.initialize(model, opt_level="O3", verbosity=0)
    model(X)
    assert model.seen[0].dtype == HALF
    amp.deactivate()
    assert "forward" not in vars(model)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_copies_and_pickled_models_compute_with_their_own_weights(level):
    model = amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    expected = model(X)
    model.weight.data.zero_()
    for copied in copies:
        assert torch.equal(copied(X), expected)
        assert not torch.equal(model(X), expected)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_replicas_of_data_parallel_compute_with_their_own_weights_and_in_few_bits(level):
    seen = []

    class Spy(nn.Linear):
        def forward(self, x):
            output = super().forward(x)
            seen.append((output.dtype, self is not model))
            return output

    model = Spy(2, 2)
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=1.0), opt_level=level, loss_scale=4.0
    )
    wrapped = paceline.DataParallel(model, ["cpu", "cpu"])
    with amp.scale_loss(wrapped(torch.ones(4, 2)).sum(), optimizer) as scaled:
        scaled.backward()
    assert seen == [(HALF, True)] * 2
    assert [param.grad.flatten()[0].item() for param in amp.master_params(optimizer)] == [4.0, 4.0]
