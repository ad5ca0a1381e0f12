"""Many ranks' output in one stream, each line whole and, as soon as any but rank 0 has spoken, marked with its rank.

While rank 0 alone speaks its bytes pass untouched, so progress bars and prompts look as they do without a launcher.
But the start of a line waits a moment for its end: another rank may speak in between, and then it is marked as a whole.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

# A line that grows longer than this is cut, so that no rank's output is held in memory without end.
_LONGEST_LINE_BYTES = 1 << 20


class Interleaving(Protocol):
    """What becomes of the ranks' pieces of one stream.

    Attributes:
        is_terminal: they appear on one.
        line_is_open: what was written last is the start of a line.
        mark_width: columns that marks take on a terminal.
    """

    is_terminal: bool
    line_is_open: bool

    @property
    def mark_width(self) -> int: ...

    def feed(self, rank: int, data: bytes) -> bytes:
        """What is to be written now that ``rank`` has said ``data``."""

    def holds_start(self, rank: int) -> bool:
        """Whether the start of a line waits that may be shown."""

    def release(self, rank: int) -> bytes:
        """That start of a line."""

    def finish(self, rank: int) -> bytes:
        """What is to be written now that ``rank`` says no more."""

    def close_line(self) -> bytes:
        """What is to be written before the launcher itself says something."""


@dataclass
class Interleaver:
    """Joins the ranks' pieces of one stream.

    All streams of a launch share one ``Speakers``: marks begin on stderr too when another rank speaks on stdout.

    Args:
        speakers: whether any but rank 0 has spoken.
        is_terminal: a carriage return ends a line too, so that progress bars of several ranks stay apart.

    Attributes:
        line_is_open: what was written last is the start of a line.
    """

    speakers: "Speakers"
    is_terminal: bool = False
    line_is_open: bool = False
    _held: dict[int, bytes] = field(default_factory=dict)

    @property
    def mark_width(self) -> int:
        return self.speakers.mark_width

    def feed(self, rank: int, data: bytes) -> bytes:
        """What is to be written now that ``rank`` has said ``data``; nothing is lost, but a part may be held back."""
        if not data:
            return b""
        self.speakers.add(rank)
        alone = not self.speakers.several
        if alone and self.speakers.num_ranks == 1:
            self.line_is_open = not data.endswith(b"\n")
            return data
        data = self._held.pop(rank, b"") + data
        whole, rest = self._split(data)
        if len(rest) > _LONGEST_LINE_BYTES:
            whole, rest = data + (b"" if alone else b"\n"), b""
        if rest:
            self._held[rank] = rest
        if not alone:
            return self.close_line() + self._mark(rank, whole)
        if whole:
            self.line_is_open = not whole.endswith(b"\n")
        return whole

    def holds_start(self, rank: int) -> bool:
        """Whether the start of a line waits that may be shown: rank 0's, as long as no other has spoken."""
        return not self.speakers.several and rank in self._held

    def release(self, rank: int) -> bytes:
        """The start of a line whose end has not come in time."""
        if not self.holds_start(rank):
            return b""
        self.line_is_open = True
        return self._held.pop(rank)

    def finish(self, rank: int) -> bytes:
        """What ``rank`` still had to say, now that its end of the stream is closed."""
        if self.holds_start(rank):
            return self.release(rank)
        rest = self._held.pop(rank, b"")
        if not rest:
            return b""
        return self.close_line() + self._mark(rank, rest if rest.endswith(b"\r") else rest + b"\n")

    def close_line(self) -> bytes:
        """What ends a line that was begun while one rank alone spoke."""
        was_open, self.line_is_open = self.line_is_open, False
        return b"\n" if was_open else b""

    def _split(self, data: bytes) -> tuple[bytes, bytes]:
        """``data`` up to its last line end, and the rest. A last ``\\r`` waits: it may be half of ``\\r\\n``."""
        end = data.rfind(b"\n")
        if self.is_terminal:
            end = max(end, data.rfind(b"\r", 0, len(data) - 1))
        return data[: end + 1], data[end + 1 :]

    def _mark(self, rank: int, whole: bytes) -> bytes:
        if not whole:
            return b""
        mark = self.speakers.mark(rank)
        if self.is_terminal:
            lines = re.findall(rb"[^\r\n]*(?:\r\n|\n|\r)", whole)
            return b"".join(mark + line for line in lines if line != b"\r")
        return mark + whole[:-1].replace(b"\n", b"\n" + mark) + whole[-1:]


@dataclass
class Speakers:
    """Whether any but rank 0 has said anything, and how each rank is marked once one has.

    Args:
        hosts: the host of each rank, where that belongs to the mark.
    """

    num_ranks: int
    several: bool = False
    hosts: Sequence[str] = ()

    def add(self, rank: int) -> None:
        self.several = self.several or rank != 0

    @property
    def mark_width(self) -> int:
        """Columns that marks take, if there will be any."""
        return len(self.mark(0)) if self.num_ranks > 1 else 0

    def mark(self, rank: int) -> bytes:
        width = len(str(self.num_ranks - 1))
        host = f"{self.hosts[rank]:<{max(map(len, self.hosts))}} " if self.hosts else ""
        return f"[{host}{rank:>{width}}]: ".encode()
