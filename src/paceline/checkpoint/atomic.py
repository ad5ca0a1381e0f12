"""Replacing a file as a whole: a draft beside it, made durable, is renamed onto it.

The invariant: under the file's name there is at any moment, and after a crash at any byte, either all of what was there
before or all of what replaces it.

[Note: drafts of the dead]
Each writer has a draft of its own, so writers never meet, and the last one to rename wins. Whoever writes a draft holds
a lock on it, which ends with the process however it ends. So a draft that can be locked has no writer, and the next
writer of the same file removes it. One that was taken away before its writer had locked it has no link left: it begins
another. Where a file system knows no locks, drafts of the dead stay.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass

_DRAFT = ".draft"


@dataclass(frozen=True)
class Draft:
    """A file that is being written, and known under a name that nobody looks for."""

    path: str
    fd: int

    def write(self, data: bytes | memoryview) -> None:
        """Append all of ``data``."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self.fd, rest) :]

    def write_at(self, place: int, data: bytes) -> None:
        """Overwrite some bytes of what has been written."""
        os.pwrite(self.fd, data, place)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Draft]:
    """Give a draft to write to; at the end of the block it takes the place of ``path``, durably.

    If the block raises, ``path`` stays what it was, and the draft is removed. A symbolic link stays, and what it points
    to is replaced. So do the permissions of a file that is replaced.

    Raises:
        OSError: the file system refuses, is full, or fails to make the draft durable; or there is something under that
            name that is no file.
    """
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    mode = _mode_of(target)
    remove_abandoned(folder, name)
    draft = _begin(folder, name)
    try:
        if mode is not None:
            os.fchmod(draft.fd, stat.S_IMODE(mode))
        yield draft
        os.fsync(draft.fd)
        os.replace(draft.path, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft.path)
        raise
    finally:
        os.close(draft.fd)
    make_durable(folder)


def make_durable(folder: str) -> None:
    """Let the names in a folder survive a loss of power."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system does not do this for folders
            raise
    finally:
        os.close(fd)


def remove_abandoned(folder: str, name: str | None = None) -> None:
    """Remove drafts whose writers have died, of one file or of all. See [Note: drafts of the dead]."""
    of_this = r".+" if name is None else re.escape(name)
    draft = re.compile(rf"\.{of_this}\.[0-9a-f]{{16}}{re.escape(_DRAFT)}", re.DOTALL)
    with os.scandir(folder) as entries:
        drafts = [entry.path for entry in entries if draft.fullmatch(entry.name)]
    for path in drafts:
        with contextlib.suppress(OSError):  # it has been renamed or removed meanwhile, or is locked
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(fd)


def _mode_of(target: str) -> int | None:
    """Of the file that is to be replaced; None where there is none yet."""
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):  # a device or a pipe would be gone, and a folder be noticed late
        raise OSError(
            errno.EEXIST, f"{'a folder' if stat.S_ISDIR(mode) else 'no file, but a device or a pipe,'} has that name"
        )
    return mode


def _begin(folder: str, name: str) -> Draft:
    while True:
        path = os.path.join(folder, f".{name}.{secrets.token_hex(8)}{_DRAFT}")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # no locks here
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return Draft(path, fd)
        os.close(fd)
