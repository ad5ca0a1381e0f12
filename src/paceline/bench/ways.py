"""The ways of training that are compared, each built as a script would build it.

The invariant: in one step each device gets one batch, whichever way it is trained.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchsDDP  # before anybody patches torch's names

from paceline.bench.recipe import Recipe, Training
from paceline.bench.results import DATA_PARALLEL, MORE_THREADS, ONE_PROCESS, OURS, TORCHS
from paceline.parallel import DataParallel, DistributedDataParallel

PATIENCE = timedelta(minutes=5)  # for a rank that does not come
KEYS = {"threads": MORE_THREADS, "dp": DATA_PARALLEL, "ddp": OURS, "torch": TORCHS}


@dataclass(frozen=True)
class Setting:
    """How ranks, or replicas, are set up.

    Args:
        num_devices: ranks, or replicas.
        threads: of torch's, a rank or replica.
        device_type: ``cpu`` or ``cuda``.
        backend: of paceline's DistributedDataParallel.
    """

    num_devices: int
    threads: int
    device_type: str
    backend: str

    @property
    def torchs_backend(self) -> str:
        return "nccl" if self.device_type == "cuda" else "gloo"

    @property
    def device(self) -> torch.device:
        """This rank's."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device_type == "cuda" else torch.device("cpu")

    def backend_of(self, way: str) -> str | None:
        """What the ranks of a way talk over."""
        return {OURS: self.backend, TORCHS: self.torchs_backend}.get(way)


def is_on_every_rank(way: str) -> bool:
    """Or else in one process."""
    return way in (OURS, TORCHS)


@dataclass
class Trainee:
    """A model in the wrapper of one way, with what a step of it needs."""

    way: str
    model: nn.Module  # the wrapper, or the module itself
    training: Training
    threads: int


def build(way: str, recipe: Recipe, setting: Setting) -> Trainee:
    """Make the model, and wrap it. A collective call of those ways that run on every rank.

    Raises:
        BenchError: the recipe is none.
        Exception: whatever a wrapper raises.
    """
    training = recipe.make(setting.device)
    threads = setting.threads
    if way in (MORE_THREADS, DATA_PARALLEL):
        training.widen(setting.num_devices)
    if way == MORE_THREADS:
        threads *= setting.num_devices
    return Trainee(way, _WRAPS[way](training.model, setting), training, threads)


def _data_parallel(model: nn.Module, setting: Setting) -> nn.Module:
    logging.getLogger("paceline.parallel.data_parallel").setLevel(logging.ERROR)  # whoever compares needs no advice
    kind, count = setting.device_type, setting.num_devices
    return DataParallel(model, [f"cuda:{index}" if kind == "cuda" else "cpu" for index in range(count)])


def _ours(model: nn.Module, setting: Setting) -> nn.Module:
    return DistributedDataParallel(model, **_over(setting.backend, setting))


def _torchs(model: nn.Module, setting: Setting) -> nn.Module:
    """In its leanest form."""
    return TorchsDDP(model, gradient_as_bucket_view=True, **_over(setting.torchs_backend, setting))


def _over(backend: str, setting: Setting) -> dict[str, Any]:
    device_ids = [setting.device.index] if setting.device_type == "cuda" else None
    return {"device_ids": device_ids, "process_group": dist.new_group(backend=backend, timeout=PATIENCE)}


_WRAPS: dict[str, Callable[[nn.Module, Setting], nn.Module]] = {
    ONE_PROCESS: lambda model, _: model,
    MORE_THREADS: lambda model, _: model,
    DATA_PARALLEL: _data_parallel,
    OURS: _ours,
    TORCHS: _torchs,
}
