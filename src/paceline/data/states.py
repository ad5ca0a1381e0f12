"""The random states of a process, put aside and back again: those that draw on the CPU.

The invariant: what is put back is the whole state, with the normal deviate that a generator keeps for its next call.

[Note: states as memory]
The public ways to copy the states of Python's and NumPy's generators make an integer of each of their 624 words. That
takes as long as loading a small batch. Both states are plain memory without references. NumPy tells where its own
lies; in CPython it is what ``_random.Random`` has beyond a bare object. So they are copied as memory if a trial, on
generators of our own, shows that this is right, and in the public ways otherwise.
"""

import _random
import ctypes
import functools
import random
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor

States: TypeAlias = tuple[Tensor, Any, Any]

_NUM_WORDS = 624


def take_states() -> States:
    """Read the states. Before anything draws they must be put back, or seeded: reading may have moved them."""
    return torch.default_generator.get_state(), _take_numpys(), _take_pythons()


def put_states(states: States) -> None:
    """Put back what ``take_states`` gave; any number of times."""
    torch.default_generator.set_state(states[0])
    _put_numpys(*states[1])
    _put_pythons(*states[2])


def is_state(memory: Any, draw: Callable[[], object]) -> bool:
    """Whether a memory is all there is to a generator's state: with it written back, the same numbers come again."""
    before = memory.raw
    first = [draw() for _ in range(2 * _NUM_WORDS)]
    memory.raw = before
    return first == [draw() for _ in range(2 * _NUM_WORDS)]


def _memory(address: int, size: int) -> Any:
    return (ctypes.c_char * size).from_address(address)


def _place_of_pythons(generator: random.Random) -> Any:
    header: int = object.__basicsize__
    return _memory(id(generator) + header, _random.Random.__basicsize__ - header)


@functools.cache
def _pythons_memory() -> Any:
    """None where the state can't be copied as memory."""
    trial = random.Random(0)
    return _place_of_pythons(random._inst) if is_state(_place_of_pythons(trial), trial.random) else None


def _take_pythons() -> tuple[Any, float | None]:
    memory = _pythons_memory()
    if memory is None:
        return random.getstate(), None
    return memory.raw, random._inst.gauss_next  # type: ignore[attr-defined]


def _put_pythons(state: Any, kept: float | None) -> None:
    memory = _pythons_memory()
    if memory is None:
        random.setstate(state)
    else:
        memory.raw = state
        random._inst.gauss_next = kept  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=1)
def _numpys_memory(bits: Any) -> Any:
    """None where the state can't be copied as memory."""
    size = (_NUM_WORDS + 1) * 4  # and the place among them
    trial = np.random.MT19937(0)
    if type(bits) is not type(trial) or not is_state(_memory(trial.ctypes.state_address, size), trial.random_raw):
        return None
    return _memory(bits.ctypes.state_address, size)


def _take_numpys() -> tuple[Any, Any, float | None]:
    bits = mtrand.get_bit_generator()
    memory = _numpys_memory(bits)
    if memory is None:
        state = np.random.get_state(legacy=False)
        mtrand.set_bit_generator(np.random.MT19937(0))  # the only kind that numpy.random.seed can seed
        return bits, state, None
    before = memory.raw
    # A deviate that was kept comes without a draw. Nothing else tells cheaply whether there is one.
    deviate = np.random.standard_normal()
    return bits, before, deviate if memory.raw == before else None


def _put_numpys(bits: Any, state: Any, kept: float | None) -> None:
    mtrand.set_bit_generator(bits)  # forgets a deviate that is kept
    memory = _numpys_memory(bits)
    if memory is None:
        np.random.set_state(state)
        return
    memory.raw = state
    if kept is not None:
        np.random.set_state({**np.random.get_state(legacy=False), "has_gauss": 1, "gauss": kept})
