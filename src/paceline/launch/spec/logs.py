"""What is to become of the ranks' output, chosen as torchrun's flags choose it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.errors import LaunchError

STREAMS = ("stdout", "stderr")
_EVERY_RANK = -1


@dataclass(frozen=True)
class LogSpec:
    """What the user has asked for.

    Attributes:
        directory: for the files; None for one in the system's place for temporary ones, if any are written.
        redirects, tee: by local rank (-1: every one that is not named), the streams that go to files, alone or as well.
        shown: the local ranks whose output appears; None for all.
        filters: by stream, words of which a line must have one to be kept in the filtered file, too.
    """

    directory: str | None = None
    redirects: Mapping[int, frozenset[str]] = field(default_factory=dict)
    tee: Mapping[int, frozenset[str]] = field(default_factory=dict)
    shown: frozenset[int] | None = None
    filters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def writes_files(self) -> bool:
        return self.directory is not None or any([*self.redirects.values(), *self.tee.values(), *self.filters.values()])

    @property
    def is_plain(self) -> bool:
        """Whether all output simply appears."""
        return not self.writes_files and self.shown is None

    def is_written(self, local_rank: int, stream: str) -> bool:
        """Whether the stream goes to a file. A directory alone asks for all of them."""
        if not any([*self.redirects.values(), *self.tee.values()]):
            return self.directory is not None
        return stream in _of(self.redirects, local_rank) | _of(self.tee, local_rank)

    def is_shown(self, local_rank: int, stream: str) -> bool:
        if self.shown is not None and local_rank not in self.shown:
            return False
        return stream not in _of(self.redirects, local_rank) or stream in _of(self.tee, local_rank)


def _of(choice: Mapping[int, frozenset[str]], local_rank: int) -> frozenset[str]:
    return choice.get(local_rank, choice.get(_EVERY_RANK, frozenset()))


def parse_streams(text: str, option: str) -> dict[int, frozenset[str]]:
    """Streams by local rank, as torchrun writes them: 0 none, 1 stdout, 2 stderr, 3 both; ``3``, or ``0:1,1:2``.

    Raises:
        LaunchError: it reads otherwise.
    """
    chosen = {}
    for part in text.split(","):
        rank, _, code = part.rpartition(":")
        if code not in ("0", "1", "2", "3") or not (rank.isdecimal() or part == text == code):
            raise LaunchError(
                f"expected {option} 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or one of these for each local rank, "
                f"as in 0:3,1:2, but got {text!r}"
            )
        streams = (("stdout",) if int(code) & 1 else ()) + (("stderr",) if int(code) & 2 else ())
        chosen[int(rank) if rank else _EVERY_RANK] = frozenset(streams)
    return chosen


def parse_ranks(text: str, option: str) -> frozenset[int] | None:
    """``0,2,3``; None where nothing is said."""
    if not text:
        return None
    try:
        return frozenset(map(int, text.split(",")))
    except ValueError:
        raise LaunchError(f"expected local ranks for {option}, as in 0,2,3, but got {text!r}") from None


def parse_filters(text: str) -> tuple[str, ...]:
    """Words between commas; a double comma is a comma."""
    words = text.replace(",,", "\0").split(",")
    return tuple(word.replace("\0", ",") for word in words if word)
