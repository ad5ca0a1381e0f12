"""Moments on the device on which gradients are.

The invariant: the host waits for the device in ``synchronize`` alone. [Note: whose time]
"""

import time
from typing import TypeAlias

import torch

Moment: TypeAlias = float | torch.cuda.Event


class Clock:
    """Moments on ``device``, in the host's seconds; once ``synchronize`` has been called."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for the device, and note the time there, from which later ones are counted."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
            self._anchor, self._anchor_s = self._record(), time.perf_counter()
            torch.cuda.synchronize(self._device)

    def now(self) -> Moment:
        """When the current stream comes to this point. In a future's callback, that is when the future is done."""
        return self._record() if self._is_cuda else time.perf_counter()

    def seconds(self, moment: Moment) -> float | None:
        """None where it lies ahead of the device."""
        if isinstance(moment, float):
            return moment
        if not moment.query():  # type: ignore[no-untyped-call]
            return None
        moment_s = self._anchor_s + float(self._anchor.elapsed_time(moment)) / 1e3
        if moment_s > self._anchor_s + 1.0:  # elapsed_time is a single-precision float: count from nearby
            self._anchor, self._anchor_s = moment, moment_s
        return moment_s

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
