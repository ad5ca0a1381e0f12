"""Which checkpoints of a folder stay, and what they are called. Pure.

The invariant: the newest one always stays, and so does the best one.
"""

import re
from collections.abc import Iterable

_NAME = re.compile(r"step-(\d{10,})\.pt")


def name_of(step: int) -> str:
    """The file of the checkpoint after ``step`` steps."""
    return f"step-{step:010}.pt"


def steps_among(names: Iterable[str]) -> list[int]:
    """The steps of those of the files that are checkpoints, newest first."""
    return sorted((int(found[1]) for name in names if (found := _NAME.fullmatch(name))), reverse=True)


def surplus(steps: Iterable[int], *, keep: int, best: int | None) -> list[int]:
    """Those of ``steps`` that are neither among the last ``keep`` nor the best."""
    return [step for step in sorted(steps, reverse=True)[keep:] if step != best]
