"""Random numbers that are the same on all ranks, or differ between them, however many processes draw.

The invariant: nothing here leaves a trace in the random state of a process that trains; workers, which only make
samples, are seeded anew for each batch.
"""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info


def seed_process(seed: int) -> None:
    """Seed what draws on the CPU in this process: torch, numpy and Python.

    Args:
        seed: any 64 bits.
    """
    torch.default_generator.manual_seed(seed)  # torch.manual_seed looks for devices, which takes a hundred times longer
    np.random.seed(seed >> 32)  # torch's generator takes the lower half, and is of the same kind
    random.seed(seed)


class OwnRandomness:
    """Within ``with``, a random state of its own that goes on from one ``with`` to the next.

    Only the CPU's: samplers and datasets draw there.
    """

    def __init__(self, seed: int) -> None:
        self._seed: int | None = seed
        self._own: Any = None
        self._outer: Any = None

    def __enter__(self) -> None:
        self._outer = _state()
        if self._seed is not None:
            seed_process(self._seed)
            self._seed = None
        else:
            _set_state(self._own)

    def __exit__(self, *_: object) -> None:
        self._own = _state()
        _set_state(self._outer)


def _state() -> Any:
    return torch.default_generator.get_state(), np.random.get_state(), random.getstate()


def _set_state(state: Any) -> None:
    torch.default_generator.set_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])


@contextlib.contextmanager
def kept_randomness() -> Iterator[None]:
    """Put the process's random state back as it was."""
    state = _state()
    try:
        yield
    finally:
        _set_state(state)


class SeededBatch(list[Any]):
    """A batch's indices. The worker that begins to fetch them is seeded, so it matters not which worker does.

    A list, since that is what datasets are promised; torch's fetcher and ``__getitems__`` of torch's datasets iterate
    over it. In the process that trains nothing is seeded.
    """

    def __init__(self, indices: Any, seed: int) -> None:
        super().__init__(indices)
        self.seed = seed

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            seed_process(self.seed)
        return super().__iter__()

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededBatch, (self[:], self.seed)
