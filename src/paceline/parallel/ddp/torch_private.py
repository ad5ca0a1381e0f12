"""What is private to torch's wrapper, as far as other people's code looks at it.

The invariant: nothing here reduces anything; a call of torch's that has no meaning here does nothing, or is not there.
"""

from collections.abc import Iterable
from typing import NoReturn

import torch

from paceline.parallel.reducer.reducer import Reducer


class Absent:
    """An attribute that torch's class has and this one has not, in spite of being a subclass."""

    def __get__(self, _instance: object, _owner: type) -> NoReturn:
        raise AttributeError


class TorchsReducer:
    """The few calls of torch's reducer that libraries make around a backward of their own."""

    def __init__(self, reducer: Reducer | None) -> None:
        self._reducer = reducer

    def prepare_for_forward(self) -> None:
        """Nothing is to be done."""

    def prepare_for_backward(self, outputs: Iterable[torch.Tensor]) -> None:
        """A backward from ``outputs`` is to come."""
        if self._reducer is not None:
            for output in outputs:
                self._reducer.watch(output)

    def _rebuild_buckets(self) -> bool:
        return False
