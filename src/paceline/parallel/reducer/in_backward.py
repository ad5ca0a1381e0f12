"""Optimizers that step within backward: torch's ``_apply_optimizer_in_backward``.

torch hangs such an optimizer on a parameter and has a hook step it when the gradient arrives. That is too early here,
since the gradient is not the average yet. So the wrapper takes the hooks away, and the reducer makes the steps.

The invariant: each optimizer steps once for each round in which its parameter has a gradient, with the average.
"""

import importlib
from collections.abc import Sequence

from torch.nn import Parameter

_OPTIMIZERS = "_in_backward_optimizers"


def take_over(params: Sequence[Parameter]) -> bool:
    """Remove the hooks that would step before gradients are averaged; whether there is such an optimizer."""
    have_one = [param for param in params if hasattr(param, _OPTIMIZERS)]
    if have_one:
        made_by = importlib.import_module("torch.distributed.optim.apply_optimizer_in_backward")
        for param in have_one:
            for handle in made_by.param_to_optim_hook_handle_map.get(param, ()):
                handle.remove()
    return bool(have_one)


def step_in_backward(params: Sequence[Parameter]) -> None:
    """Step the optimizers of the parameters that have a gradient, and drop it, as torch does."""
    for param in params:
        if hasattr(param, _OPTIMIZERS) and param.grad is not None:
            for optimizer in getattr(param, _OPTIMIZERS):
                optimizer.step()
            param.grad = None
