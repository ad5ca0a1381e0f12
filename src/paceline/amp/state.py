"""Saving and loading the loss scales, in Apex's format.

Masters are in the model's own ``state_dict``, in float32, so a checkpoint of model, optimizer and amp is complete.

The invariant: what Apex has saved loads, and what is saved here loads in Apex.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from paceline.amp.session import state
from paceline.errors import AmpError

logger = logging.getLogger("paceline.amp")


def state_dict(destination: "OrderedDict[str, Any] | None" = None) -> "OrderedDict[str, Any]":
    """The scale of each loss, its number of updates since the last overflow, and of all overflows; Apex's call."""
    found = OrderedDict() if destination is None else destination
    for index, scaler in enumerate(state.loss_scalers):
        found[f"loss_scaler{index}"] = scaler.state_dict()
    return found


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Go on with the scales that ``state_dict`` has returned, here or in Apex. Call ``initialize`` before.

    Where it is of more losses than there are now, or of fewer, the first ones are loaded, and a warning is logged.

    Raises:
        AmpError: it holds something else; or ``initialize`` has not been called.
    """
    if state.session is None:
        raise AmpError("amp.load_state_dict before amp.initialize: there are no loss scales yet to load.")
    if not state.session.properties.enabled:
        return
    unexpected = [key for key in state_dict if not key.startswith("loss_scaler")]
    if unexpected:
        raise AmpError(
            f"amp.load_state_dict: unexpected keys {', '.join(map(repr, unexpected))}; expected 'loss_scaler0', ... as "
            "amp.state_dict() returns them."
        )
    if len(state_dict) != len(state.loss_scalers):
        logger.warning(
            "amp.load_state_dict: it is of %d losses, and num_losses is %d.", len(state_dict), len(state.loss_scalers)
        )
    for saved, scaler in zip(state_dict.values(), state.loss_scalers, strict=False):
        scaler.load_state_dict(saved)
