"""Tensors are found in whatever forward returns."""

import collections
import collections.abc
import dataclasses

import torch

from paceline.parallel.ddp.outputs import find_tensors

Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Record:
    value: object


class Slotted:
    __slots__ = ("empty", "value")

    def __init__(self, value):
        self.value = value


def test_every_kind_of_container():
    tensors = [torch.tensor(number) for number in range(7)]
    holder = type("Holder", (), {})()
    holder.deep = [tensors[6]]
    output = {
        "list": [tensors[0], (tensors[1],)],
        "pair": Pair(tensors[2], "text"),
        "record": Record({"set": {tensors[3]}}),
        "slots": Slotted(tensors[4]),
        "mapping": collections.OrderedDict(x=tensors[5]),
        "object": holder,
        "none": None,
        "number": 3.5,
    }
    assert sorted(tensor.item() for tensor in find_tensors(output)) == list(range(7))


def test_an_object_that_holds_itself_ends():
    loop = Record(None)
    loop.value = [loop, torch.tensor(1)]
    assert [tensor.item() for tensor in find_tensors(loop)] == [1]


def test_modules_are_not_searched():
    assert list(find_tensors([torch.nn.Linear(1, 1)])) == []


class Hostile(collections.abc.Mapping):
    def __getitem__(self, key):
        raise KeyError(key)

    def __iter__(self):
        raise RuntimeError("not now")

    def __len__(self):
        return 1


class Mangled:
    __slots__ = ("__hidden",)

    def __init__(self, value):
        self.__hidden = value


def test_what_cannot_be_looked_into_is_passed_over():
    class Lazy:
        def __getattr__(self, name):
            raise KeyError(name)

    found = find_tensors([Hostile(), Lazy(), Mangled(torch.tensor(2)), torch.tensor(1)])
    assert sorted(tensor.item() for tensor in found) == [1, 2]


def test_the_search_ends_in_a_heap_of_objects():
    heap = [[] for _ in range(50_000)]
    assert [tensor.item() for tensor in find_tensors([heap, torch.tensor(1)])] == [1]
    assert list(find_tensors([torch.tensor(1), *heap])) == []  # too far down, and that is known
