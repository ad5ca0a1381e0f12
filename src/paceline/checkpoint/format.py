"""The file of a checkpoint: what torch.save writes, with a checksum of all of it in the archive's comment.

The invariant: a file that has been cut short or changed in any byte is not taken for a good one, and torch.load reads a
good one without knowing of the checksum.

torch's file is a zip archive, whose last 22 bytes say where its table is and how long a comment follows. Here a comment
follows: a mark and the sha256 of every byte before it, in hexadecimal. Files of torch.save itself have no comment, and
must end with those 22 bytes.
"""

import hashlib
import os
from typing import Any, BinaryIO

import torch

from paceline.checkpoint.atomic import Draft

_MARK = b"paceline sha256 "
_SEAL_BYTES = len(_MARK) + 64
_FILE_MAGIC = b"PK\x03\x04"
_END_MAGIC = b"PK\x05\x06"
_END_BYTES = 22
_CHUNK_BYTES = 1 << 20


class _Sealing:
    """The file that torch.save believes to write.

    The last bytes are held back, since the comment's length belongs there. An error of the disk is kept until torch has
    finished: its writer, written in C++, would hide it behind one of its own.
    """

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._digest = hashlib.sha256()
        self._held = b""
        self._error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        rest = memoryview(data).cast("B")
        if len(rest) >= _END_BYTES:
            self._pass_on(self._held)
            self._pass_on(rest[:-_END_BYTES])
            self._held = bytes(rest[-_END_BYTES:])
        else:
            held = self._held + bytes(rest)
            self._pass_on(held[:-_END_BYTES])
            self._held = held[-_END_BYTES:]
        return len(rest)

    def flush(self) -> None:
        pass

    def seal(self) -> None:
        """Write what was held back, and the comment."""
        assert _is_end(self._held), "torch ends its archives otherwise"
        self._pass_on(self._held[:-2] + _SEAL_BYTES.to_bytes(2, "little"))
        self._pass_on(_MARK + self._digest.hexdigest().encode())
        if self._error is not None:
            raise self._error

    def _pass_on(self, data: bytes | memoryview) -> None:
        if self._error is None:
            self._digest.update(data)
            try:
                self._draft.write(data)
            except OSError as error:
                self._error = error


def _is_end(data: bytes) -> bool:
    """Whether these are the last bytes of an archive without a comment."""
    return data.startswith(_END_MAGIC) and data.endswith(b"\0\0")


def write(obj: Any, draft: Draft) -> None:
    """Write ``obj`` as torch.save does, sealed.

    Raises:
        OSError: of the disk.
        Exception: whatever pickling an object raises.
    """
    sink = _Sealing(draft)
    torch.save(obj, sink)  # type: ignore[arg-type]  # it needs no more of a file than these two
    sink.seal()


def is_sealed(file: BinaryIO) -> bool:
    """Whether a file has a checksum."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - _SEAL_BYTES))
    return file.read(len(_MARK)) == _MARK


def find_damage(file: BinaryIO) -> str:
    """What is wrong with a file's bytes, in words; empty where nothing is. It reads all of a sealed file."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _SEAL_BYTES))
    tail = file.read()
    if tail.startswith(_MARK):
        return compare(tail[len(_MARK) :], digest_of(file, size - _SEAL_BYTES))
    file.seek(0)
    is_archive = _FILE_MAGIC.startswith(file.read(len(_FILE_MAGIC)))
    end = tail[-_END_BYTES:]
    if is_archive and not _is_end(end):
        return f"it has {size} bytes, and they end before the archive does"
    return ""


def compare(expected: bytes, found: str) -> str:
    """In words, what is wrong with a checksum; empty where nothing is."""
    told = expected.decode("ascii", "replace")
    return "" if told == found else f"its sha256 should be {told[:16]}..., and is {found[:16]}..."


def digest_of(file: BinaryIO, size: int, *, after: bytes = b"") -> str:
    """The sha256, in hexadecimal, of a file's first ``size`` bytes; ``after`` stands for the first of them."""
    digest, buffer = hashlib.sha256(after), memoryview(bytearray(_CHUNK_BYTES))
    file.seek(len(after))
    size -= len(after)
    while size > 0 and (count := file.readinto(buffer[: min(size, _CHUNK_BYTES)])):  # type: ignore[attr-defined]
        digest.update(buffer[:count])
        size -= count
    return digest.hexdigest()
