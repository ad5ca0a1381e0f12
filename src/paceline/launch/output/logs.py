"""Where a rank's output goes besides the launcher's own: files, chosen as torchrun's flags choose them.

    DIRECTORY/RUN_ID_xxxxxxxx/attempt_LIFE/LOCAL_RANK/stdout.log, stderr.log
    DIRECTORY/RUN_ID_xxxxxxxx/attempt_LIFE/filtered_stdout.log, filtered_stderr.log

The invariant: what a rank says goes to every place that was asked for, whole, and to no other.
"""

import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.errors import LaunchError
from paceline.launch.wire import write_all

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


class LogFile:
    """An open file of one stream of a rank, and the filtered one that all ranks share.

    Attributes:
        fd: -1 where the stream is not written, but only filtered.
    """

    def __init__(self, path: str | None, filtered: str | None, words: Sequence[str], mark: bytes) -> None:
        self.fd = _open(path) if path else -1
        self._filtered_fd = _open(filtered) if filtered else -1
        self._words = [word.encode() for word in words]
        self._mark = mark
        self._rest = b""

    @property
    def is_filtered(self) -> bool:
        return self._filtered_fd >= 0

    def write(self, data: bytes) -> None:
        """Raises OSError: the disk is full, say."""
        if self.fd >= 0:
            write_all(self.fd, data)
        if self.is_filtered:
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                if any(word in line for word in self._words):
                    write_all(self._filtered_fd, self._mark + line + b"\n")

    def close(self) -> None:
        """Raises OSError: a last line could not be written."""
        try:
            if self._rest and any(word in self._rest for word in self._words):
                write_all(self._filtered_fd, self._mark + self._rest + b"\n")
        finally:
            for fd in (self.fd, self._filtered_fd):
                if fd >= 0:
                    os.close(fd)
            self.fd = self._filtered_fd = -1


class Logs:
    """The files of one launch.

    Attributes:
        directory: of this launch; made when the first file is; empty where none is written.
    """

    def __init__(self, spec: LogSpec, run_id: str) -> None:
        self.spec = spec
        self.directory = ""
        if spec.writes_files:
            base = spec.directory or os.path.join(tempfile.gettempdir(), f"paceline_{secrets.token_hex(4)}")
            self.directory = os.path.join(base, f"{run_id}_{secrets.token_hex(4)}")

    def open(self, life: int, local_rank: int, rank: int, stream: str) -> LogFile | None:
        """The file of a stream, if it has any.

        Raises:
            LaunchError: it cannot be made.
        """
        words = self.spec.filters.get(stream, ())
        is_written = self.spec.is_written(local_rank, stream)
        if not is_written and not words:
            return None
        attempt = os.path.join(self.directory, f"attempt_{life}")
        path = os.path.join(attempt, str(local_rank), f"{stream}.log") if is_written else None
        filtered = os.path.join(attempt, f"filtered_{stream}.log") if words else None
        return LogFile(path, filtered, words, f"[{rank}]: ".encode())


def _open(path: str) -> int:
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise LaunchError(f"the log {path} cannot be written: {error.strerror}; choose another --log-dir") from None
