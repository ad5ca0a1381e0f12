"""What a rank waits for, told in memory that its launcher reads even when the rank itself cannot answer.

A rank that a launcher has born has a *page*: the start of a file without a name, which both have mapped. Behind it, in
the same file, the rank writes its stack when it is asked by ``ASKING_SIGNAL``: see launch/hangs/asking.py.

The invariant: what is read is what was written, whole, or nothing; and a process forked from a rank tells nothing.
"""

import fcntl
import json
import mmap
import os
import signal
import struct
import threading
import time
import zlib
from dataclasses import asdict, dataclass, field

LONG_S = 1.0  # a wait is told of once it has lasted so long
# Ignored by default, and by programs that a rank becomes: it can end nobody, however late it arrives.
ASKING_SIGNAL = signal.SIGURG

_PAGE_BYTES = 1 << 14
_HEAD = struct.Struct("<II")  # length and checksum of what follows
_MOST_WAITS, _MOST_CHARACTERS = 8, 500  # of each of its texts: JSON makes up to 6 bytes of a character


@dataclass(frozen=True)
class Wait:
    """A wait that has taken long.

    Args:
        what: is waited for.
        who: has not come, or why it is not done.
        since_s: on the clock that all processes of a host share.
        thread: the ``threading.get_ident()`` of the one that waits.
    """

    what: str
    who: str
    since_s: float
    thread: int


@dataclass(frozen=True)
class Words:
    """What a rank tells.

    Args:
        fd: where it has the page open.
        main_thread: its ``threading.get_ident()``.
        waits: of all its threads.
    """

    fd: int
    main_thread: int
    waits: list[Wait] = field(default_factory=list)

    def of_main_thread(self) -> list[Wait]:
        """The main thread's wait, if it has one. Others may wait for what need never come."""
        return [wait for wait in self.waits if wait.thread == self.main_thread]


class Page:
    """The page of one rank, in the file ``fd``, which the caller closes."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, _PAGE_BYTES)

    @classmethod
    def make(cls) -> "Page":
        """A new one. Whoever writes behind it, writes at its end, wherever others have read."""
        fd = os.memfd_create("paceline waits", os.MFD_CLOEXEC)
        os.ftruncate(fd, _PAGE_BYTES)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
        return cls(fd)

    def write(self, words: Words) -> None:
        text = json.dumps(asdict(words)).encode()
        record = _HEAD.pack(len(text), zlib.crc32(text)) + text
        self._memory[: len(record)] = record

    def read(self) -> Words | None:
        """What the rank tells; None where it has told nothing yet, or is about to tell something else."""
        length, checksum = _HEAD.unpack_from(self._memory)
        text = self._memory[_HEAD.size : _HEAD.size + length]
        if not length or len(text) != length or zlib.crc32(text) != checksum:
            return None
        told = json.loads(text)
        return Words(told["fd"], told["main_thread"], [Wait(**wait) for wait in told["waits"]])

    def clear_stack(self) -> None:
        """Drop what was written behind the page."""
        os.ftruncate(self.fd, _PAGE_BYTES)

    def read_stack(self) -> str:
        """What was written behind the page."""
        size = os.fstat(self.fd).st_size - _PAGE_BYTES
        return os.pread(self.fd, size, _PAGE_BYTES).decode(errors="replace")

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)


_page: Page | None = None
_waits: dict[int, Wait] = {}  # by thread
_lock = threading.RLock()  # a signal's handler may come to wait, too


def tell(page: Page) -> None:
    """From now on, tell of this process's long waits in ``page``. From the main thread."""
    global _page
    _page = page
    _write()


def is_told(waited_s: float) -> bool:
    """Whether a wait that has lasted for ``waited_s`` is one to tell of, and there is somebody to be told."""
    return waited_s >= LONG_S and _page is not None


def note(what: str, who: str, waited_s: float) -> None:
    """Tell of this thread's wait, again where ``who`` has changed.

    Args:
        what, who: see :class:`Wait`.
        waited_s: how long it has lasted.
    """
    thread = threading.get_ident()
    with _lock:
        known = _waits.get(thread)
        since_s = known.since_s if known is not None else time.monotonic() - waited_s
        wait = Wait(what[:_MOST_CHARACTERS], who[:_MOST_CHARACTERS], since_s, thread)
        if wait != known:
            _waits[thread] = wait
            _write()


def forget() -> None:
    """This thread's wait is over. Costs next to nothing where it has not been told of."""
    if _waits and threading.get_ident() in _waits:
        with _lock:
            _waits.pop(threading.get_ident(), None)
            _write()


def _write() -> None:
    if _page is not None:
        told = list(_waits.values())[:_MOST_WAITS]
        _page.write(Words(_page.fd, threading.main_thread().ident or 0, told))


def _leave_to_parent() -> None:
    global _page, _lock
    _page = None
    _waits.clear()
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_leave_to_parent)
