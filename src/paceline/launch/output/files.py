"""Where a rank's output goes besides the launcher's own: files, chosen as torchrun's flags choose them.

    DIRECTORY/RUN_ID_xxxxxxxx/attempt_LIFE/LOCAL_RANK/stdout.log, stderr.log
    DIRECTORY/RUN_ID_xxxxxxxx/attempt_LIFE/filtered_stdout.log, filtered_stderr.log

The invariant: what a rank says goes to every place that was asked for, whole, and to no other.
"""

import os
import secrets
import tempfile
from collections.abc import Sequence

from paceline.errors import LaunchError
from paceline.launch.spec.logs import LogSpec
from paceline.launch.wire import write_all

# A line that grows longer than this is cut, so that no rank's output is held in memory without end.
_LONGEST_LINE_BYTES = 1 << 20


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
            if len(self._rest) > _LONGEST_LINE_BYTES:
                lines, self._rest = [*lines, self._rest], b""
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
