"""Timeouts as callers give them."""

import math
from datetime import timedelta

from paceline.errors import WorldError


def seconds_of(timeout: float | timedelta) -> float:
    """A positive, finite number of seconds."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not 0 < seconds < math.inf:
        raise WorldError(f"timeout={timeout!r}: expected a positive number of seconds, or a timedelta.")
    return seconds
