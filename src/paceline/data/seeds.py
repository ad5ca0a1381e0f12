"""Random numbers that are the same on all ranks, or differ between them, however many processes draw.

The invariant: nothing here leaves a trace in the random state of a process that trains; workers, which only make
samples, are seeded anew for each batch.
"""

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from paceline.data.states import States, put_states, take_states

_GAMMA = 0x9E3779B97F4A7C15


def seed_at(key: int, position: int) -> int:
    """A seed for each place in an epoch, from the epoch's key: a counter of 64 bits, as splitmix64 has."""
    return (key + position * _GAMMA) & 0xFFFFFFFFFFFFFFFF


def seed_process(seed: int) -> None:
    """Seed what draws on the CPU in this process: torch, numpy and Python.

    Args:
        seed: any 64 bits.
    """
    torch.default_generator.manual_seed(seed)  # torch.manual_seed looks for devices, which takes a hundred times longer
    np.random.seed(seed >> 32)  # torch's generator takes the lower half, and is of the same kind
    random.seed(seed)


class OwnRandomness:
    """Within ``with``, a random state of its own that goes on from one ``with`` to the next."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._own: States | None = None
        self._outer: States | None = None

    def __enter__(self) -> None:
        self._outer = take_states()
        if self._own is None:
            seed_process(self._seed)
        else:
            put_states(self._own)

    def __exit__(self, *_: object) -> None:
        assert self._outer is not None
        self._own = take_states()
        put_states(self._outer)


class Seeded:
    """Within ``with``, a random state that follows from a seed; afterwards it is as before.

    In the main thread only: the states are the process's, and a thread that loads ahead must not turn back what the
    main one has drawn meanwhile. It loads from the process's own state, as torch does.
    """

    __slots__ = ("_outer", "_seed")

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._outer: States | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._outer = take_states()
            seed_process(self._seed)

    def __exit__(self, *_: object) -> None:
        if self._outer is not None:
            put_states(self._outer)


@contextlib.contextmanager
def kept_randomness() -> Iterator[None]:
    """Put the process's random state back as it was."""
    states = take_states()
    put_states(states)
    try:
        yield
    finally:
        put_states(states)


class ForWorker:
    """What a worker is to load, on its way there. It arrives as it was, and the worker is seeded for it.

    So it matters not which worker loads it, nor how many there are.
    """

    __slots__ = ("_item", "_key", "_position")

    def __init__(self, item: Any, key: int, position: int) -> None:
        self._item = item
        self._key = key
        self._position = position

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self._item, self._key, self._position)


def _arrive(item: Any, key: int, position: int) -> Any:
    if get_worker_info() is not None:
        seed_process(seed_at(key, position))
    return item
