"""What ranks say when they leave a group.

The invariant: a rank says it once, to all others, with the number of collectives that it has finished. So nobody waits
for it in one that it has not, and whoever has heard all of them knows that nothing more is to come.
"""

import struct
from dataclasses import dataclass

from paceline.comm.mpi.library import MPI
from paceline.comm.mpi.wire import NOTICE_TAG, Wire

_NOTICE_BYTES = 2048


@dataclass(frozen=True)
class Notice:
    """What a rank has said when it left.

    Attributes:
        num_done: how many collectives it had finished.
        words: why, if something failed.
    """

    num_done: int
    has_failed: bool
    words: str


class Notices:
    """Who takes part no more.

    Attributes:
        seen: by rank.
    """

    _HEAD = struct.Struct("q?")

    def __init__(self, wire: Wire, rank: int, size: int) -> None:
        self.seen: dict[int, Notice] = {}
        self._comm = wire.comm
        self._peers = [peer for peer in range(size) if peer != rank]
        self._sends: list[MPI.Request] = []
        self._text = b""

    def announce(self, num_done: int, *, has_failed: bool, words: str) -> None:
        """Tell all others that this rank takes part no more. The first time counts."""
        if not self._text and not MPI.Is_finalized():
            self._text = self._HEAD.pack(num_done, has_failed) + words.encode()[-_NOTICE_BYTES:]
            self._sends = [self._comm.Isend((self._text, MPI.BYTE), peer, NOTICE_TAG) for peer in self._peers]

    def read(self) -> None:
        """Take the notices that have come."""
        status = MPI.Status()
        while (found := self._comm.Improbe(MPI.ANY_SOURCE, NOTICE_TAG, status)) is not None:
            text = bytearray(status.Get_count(MPI.BYTE))
            found.Recv((text, MPI.BYTE))
            num_done, has_failed = self._HEAD.unpack_from(text)
            words = text[self._HEAD.size :].decode(errors="replace").strip()
            self.seen[status.Get_source()] = Notice(num_done, has_failed, words)

    def are_complete(self) -> bool:
        """Whether all ranks of the group have left, and know that of one another."""
        self.read()
        return len(self.seen) == len(self._peers) and MPI.Request.Testall(self._sends)
