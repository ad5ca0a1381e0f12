"""How ranks in shared memory tell one another that something has happened: counters, and a bell for each rank.

A rank has one bell, a POSIX semaphore. Whoever has something for it raises a counter that only that pair uses, and
rings. A rank that waits looks for tokens of its bell, or sleeps on it in the kernel; whatever it waits for, a message,
a collective or a bucket, it waits in one place, and a look costs one call however many ranks there are.

[Note: memory order] What a rank has written before it rings must be seen by the one that acts on it, on machines that
reorder memory accesses (aarch64) as on those that hardly do (x86). POSIX has ``sem_post`` and ``sem_wait`` synchronise
memory: who takes a token sees all that was written before that token was posted. But tokens carry no name, and a
counter may be seen risen before its token has been taken. So counters count only while their sum *equals* the number
of tokens taken: each token taken vouches for one rise, so none that is seen is then unvouched for. If the sum is
larger, a token is still on its way, and the last sums that were equal stand. The same pairing lets memory be
overwritten: a rank that has finished reading rings, and the writer takes that token first.
"""

import ctypes
import time
from collections.abc import Callable
from typing import Final

_SEMAPHORE_BYTES = 64  # sem_t takes 32; a cache line to itself
NUM_CHANNELS: Final = 6
PHASES, LAUNCHED, FINISHED, WRITTEN, CONSUMED, STATE = range(NUM_CHANNELS)
_LINE = 8  # words of 8 bytes: a pair's counters share no cache line with another's

# Without giving up the interpreter's lock: these calls return at once.
_quick = ctypes.PyDLL(None)
_slow = ctypes.CDLL(None)
for _function in (_quick.sem_post, _quick.sem_trywait):
    _function.argtypes = [ctypes.c_void_p]
_quick.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def signals_bytes(size: int) -> int:
    """How much memory one rank's signals take in a group of ``size`` ranks."""
    return _SEMAPHORE_BYTES + size * _LINE * 8


def make_bells(memory: memoryview, starts: list[int]) -> None:
    """Before any rank may ring: make the semaphores of all."""
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for start in starts:
        if _quick.sem_init(ctypes.c_void_p(first + start), 1, 0) != 0:
            raise OSError("this system has no semaphores that processes can share")


class Signals:
    """The bells and counters of all ranks, as one of them uses them.

    Args:
        memory: all ranks' parts, mapped.
        starts: where each rank's signals begin in ``memory``, in bytes.
    """

    def __init__(self, memory: memoryview, starts: list[int], rank: int) -> None:
        size = len(starts)
        self._peers = [peer for peer in range(size) if peer != rank]
        self._rank = rank
        self._words = memory.cast("Q")
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._bells = [ctypes.c_void_p(first + start) for start in starts]
        # A rank's rises for another lie in its own part, in a line of the other's.
        line = [(start + _SEMAPHORE_BYTES) // 8 for start in starts]
        self._mine_for = [line[rank] + peer * _LINE for peer in range(size)]
        self._for_me = [line[peer] + rank * _LINE for peer in range(size)]
        self._own_rings = 0
        self._is_settled = True
        self._tokens = 0
        self.counts: list[list[int]] = [[0] * NUM_CHANNELS for _ in range(size)]  # by peer: vouched for
        self._posted: list[list[int]] = [[0] * NUM_CHANNELS for _ in range(size)]
        self._wait, self._clock = _sleeper()

    def tell(self, peer: int, channel: int) -> None:
        """Raise the counter of ``channel`` for ``peer``, and ring."""
        posted = self._posted[peer]
        posted[channel] += 1
        self._words[self._mine_for[peer] + channel] = posted[channel]
        _quick.sem_post(self._bells[peer])

    def tell_all(self, channel: int) -> None:
        for peer in self._peers:
            self.tell(peer, channel)

    def wake_myself(self) -> None:
        """Ring this rank's own bell: another of its threads may sleep on it."""
        self._own_rings += 1
        _quick.sem_post(self._bells[self._rank])

    def told(self, peer: int, channel: int) -> int:
        """How often this rank has raised the counter of ``channel`` for ``peer``."""
        return self._posted[peer][channel]

    def poll(self) -> bool:
        """Take the tokens that are there and, where the sums are equal, the counters. Whether there was a token."""
        bell, before = self._bells[self._rank], self._tokens
        while _quick.sem_trywait(bell) == 0:
            self._tokens += 1  # at once: an exception from a signal's handler may come anywhere
        if self._tokens == before:
            return False
        self._take_counts()
        return True

    def is_settled(self) -> bool:
        """Whether no token is on its way."""
        self._take_counts()
        return self._is_settled

    def record_token(self) -> None:
        """``sleep`` has taken a token."""
        self._tokens += 1
        self._take_counts()

    def sleep(self, timeout_s: float) -> bool:
        """Wait for a token; whether one was taken, which must then be recorded."""
        nanoseconds = time.clock_gettime_ns(self._clock) + int(timeout_s * 1e9)
        until = _Timespec(nanoseconds // 10**9, nanoseconds % 10**9)
        return bool(self._wait(self._bells[self._rank], until) == 0)

    def _take_counts(self) -> None:
        words, total = self._words, self._own_rings
        seen = []
        for peer in self._peers:
            start = self._for_me[peer]
            counts = words[start : start + NUM_CHANNELS].tolist()
            total += sum(counts)
            seen.append(counts)
        self._is_settled = total == self._tokens
        if self._is_settled:  # [Note: memory order]
            for peer, counts in zip(self._peers, seen, strict=True):
                self.counts[peer] = counts


def _sleeper() -> tuple[Callable[..., int], int]:
    """The function that waits for a semaphore until a time, and the clock of that time."""
    if hasattr(_slow, "sem_clockwait"):  # glibc 2.30: not fooled when somebody sets the clock
        wait, clock = _slow.sem_clockwait, time.CLOCK_MONOTONIC
        wait.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec)]
        return lambda bell, until: int(wait(bell, clock, until)), clock
    wait = _slow.sem_timedwait
    wait.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Timespec)]
    return lambda bell, until: int(wait(bell, until)), time.CLOCK_REALTIME
