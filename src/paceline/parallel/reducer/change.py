"""A model that has become another one in the course of training, and what the old plan had averaged of it.

[Note: bases] A parameter that was replaced on some ranks only is half reduced: the ranks that kept theirs have
contributed to the old plan's average. That is the *base*, to which the average of the newcomers' gradients is added.
Say rank 0 kept w and has gradient 1, and rank 1 replaced it and has 2: the old plan gave 1/2, the newcomer's average is
2/2, and the sum is 1.5, as it should be.

The invariant: what the ranks have contributed to a gradient is averaged once, whichever of them saw the change.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from paceline.parallel.buckets.bucket import Bucket
from paceline.parallel.replicas.registry import Registry


class Change:
    """Some rank has other parameters than those agreed on: compare all. A collective call.

    Args:
        plan: the buckets of this round, whose averages have been given.
        planned: by parameter, 1 where the plan has it.
    """

    def __init__(self, registry: Registry, plan: Sequence[Bucket], planned: bytes, group: dist.ProcessGroup) -> None:
        self._registry = registry
        self._before = dict(zip(registry.names, registry.params, strict=True))
        self._planned = {name for name, is_planned in zip(registry.names, planned, strict=True) if is_planned}
        self._planned.difference_update(registry.names[b.members[at].index] for b in plan for at in b.misfits)
        self._num_new = registry.agree_anew(group)
        self._planned.difference_update(self._num_new)
        self._world_size = dist.get_world_size(group)

    def still_planned(self) -> bytes:
        """By parameter, as now agreed on, 1 where the plan had it and it is what it was."""
        return bytes(name in self._planned for name in self._registry.names)

    def take_bases(self) -> dict[int, torch.Tensor]:
        """The averages of those that are new on some ranks only, by index. [Note: bases]"""
        bases: dict[int, torch.Tensor] = {}
        for index, name in enumerate(self._registry.names):
            if 0 < self._num_new.get(name, 0) < self._world_size and name in self._before:
                averaged, param = self._before[name].grad, self._registry.params[index]
                if averaged is not None:
                    bases[index] = averaged
                if param is self._before[name]:
                    param.grad = None
        return bases
