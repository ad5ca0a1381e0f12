"""Messages of any size over one communicator, and the waits for them.

[Note: progress] MPI gets on only while it is called, and wakes nobody. So waits poll, with naps that grow.

The invariant: memory that MPI may still read or write is not freed: where a wait is given up, it is kept for ever.
"""

import time
from collections.abc import Sequence

from torch import Tensor

from paceline.comm.mpi.library import MPI
from paceline.comm.transport import Steps

RECORD_TAG, DATA_TAG, NOTICE_TAG, LETTER_TAG, FIRST_PARCEL_TAG = range(5)  # MPI has 32768 or more

_MESSAGE_BYTES = 1 << 28  # at most; MPI counts to 2**31
_SHORTEST_NAP_S, LONGEST_NAP_S = 20e-6, 1e-3


def bytes_of(tensor: Tensor) -> MPI.buffer:
    """The memory of a flat tensor, which must outlive what is done with it."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def messages_of(tensor: Tensor) -> list[tuple[MPI.buffer, MPI.Datatype]]:
    """The memory of a flat tensor in pieces that MPI can count; none where it is empty."""
    memory = bytes_of(tensor)
    return [(memory[start : start + _MESSAGE_BYTES], MPI.BYTE) for start in range(0, tensor.nbytes, _MESSAGE_BYTES)]


class Wire:
    """Messages of any size over one communicator.

    Attributes:
        nap_s: how long to sleep the next time that nothing has come.
        is_torn: whether a wait was given up, so that messages are still under way.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.nap_s = _SHORTEST_NAP_S
        self.is_torn = False
        self._partners: Sequence[Sequence[int]] = ()  # by request of the collective that waits
        self._unfinished: set[int] = set()  # its requests, by index

    def send(self, tensor: Tensor, to: int, tag: int) -> list[MPI.Request]:
        return [self.comm.Isend(message, to, tag) for message in messages_of(tensor)]

    def receive(self, tensor: Tensor, source: int, tag: int) -> list[MPI.Request]:
        return [self.comm.Irecv(message, source, tag) for message in messages_of(tensor)]

    def finish_collective(
        self, requests: Sequence[MPI.Request], partners: Sequence[Sequence[int]], *memory: object
    ) -> Steps:
        """``finish``, of requests of the collective that runs; ``partners`` tells with which ranks each is."""
        self._partners, self._unfinished = partners, set(range(len(requests)))
        yield from self.finish(requests, *memory, unfinished=self._unfinished)

    def awaited(self) -> list[int]:
        """The ranks for which the collective that runs waits."""
        partners = self._partners
        return sorted({partner for index in list(self._unfinished) for partner in partners[index]})

    def finish(self, requests: Sequence[MPI.Request], *memory: object, unfinished: set[int] | None = None) -> Steps:
        """Wait for all ``requests``.

        Args:
            memory: what they read or write; it is kept for ever if this wait is given up.
            unfinished: from it, the indices of those that have ended are removed.
        """
        try:
            # None stands for: there is nothing left to wait for.
            while (ended := MPI.Request.Testsome(requests)) is not None:
                if not ended:
                    yield
                elif unfinished is not None:
                    unfinished.difference_update(ended)
        except BaseException:
            self.is_torn = True
            _torn.append((requests, memory))
            raise
        self.nap_s = _SHORTEST_NAP_S

    def nap(self, timeout_s: float) -> None:
        """Sleep, each time longer. [Note: progress]"""
        time.sleep(min(self.nap_s, timeout_s))
        self.nap_s = min(1.5 * self.nap_s, LONGEST_NAP_S)


_torn: list[object] = []  # memory that MPI may still write to
