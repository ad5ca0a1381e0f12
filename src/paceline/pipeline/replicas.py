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

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        super().__init__()
        self.parts = ModuleDict({str(number): stage.part for number, stage in stages.items()})

    def forward(self, number: int, *args: Any, **kwargs: Any) -> Any:
        return self.parts[str(number)](*args, **kwargs)


class Replicas:
    """This rank's lane among its replicas on other ranks.

    Args:
        stages: this rank's, built alike by all replicas. A collective call among them.
        group: of the replicas; None where there is but one.
    Raises:
        ReplicaMismatchError: their parameters differ.
    """

    def __init__(self, stages: Mapping[int, Stage], group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.wrapper: DistributedDataParallel | None = None
        params = [param for stage in stages.values() for param in stage.part.parameters()]
        if group is None:
            return
        if not any(param.requires_grad for param in params):  # nothing to average, but alike from the beginning
            buffers = [buffer for stage in stages.values() for buffer in stage.part.buffers()]
            broadcast_tensors([*dict.fromkeys([*params, *buffers])], group)
            return
        self.wrapper = DistributedDataParallel(_Lane(stages), process_group=group)
        for number, stage in stages.items():
            stage.call = functools.partial(self.wrapper, number)

    def around(self, action: Action, schedule: Schedule, lane: int) -> contextlib.AbstractContextManager[None]:
        """Copy buffers in the lane's first forward, average in its last backward, and leave replicas alone between."""
        actions = schedule.lanes[lane]
        if self.wrapper is None or action in (actions[0], actions[-1]):
            return contextlib.nullcontext()
        return self.wrapper.no_sync()

    def total(self, value: float, device: torch.device) -> float:
        """The sum over the replicas. A collective call among them."""
        if self._group is None:
            return value
        tensor = torch.tensor([value], dtype=torch.float64, device=device)
        dist.all_reduce(tensor, group=self._group)
        return float(tensor)
