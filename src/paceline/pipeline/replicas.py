"""A lane's replicas: the same stages on other ranks, for other samples.

The invariant: replicas begin alike, and average their gradients once a step, at the lane's last backward.
"""

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module, ModuleDict

from paceline.parallel import DistributedDataParallel
from paceline.parallel.replicas.broadcast import broadcast_tensors
from paceline.pipeline.schedule import Action, Schedule
from paceline.pipeline.stage import Stage


class _Lane(Module):
    """All parts of a lane, as one module to be averaged."""

    def __init__(self, stages: Mapping[int, Stage], loss: object) -> None:
        super().__init__()
        self.parts = ModuleDict({str(number): stage.part for number, stage in stages.items()})
        self.loss = loss if isinstance(loss, Module) else None

    def forward(self, number: int, *args: Any, **kwargs: Any) -> Any:
        return self.parts[str(number)](*args, **kwargs)


class Replicas:
    """This rank's lane among its replicas on other ranks.

    Args:
        stages: this rank's, built alike by all replicas. A collective call among them.
        loss: where it is computed here; it may have parameters, too.
        group: of the replicas; None where there is but one.
    Raises:
        ReplicaMismatchError: their parameters differ.
    """

    def __init__(self, stages: Mapping[int, Stage], loss: object, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.wrapper: DistributedDataParallel | None = None
        self._module = _Lane(stages, loss)
        if group is None:
            return
        if not any(param.requires_grad for param in self._module.parameters()):  # nothing to average, yet alike
            broadcast_tensors([*self._module.parameters(), *self._module.buffers()], group)
            return
        self.wrapper = DistributedDataParallel(self._module, process_group=group)
        self.wrapper.training = self._module.training = any(stage.part.training for stage in stages.values())
        for number, stage in stages.items():
            stage.call = functools.partial(self.wrapper, number)

    def around(self, action: Action, schedule: Schedule, lane: int) -> contextlib.AbstractContextManager[None]:
        """Copy buffers in the lane's first forward, average in its last backward, and leave replicas alone between."""
        actions = schedule.lanes[lane]
        is_first = action == actions[0]
        if self.wrapper is not None and not is_first and action != actions[-1]:
            return self.wrapper.no_sync()
        if self.wrapper is None and self._group is not None and is_first:
            broadcast_tensors(list(self._module.buffers()), self._group)
        return contextlib.nullcontext()

    def total(self, value: float, device: torch.device) -> float:
        """The sum over the replicas. A collective call among them."""
        if self._group is None:
            return value
        tensor = torch.tensor([value], dtype=torch.float64, device=device)
        dist.all_reduce(tensor, group=self._group)
        return float(tensor)
