"""Where a value lies on an axis, and which values an axis names."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """A range of values, those that are named, and how.

    Attributes:
        low, high: the first and the last value shown.
        label: what is shown, with its unit.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    text: Callable[[float], str]
    label: str
    is_log: bool = False

    def place(self, value: float, begin: float, end: float) -> float:
        """Where ``value`` lies between the pixels ``begin`` and ``end``."""
        low, high = self._project(self.low), self._project(self.high)
        share = (self._project(value) - low) / (high - low) if high > low else 0.5
        return begin + share * (end - begin)

    def _project(self, value: float) -> float:
        return math.log(value) if self.is_log else value


def step_for(span: float, most: int) -> float:
    """The least of 1, 2, 5, 10, ... of which at most ``most`` fit into ``span``, which is positive."""
    power = 10.0 ** math.floor(math.log10(span / most))
    steps = (factor * power for factor in (1, 2, 5, 10, 20))
    return next(step for step in steps if span / step <= most * (1 + 1e-9))


def from_zero(high: float, text: Callable[[float], str], label: str, *, most: int = 5) -> Axis:
    """An axis from 0 to ``high`` or a little more, so that the last tick is not below it."""
    step = step_for(high or 1.0, most)
    number = math.ceil((high or 1.0) / step - 1e-9)
    return Axis(0.0, number * step, tuple(round(index * step, 12) for index in range(number + 1)), text, label)


def until(high: float, text: Callable[[float], str], label: str, *, most: int = 8) -> Axis:
    """An axis from 0 to exactly ``high``."""
    step = step_for(high, most)
    ticks = tuple(round(index * step, 12) for index in range(math.floor(high / step + 1e-9) + 1))
    return Axis(0.0, high, ticks, text, label)


def within(low: float, high: float, base: int, text: Callable[[float], str], label: str, *, most: int = 6) -> Axis:
    """A logarithmic axis from exactly ``low`` to exactly ``high``, with ticks as `of_powers` has."""
    wide = of_powers(low, high, base, text, label, most=most)
    ticks = tuple(tick for tick in wide.ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9))
    return dataclasses.replace(wide, low=low, high=high, ticks=ticks)


def of_powers(low: float, high: float, base: int, text: Callable[[float], str], label: str, *, most: int = 6) -> Axis:
    """A logarithmic axis between powers of ``base``, of which every n-th is named."""
    first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
    last = max(last, first + 1)
    every = math.ceil((last - first + 1) / most)
    ticks = tuple(float(base) ** power for power in range(first, last + 1, every))
    return Axis(float(base) ** first, float(base) ** last, ticks, text, label, is_log=True)
