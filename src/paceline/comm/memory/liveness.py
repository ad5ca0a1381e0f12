"""Whether the other ranks of a host still live, and how they ended.

Memory does not tell of a peer's death, as a socket would. So a rank that leaves says so, with its last words if it
failed; and one that was killed is missed through its process. One that has become another program, by exec, is the same
process: it no longer has the memory open.

The invariant: whatever a rank waits for in shared memory, it looks here several times a second.
"""

import contextlib
import fcntl
import functools
import os
import pathlib
import select
import signal
import struct
import time
from collections.abc import Callable, Sequence

from paceline.comm.explain import peer_failed, peer_left
from paceline.comm.memory.arena import LAST_WORDS_BYTES, Arena
from paceline.comm.memory.signals import STATE, Signals
from paceline.errors import PeerError
from paceline.rendezvous import Peer

_TAKING_PART, _LEFT, _FAILED = range(3)
_END_S = 0.2  # in which the process of a rank that has left may end, so that it can be told how

# ioctl(PIDFD_GET_INFO) of linux/pidfd.h, since Linux 6.15: how a process ended, even after it was reaped.
_PIDFD_GET_INFO, _PIDFD_INFO_EXIT, _PIDFD_INFO_BYTES, _EXIT_CODE_AT = 0xC040FF0B, 1 << 3, 64, 60


class Lifeline:
    """A process that another rank runs in.

    Args:
        is_held: whether it still has the group's memory open.
    """

    def __init__(self, peer: Peer, is_held: Callable[[], bool]) -> None:
        self._peer = peer
        self._is_held = is_held
        self._pidfd = -1
        self._poll = select.poll()
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # there is none any more, or no descriptor for it
                self._pidfd = os.pidfd_open(peer.pid)
                self._poll.register(self._pidfd, select.POLLIN)
        if self._pidfd >= 0 and not self._poll.poll(0) and not peer.is_alive():  # the pid is another process's now
            self.close()

    def is_alive(self) -> bool:
        """Whether it runs, and is still the same program."""
        return self.runs() and (self._is_held() or not self._program())

    def runs(self) -> bool:
        """Whether the process has not ended, as far as this one can tell."""
        return not self._poll.poll(0) if self._pidfd >= 0 else self._peer.is_alive()

    def how_it_ended(self) -> str:
        """Such as ``was killed by SIGKILL``."""
        if self.runs():
            return f"has become another program by exec ({self._program() or 'unknown'}), and so has left the group"
        status = self.status()
        if status is None:
            return "ended without a word: killed by a signal, for lack of memory perhaps, or by os._exit"
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(number).name}"
            return f"was killed by signal {number}"
        return f"exited with status {os.WEXITSTATUS(status)}"

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _program(self) -> str:
        """Empty where that cannot be told, and while the process is ending: then it is no program any more."""
        try:
            return os.readlink(f"/proc/{self._peer.pid}/exe")
        except OSError:
            return ""

    def status(self) -> int | None:
        """As ``os.wait`` would give it; None where the system does not tell."""
        with contextlib.suppress(OSError, ValueError, IndexError):  # not yet reaped: its last field is readable
            fields = pathlib.Path(f"/proc/{self._peer.pid}/stat").read_text().rpartition(")")[2].split()
            if fields[0] == "Z" and int(fields[19]) == self._peer.started:
                return int(fields[49])
        with contextlib.suppress(OSError):
            info = bytearray(struct.pack("Q", _PIDFD_INFO_EXIT).ljust(_PIDFD_INFO_BYTES, b"\0"))
            fcntl.ioctl(self._pidfd, _PIDFD_GET_INFO, info)
            if struct.unpack_from("Q", info)[0] & _PIDFD_INFO_EXIT:
                return int(struct.unpack_from("i", info, _EXIT_CODE_AT)[0])
        return None


class Liveness:
    """What this rank says of itself to the group, and what it can tell of the others."""

    def __init__(self, arena: Arena, signals: Signals, rank: int, ranks: Sequence[int]) -> None:
        self._arena = arena
        self._signals = signals
        self._rank = rank
        self._ranks = ranks
        self._is_announced = False
        self._lifelines = [
            None if r == rank else Lifeline(peer, functools.partial(arena.is_held_by, r))
            for r, peer in enumerate(arena.peers)
        ]
        self._left_since: dict[int, float] = {}

    def check(self, needed: Sequence[int]) -> None:
        """Raise if one of ``needed`` takes part no more.

        Raises:
            PeerError: the message says which, and how it ended or what its last words were.
        """
        for peer in needed:
            lifeline = self._lifelines[peer]
            if lifeline is None:
                continue
            state, words = self._read(peer)
            if state == _TAKING_PART:
                if lifeline.is_alive():
                    continue
                state, words = self._read_now(peer)  # it may have spoken between the two looks
            name = f"rank {self._ranks[peer]} (pid {self._arena.peers[peer].pid})"
            me = self._ranks[self._rank]
            if state == _TAKING_PART:
                raise PeerError(f"rank {me}: {name} {lifeline.how_it_ended()}. Its own output may say why.")
            if state == _FAILED or words:
                raise peer_failed(me, name, words)
            since = self._left_since.setdefault(peer, time.monotonic())
            if lifeline.runs() and time.monotonic() - since < _END_S:
                continue
            raise peer_left(me, name, "" if not lifeline.status() else f" and {lifeline.how_it_ended()}")

    def announce_failure(self, reason: str) -> None:
        """Tell the others that this rank gives the group up."""
        self._announce(_FAILED, reason)

    def announce_departure(self, last_words: str) -> None:
        """Tell the others that this rank leaves, and why, if it failed."""
        self._announce(_LEFT, last_words)

    def close(self) -> None:
        for lifeline in self._lifelines:
            if lifeline is not None:
                lifeline.close()

    def _announce(self, state: int, words: str) -> None:
        if self._is_announced:
            return
        self._is_announced = True
        start = self._arena.layout.start(self._rank) + self._arena.layout.state
        text = words.encode()[-LAST_WORDS_BYTES + 1 :]
        self._arena.memory[start + 8 : start + 8 + len(text) + 1] = text + b"\0"
        self._arena.words[start // 8] = state
        self._signals.tell_all(STATE)

    def _read(self, peer: int) -> tuple[int, str]:
        """What a peer has said of itself, once it has rung for that. [Note: memory order] in ``signals``"""
        return self._read_now(peer) if self._signals.counts[peer][STATE] else (_TAKING_PART, "")

    def _read_now(self, peer: int) -> tuple[int, str]:
        """The same where the peer's process has ended, or has closed the memory."""
        start = self._arena.layout.start(peer) + self._arena.layout.state
        state = self._arena.words[start // 8]
        text = bytes(self._arena.memory[start + 8 : start + 8 + LAST_WORDS_BYTES]).split(b"\0", 1)[0]
        return state, text.decode(errors="replace").strip()
