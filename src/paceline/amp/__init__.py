"""Apex's amp on torch.amp: mixed precision in two lines of a script, on CPUs and GPUs, in pure Python.

    from paceline import amp

    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()

The rest of Apex's wrappers is in ``paceline.parallel.apex``. Read this room in the order ``levels``, ``initialize``,
``scale_loss``, ``optimizers``, ``holdings``, ``masters``.
"""

from paceline.amp.casts import disable_casts
from paceline.amp.functions import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from paceline.amp.initialize import initialize
from paceline.amp.optimizers import master_params
from paceline.amp.scale_loss import scale_loss
from paceline.amp.session import deactivate, skipped_steps
from paceline.amp.session import state as _amp_state
from paceline.amp.state import load_state_dict, state_dict
from paceline.parallel.apex import DistributedDataParallel

__all__ = [
    "DistributedDataParallel",
    "_amp_state",
    "deactivate",
    "disable_casts",
    "float_function",
    "half_function",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "skipped_steps",
    "state_dict",
]
