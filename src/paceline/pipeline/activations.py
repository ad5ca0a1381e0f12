"""How many bytes each lane keeps from forward to backward.

The invariant: a storage counts once, as long as it lives; weights do not count.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from paceline.parallel.data_parallel.meter import Ledger
from paceline.pipeline.stage import Stage


@contextlib.contextmanager
def measure_activations(stages: Iterable[Stage], lane_of: Callable[[int], int]) -> Iterator[dict[int, int]]:
    """The most bytes that each lane keeps in this block; complete when the block is over."""
    ledger, peaks = Ledger(), dict[int, int]()
    stages = list(stages)
    for stage in stages:
        stage.meter = _booking(ledger, lane_of(stage.number), stage)
    try:
        yield peaks
    finally:
        for stage in stages:
            stage.meter = None
        peaks.update(ledger.peak_bytes)


def _booking(ledger: Ledger, lane: int, stage: Stage) -> Callable[[Tensor], None]:
    weights = {param.untyped_storage().data_ptr() for param in stage.part.parameters()}

    def book(tensor: Tensor) -> None:
        if tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() not in weights:
            ledger.book(tensor, lane)

    return book
