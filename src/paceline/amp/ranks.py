"""What amp must know of the other ranks: whose gradients are averaged, and who must agree on an overflow.

[Note: agreement] Ranks that train one model must skip the same steps and have the same scale.

- Where a DistributedDataParallel, torch's or paceline's, averages all gradients of a step, an infinity on one rank is
  one on all: the verdicts are equal, and nothing is sent.
- Where it averages some of them only, or where an ``apex.Reducer`` does, which may run after the check, the ranks of
  its process group take the largest of their verdicts: one number for each ``scale_loss``.
- Where neither is, ranks may be training different models, for different numbers of steps. Nothing is sent; a message
  that some never send would be a hang.

[Note: local gradients] Under ``no_sync`` gradients are not averages yet. They stay in the model, scaled, until a
backward that averages: a wrapper averages what it finds there, and would not see what had been moved to masters.

The invariant: whether a message is sent depends on the wrappers and on which parameters are trained, which are the same
on all ranks.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from paceline.parallel.apex import Reducer, reducers
from paceline.parallel.replicas.broadcast import broadcast_tensors

_Wrapper = torch.nn.parallel.DistributedDataParallel
_wrappers: "weakref.WeakSet[_Wrapper]" = weakref.WeakSet()


def watch_for_wrappers() -> RemovableHandle:
    """From now on, know of each DistributedDataParallel that is made. It is made after ``initialize``."""

    def see(parent: Module, name: str, child: Module) -> None:  # noqa: ARG001
        if isinstance(parent, _Wrapper):
            _wrappers.add(parent)

    return register_module_module_registration_hook(see)


class Company:
    """The wrappers and reducers over several ranks that average gradients of ``params``, and how far.

    Args:
        params: the model's weights.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        wanted = {id(param) for param in params if param.requires_grad}
        self._wrappers = [wrapper for wrapper in _wrappers if _has_others(wrapper) and wanted & _ids(wrapper.module)]
        reduced = [reducer for reducer in reducers() if _has_others(reducer) and wanted & _ids(reducer.module)]
        covered: set[int] = set().union(*(_ids(wrapper.module) for wrapper in self._wrappers))
        self._all: list[_Wrapper | Reducer] = [*self._wrappers, *reduced]
        self._must_ask = bool(reduced) or (bool(self._wrappers) and not wanted <= covered)

    @staticmethod
    def key() -> tuple[Any, ...]:
        """It changes when there are other wrappers."""
        return tuple(sorted(id(item) for item in (*_wrappers, *reducers())))

    @property
    def is_local(self) -> bool:
        """Whether gradients of the last backward are this rank's alone. [Note: local gradients]"""
        return any(not wrapper.require_backward_grad_sync for wrapper in self._wrappers)

    def share(self, masters: Sequence[Tensor]) -> None:
        """Copy the masters of the first rank to all, as the wrapper has done with the weights. A collective call.

        The weights are the first rank's masters, rounded, already. Nothing is written to them: a graph may need them.
        """
        for member in self._all:
            broadcast_tensors(masters, _group_of(member))

    def agree(self, verdict: Tensor) -> Tensor:
        """The largest of the ranks' verdicts, where they may differ. [Note: agreement]

        Args:
            verdict: (1,)
        """
        if self._must_ask:
            for member in self._all:
                dist.all_reduce(verdict, dist.ReduceOp.MAX, group=_group_of(member))
        return verdict


def _group_of(member: "_Wrapper | Reducer") -> dist.ProcessGroup:
    return member.process_group or dist.distributed_c10d._get_default_group()


def _has_others(member: "_Wrapper | Reducer") -> bool:
    return dist.is_initialized() and dist.get_world_size(_group_of(member)) > 1


def _ids(module: Module) -> set[int]:
    return {id(param) for param in module.parameters()}
