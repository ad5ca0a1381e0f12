"""Copies of a wrapper: pickled and loaded, or deep-copied.

The invariant: a copy joins the other ranks in its first training forward, so one rank may copy and evaluate alone; a
backward before that is an error, not a gradient that is never averaged.
"""

from typing import Any

import torch.distributed as dist
from torch.nn import Module, Parameter

from paceline.errors import ReductionError

# What belongs to a wrapper's place among the ranks.
_LEFT_BEHIND = ("process_group", "device_mesh", "_replica", "_reminder")


def portable_state(state: dict[str, Any]) -> dict[str, Any]:
    """Of a wrapper's attributes, those that a copy has too."""
    kept = {name: value for name, value in state.items() if name not in _LEFT_BEHIND}
    return {**kept, "_sync": True, "_observers": [], "_timeline": None}


class Reminder:
    """Raises in a backward that reaches ``module``, until it is removed."""

    def __init__(self, module: Module) -> None:
        self._handles = [
            param.register_post_accumulate_grad_hook(_remind)  # type: ignore[no-untyped-call]
            for param in module.parameters()
            if param.requires_grad
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _remind(_: Parameter) -> None:
    raise ReductionError(
        f"rank {dist.get_rank()}: a backward through a copied or loaded DistributedDataParallel that has not joined "
        "the other ranks; its gradients would not be averaged. Call the wrapper in train() mode on all ranks first."
    )
