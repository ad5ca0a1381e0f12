"""Where ranks tell one another what they have called: every collective begins there.

Each rank sends each other one a record of what it has called, and with it its data where they are small.

The invariant: on a mismatch all ranks raise, before any of them has written to a result; and since each has then taken
the records of all others, the next meeting finds none of them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.calls import SpelledCalls, called
from paceline.comm.explain import different_calls
from paceline.comm.mpi.library import MPI
from paceline.comm.mpi.wire import RECORD_TAG, Wire, bytes_of
from paceline.comm.transport import Call, Steps

_CALL_BYTES = 512
_INLINE_BYTES = 1 << 16  # of the data in the records of all ranks together


class Meetings:
    """Where ranks tell one another what they have called.

    Attributes:
        number: of the last one to which this rank has come.
        inline_bytes: of data that a record has room for.
    """

    def __init__(self, wire: Wire, rank: int, ranks: Sequence[int]) -> None:
        self.number = 0
        self.inline_bytes = -(-max(_INLINE_BYTES // len(ranks), 16 * len(ranks)) // 64) * 64
        self._wire = wire
        self._rank = rank
        self._ranks = ranks
        self._peers = [peer for peer in range(len(ranks)) if peer != rank]
        self._partners = [(peer,) for peer in (*self._peers, *self._peers)]
        self._stride = _CALL_BYTES + self.inline_bytes
        self._records = torch.zeros(len(ranks), self._stride, dtype=torch.uint8, device="cpu")
        self._memory: Any = bytes_of(self._records.view(-1))  # a Buffer, as mypy knows from Python 3.12 on
        self._typed: dict[torch.dtype, list[Tensor]] = {}
        self._spelled = SpelledCalls(_CALL_BYTES)
        self._receives = [
            wire.comm.Recv_init((bytes_of(self._records[peer]), MPI.BYTE), peer, RECORD_TAG) for peer in self._peers
        ]

    def meet(self, call: Call, data: Sequence[Tensor] = ()) -> Steps:
        """Send all ranks ``call`` and ``data``, and wait for theirs.

        Raises:
            CollectiveMismatchError: on all ranks, if they have not called the same.
        """
        self.number += 1
        end = self._write(call, data)
        MPI.Prequest.Startall(self._receives)
        mine = (bytes_of(self._records[self._rank])[:end], MPI.BYTE)
        sends = [self._wire.comm.Isend(mine, peer, RECORD_TAG) for peer in self._peers]
        yield from self._wire.finish_collective([*self._receives, *sends], self._partners, self._records)
        self._compare(call)

    def data(self, dtype: torch.dtype, numel: int, start: int = 0) -> list[Tensor]:
        """What came with the records, by rank: of each the elements from ``start``."""
        if dtype not in self._typed:
            self._typed[dtype] = [record[_CALL_BYTES:].view(dtype) for record in self._records]
        return [typed[start : start + numel] for typed in self._typed[dtype]]

    def close(self) -> None:
        for receive in self._receives:
            receive.Free()

    def _write(self, call: Call, data: Sequence[Tensor]) -> int:
        """Fill this rank's record; where it ends."""
        _, spelled = self._spelled[call]
        start = self._rank * self._stride
        self._memory[start : start + len(spelled)] = spelled
        end = start + _CALL_BYTES
        for tensor in data:
            if tensor.nbytes:
                self._memory[end : end + tensor.nbytes] = bytes_of(tensor)
                end += tensor.nbytes
        return end - start

    def _compare(self, call: Call) -> None:
        common, _ = self._spelled[call]
        for peer in self._peers:
            start = peer * self._stride
            if self._memory[start : start + len(common)].tobytes() != common:
                theirs = called(self._memory[start : start + _CALL_BYTES].tobytes())
                raise different_calls(self._ranks[self._rank], call, self._ranks[peer], theirs)
