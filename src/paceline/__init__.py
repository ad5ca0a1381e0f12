"""Data-parallel training for PyTorch, on one device or many, with torch's own names.

Names are loaded when they are first used, so ``import paceline`` costs nothing, imports no torch, and changes no
environment, logging or random state.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline import amp, errors
    from paceline.checkpoint import Checkpointer, load, save
    from paceline.data import BatchSampler, DataLoader, DistributedSampler, fingerprint, gather
    from paceline.launch.spawning.spawn import spawn
    from paceline.parallel import DataParallel, DistributedDataParallel, SyncBatchNorm
    from paceline.parallel.global_mean import global_mean
    from paceline.pipeline import Pipeline
    from paceline.world import World, init, shutdown

_HOME_OF = {
    "BatchSampler": "paceline.data",
    "Checkpointer": "paceline.checkpoint",
    "DataLoader": "paceline.data",
    "DataParallel": "paceline.parallel",
    "DistributedDataParallel": "paceline.parallel",
    "DistributedSampler": "paceline.data",
    "Pipeline": "paceline.pipeline",
    "SyncBatchNorm": "paceline.parallel",
    "World": "paceline.world",
    "fingerprint": "paceline.data",
    "gather": "paceline.data",
    "global_mean": "paceline.parallel",
    "init": "paceline.world",
    "load": "paceline.checkpoint",
    "save": "paceline.checkpoint",
    "shutdown": "paceline.world",
    "spawn": "paceline.launch.spawning.spawn",
}

__version__ = "0.1.0"

__all__ = [
    "BatchSampler",
    "Checkpointer",
    "DataLoader",
    "DataParallel",
    "DistributedDataParallel",
    "DistributedSampler",
    "Pipeline",
    "SyncBatchNorm",
    "World",
    "amp",
    "errors",
    "fingerprint",
    "gather",
    "global_mean",
    "init",
    "load",
    "save",
    "shutdown",
    "spawn",
]


def _register_backends() -> None:
    """Let torch.distributed know our backends, if it is there; torch asks for them itself when it comes later."""
    if "torch" in sys.modules:
        importlib.import_module("paceline.comm.register").register()


_register_backends()


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    elif name in ("amp", "checkpoint", "comm", "data", "errors", "parallel", "pipeline", "plan"):
        value = importlib.import_module(f"paceline.{name}")
    else:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    _register_backends()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
