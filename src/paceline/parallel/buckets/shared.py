"""A bucket in memory that all ranks of the host reach: averaged where it lies."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from paceline.comm.memory.averages import Averages, SharedTensor
from paceline.parallel.buckets.bucket import Member
from paceline.parallel.buckets.dense import DenseBucket


class SharedBucket(DenseBucket):
    """Dense gradients in memory that ``averages`` works on."""

    kind = "shared"
    divides = False

    def __init__(self, number: int, members: Sequence[Member], world_size: int, averages: Averages) -> None:
        super().__init__(number, members, world_size)
        self._averages = averages
        self._shared: SharedTensor | None = None
        self._launch: int | None = None

    def send(self, group: dist.ProcessGroup) -> None:  # noqa: ARG002
        assert self._shared is not None
        self._launch = self._averages.launch(self._shared)

    def wait(self) -> None:
        if self._launch is not None:
            self._averages.wait(self._launch)
            self._launch = None

    def has_ended(self) -> bool:
        return self._launch is not None and self._averages.has_ended(self._launch)

    def _allocate(self, numel: int) -> Tensor:
        self._shared = self._averages.allocate(numel, self.members[0].dtype)
        return self._shared.tensor
