"""Giving paceline's classes to scripts that import torch's names.

The invariant: a patch puts back exactly what it found, and nothing is patched unless somebody asks.
"""

import sys
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch.nn import parallel
from torch.nn.modules import batchnorm
from torch.nn.parallel import distributed

from paceline.parallel.data_parallel import DataParallel, data_parallel
from paceline.parallel.ddp.wrapper import DistributedDataParallel
from paceline.parallel.sync_batchnorm import SyncBatchNorm

# torch gives its function the name of the module that holds it.
_data_parallel = sys.modules[torch.nn.parallel.DataParallel.__module__]

_PLACES: list[tuple[ModuleType, Callable[..., Any]]] = [
    (torch.nn, DataParallel),
    (parallel, DataParallel),
    (_data_parallel, DataParallel),
    (parallel, data_parallel),
    (_data_parallel, data_parallel),
    (parallel, DistributedDataParallel),
    (distributed, DistributedDataParallel),
    (torch.nn, SyncBatchNorm),
    (torch.nn.modules, SyncBatchNorm),
    (batchnorm, SyncBatchNorm),
]


class Patch:
    """A patch that is in place until ``undo``, or until the block is over."""

    def __init__(self) -> None:
        self._before = [(place, kind.__name__, getattr(place, kind.__name__)) for place, kind in _PLACES]
        for place, kind in _PLACES:
            setattr(place, kind.__name__, kind)

    def undo(self) -> None:
        """Put torch's classes back. Twice does no harm."""
        while self._before:
            place, name, value = self._before.pop()
            setattr(place, name, value)

    def __enter__(self) -> "Patch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def patch_torch() -> Patch:
    """Let torch's ``DistributedDataParallel``, ``DataParallel``, ``data_parallel`` and ``SyncBatchNorm`` be paceline's.

    For scripts, and libraries, that import torch's names; call it before they do, or before they look them up:

        paceline.parallel.patch_torch()          # from here on

        with paceline.parallel.patch_torch():    # in this block
            import train
    """
    return Patch()
