"""The backend ``mpi``: collectives among the ranks that an MPI launcher has started, over mpi4py and any MPI library.

Importing this module starts MPI, if nobody has.

Every collective begins with a meeting: each rank sends each other one a record of what it has called, and with it its
data where they are small. What is larger follows in messages of its own once all records are known to be alike.

[Note: own sums] MPI leaves open in which order its reductions add, and whether all ranks get the same bits. So each
rank is sent its share of all tensors, reduces it in the order of ranks, and all gather the shares. For large tensors on
one host that takes less time than Open MPI's Iallreduce, and it knows the same types and operations as shared memory.

[Note: progress] MPI gets on only while it is called, and wakes nobody. So waits poll, with naps that grow.

The invariant: on a mismatch all ranks raise, none has written to a result, and the group goes on. A rank that leaves
says so, and how many collectives it has finished, so nobody waits for it in one that it has not.
"""

import atexit
import contextlib
import hashlib
import os
import pathlib
import struct
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.companion import make_companion
from paceline.comm.engine import Engine
from paceline.comm.group import CollectiveGroup
from paceline.comm.reductions import reduce_into
from paceline.comm.transport import Call, Reduction, Steps, Transport
from paceline.environment import read_placement
from paceline.errors import CollectiveMismatchError, CommunicationError, PeerError

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # mpi4py finds its library when it is imported
    raise CommunicationError(
        f"the backend 'mpi' needs mpi4py and an MPI library ({str(error).splitlines()[0]}). Install both with `pip "
        "install 'paceline[mpi]'`, or mpi4py alone where the system has an MPI of its own."
    ) from error

_RECORD, _DATA, _NOTICE, _LETTER, _FIRST_PARCEL = range(5)  # tags; MPI has at least 32768
_NUM_PARCELS = 1 << 14  # tags for what is too large for a letter

_CALL_BYTES = 512
_INLINE_BYTES = 1 << 16  # of the data in the records of all ranks together
_LETTER_BYTES = 2048  # with its message; MPI keeps that much where nobody waits for it yet
_NOTICE_BYTES = 2048
_MESSAGE_BYTES = 1 << 28  # at most; MPI counts to 2**31
_BLOCK_BYTES = 1 << 23  # of a tensor that is reduced at a time: what ranks send then stays in caches

_SHORTEST_NAP_S, _LONGEST_NAP_S = 20e-6, 1e-3
_LEAVING_S = 10.0  # for the other ranks to leave too, before MPI is ended
_LAST_WORDS_S = 2.0  # for them to tell why this rank failed, before it ends them

_P = ParamSpec("_P")


def _bytes_of(tensor: Tensor) -> MPI.buffer:
    """The memory of a flat tensor, which must outlive what is done with it."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def _messages_of(tensor: Tensor) -> list[tuple[MPI.buffer, MPI.Datatype]]:
    """The memory of a flat tensor in pieces that MPI can count; none where it is empty."""
    memory = _bytes_of(tensor)
    return [(memory[start : start + _MESSAGE_BYTES], MPI.BYTE) for start in range(0, tensor.nbytes, _MESSAGE_BYTES)]


class _Wire:
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
        return [self.comm.Isend(message, to, tag) for message in _messages_of(tensor)]

    def receive(self, tensor: Tensor, source: int, tag: int) -> list[MPI.Request]:
        return [self.comm.Irecv(message, source, tag) for message in _messages_of(tensor)]

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
        self.nap_s = min(1.5 * self.nap_s, _LONGEST_NAP_S)


_torn: list[object] = []  # memory that MPI may still write to


class _Meetings:
    """Where ranks tell one another what they have called.

    Attributes:
        number: of the last one to which this rank has come.
        inline_bytes: of data that a record has room for.
    """

    def __init__(self, wire: _Wire, rank: int, ranks: Sequence[int]) -> None:
        self.number = 0
        self.inline_bytes = -(-max(_INLINE_BYTES // len(ranks), 16 * len(ranks)) // 64) * 64
        self._wire = wire
        self._rank = rank
        self._ranks = ranks
        self._peers = [peer for peer in range(len(ranks)) if peer != rank]
        self._partners = [(peer,) for peer in (*self._peers, *self._peers)]
        self._stride = _CALL_BYTES + self.inline_bytes
        self._records = torch.zeros(len(ranks), self._stride, dtype=torch.uint8)
        self._memory: Any = _bytes_of(self._records.view(-1))  # a Buffer, as mypy knows from Python 3.12 on
        self._typed: dict[torch.dtype, list[Tensor]] = {}
        self._spelled: dict[Call, bytes] = {}
        self._receives = [
            wire.comm.Recv_init((_bytes_of(self._records[peer]), MPI.BYTE), peer, _RECORD) for peer in self._peers
        ]

    def meet(self, call: Call, data: Sequence[Tensor] = ()) -> Steps:
        """Send all ranks ``call`` and ``data``, and wait for theirs.

        Raises:
            CollectiveMismatchError: on all ranks, if they have not called the same.
        """
        self.number += 1
        end = self._write(call, data)
        MPI.Prequest.Startall(self._receives)
        mine = (_bytes_of(self._records[self._rank])[:end], MPI.BYTE)
        sends = [self._wire.comm.Isend(mine, peer, _RECORD) for peer in self._peers]
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
        spelled = self._spelled.get(call)
        if spelled is None:
            if len(self._spelled) > 1000:
                self._spelled.clear()
            spelled = (_common(call) + str(call).encode())[: _CALL_BYTES - 1] + b"\0"
            self._spelled[call] = spelled
        start = self._rank * self._stride
        self._memory[start : start + len(spelled)] = spelled
        end = start + _CALL_BYTES
        for tensor in data:
            if tensor.nbytes:
                self._memory[end : end + tensor.nbytes] = _bytes_of(tensor)
                end += tensor.nbytes
        return end - start

    def _compare(self, call: Call) -> None:
        spelled = self._spelled[call]
        length = spelled.index(b"\0") + 1
        for peer in self._peers:
            start = peer * self._stride
            if self._memory[start : start + length].tobytes() != spelled[:length]:
                theirs = self._memory[start : start + _CALL_BYTES].tobytes().split(b"\0")[1].decode(errors="replace")
                raise CollectiveMismatchError(
                    f"rank {self._ranks[self._rank]} called {call}, but rank {self._ranks[peer]} called {theirs}. All "
                    "ranks must call the same collectives in the same order, with tensors of the same size and dtype."
                )


def _common(call: Call) -> bytes:
    """What all ranks must have called alike."""
    text = f"{call.kind}|{call.dtype}|{call.numel}|{call.detail}".encode()
    if len(text) > _CALL_BYTES // 2:  # it may list a size for each rank
        text = text[: _CALL_BYTES // 4] + hashlib.blake2b(text, digest_size=16).hexdigest().encode()
    return text + b"\0"


@dataclass(frozen=True)
class _Notice:
    """What a rank has said when it left.

    Attributes:
        num_done: how many collectives it had finished.
        words: why, if something failed.
    """

    num_done: int
    has_failed: bool
    words: str


class _Notices:
    """Who takes part no more.

    Attributes:
        seen: by rank.
    """

    _HEAD = struct.Struct("q?")

    def __init__(self, wire: _Wire, rank: int, size: int) -> None:
        self.seen: dict[int, _Notice] = {}
        self._comm = wire.comm
        self._peers = [peer for peer in range(size) if peer != rank]
        self._sends: list[MPI.Request] = []
        self._text = b""

    def announce(self, num_done: int, *, has_failed: bool, words: str) -> None:
        """Tell all others that this rank takes part no more. The first time counts."""
        if not self._text and not MPI.Is_finalized():
            self._text = self._HEAD.pack(num_done, has_failed) + words.encode()[-_NOTICE_BYTES:]
            self._sends = [self._comm.Isend((self._text, MPI.BYTE), peer, _NOTICE) for peer in self._peers]

    def read(self) -> None:
        """Take the notices that have come."""
        status = MPI.Status()
        while (found := self._comm.Improbe(MPI.ANY_SOURCE, _NOTICE, status)) is not None:
            text = bytearray(status.Get_count(MPI.BYTE))
            found.Recv((text, MPI.BYTE))
            num_done, has_failed = self._HEAD.unpack_from(text)
            words = text[self._HEAD.size :].decode(errors="replace").strip()
            self.seen[status.Get_source()] = _Notice(num_done, has_failed, words)

    def are_complete(self) -> bool:
        """Whether all ranks of the group have left, and know that of one another."""
        self.read()
        return len(self.seen) == len(self._peers) and MPI.Request.Testall(self._sends)


@dataclass(frozen=True)
class _Letter:
    """A message, or the announcement of one that is too large to come with it."""

    source: int
    tag: int
    num_bytes: int
    number: int
    dtype: str
    text: memoryview


class _Letters:
    """Messages between two ranks, with any tags: those of MPI end at 2**31 or earlier.

    [Note: order of letters] Letters of a pair arrive in order, and are read only between two rounds in which all
    receives look for theirs, in the order in which they were called. So none takes what an earlier one waits for.
    """

    _HEAD = struct.Struct("qqq24s")

    def __init__(self, wire: _Wire, rank: int, ranks: Sequence[int]) -> None:
        self._wire = wire
        self._rank = rank
        self._ranks = ranks
        self._unread: list[_Letter] = []
        self._num_waiting = 0
        self._num_sent = [0] * len(ranks)

    def send(self, tensor: Tensor, to: int, tag: int) -> Steps:
        number = self._num_sent[to]
        self._num_sent[to] += 1
        text = self._HEAD.pack(tag, tensor.nbytes, number, _name(tensor.dtype).encode())
        is_small = len(text) + tensor.nbytes <= _LETTER_BYTES
        if is_small and tensor.nbytes:
            text += _bytes_of(tensor).tobytes()
        requests = [self._wire.comm.Isend((text, MPI.BYTE), to, _LETTER)]
        if not is_small:
            requests += self._wire.send(tensor, to, _parcel(number))
        yield from self._wire.finish(requests, text, tensor)

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> Generator[None, None, int]:
        self._num_waiting += 1
        try:
            while (letter := self._find(source, tag)) is None:
                yield
        finally:
            self._num_waiting -= 1
        fits = (letter.num_bytes, letter.dtype) == (tensor.nbytes, _name(tensor.dtype))
        memory = tensor if fits else torch.empty(letter.num_bytes, dtype=torch.uint8)
        if letter.text:
            _bytes_of(memory)[:] = letter.text
        elif letter.num_bytes:
            parcels = self._wire.receive(memory, letter.source, _parcel(letter.number))
            yield from self._wire.finish(parcels, memory)
        if not fits:
            came = f"{letter.num_bytes // getattr(torch, letter.dtype).itemsize} elements of {letter.dtype}"
            raise CollectiveMismatchError(
                f"rank {self._ranks[self._rank]} waits for {tensor.numel()} elements of {_name(tensor.dtype)} with tag "
                f"{tag}, but rank {self._ranks[letter.source]} sent {came}. Send and receive tensors of the same size "
                "and dtype."
            )
        return letter.source

    def poll(self) -> bool:
        """Read letters, if anybody waits for one; whether there were any."""
        if not self._num_waiting:
            return False
        num_unread, status = len(self._unread), MPI.Status()
        while (found := self._wire.comm.Improbe(MPI.ANY_SOURCE, _LETTER, status)) is not None:
            text = bytearray(status.Get_count(MPI.BYTE))
            found.Recv((text, MPI.BYTE))  # it is short, so it came with its envelope
            tag, num_bytes, number, dtype = self._HEAD.unpack_from(text)
            inline = memoryview(text)[self._HEAD.size :]
            name = dtype.rstrip(b"\0").decode()
            self._unread.append(_Letter(status.Get_source(), tag, num_bytes, number, name, inline))
        return len(self._unread) > num_unread

    def _find(self, source: int | None, tag: int) -> _Letter | None:
        """[Note: order of letters]"""
        for index, letter in enumerate(self._unread):
            if letter.tag == tag and source in (None, letter.source):
                return self._unread.pop(index)
        return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _parcel(number: int) -> int:
    return _FIRST_PARCEL + number % _NUM_PARCELS


def _collective(method: "Callable[Concatenate[Mpi, _P], Steps]") -> "Callable[Concatenate[Mpi, _P], Steps]":
    """Note when a collective is under way."""

    def steps(self: "Mpi", /, *args: _P.args, **kwargs: _P.kwargs) -> Steps:
        self._is_under_way = True
        try:
            yield from method(self, *args, **kwargs)
        finally:
            self._is_under_way = False

    return steps


class Mpi(Transport):
    """See ``Transport``.

    Args:
        comm: of this group alone.
        ranks: the global rank of each rank in the group, for errors.
        num_local: how many of them are on this host.
    """

    name = "mpi"

    def __init__(self, comm: MPI.Intracomm, ranks: Sequence[int], num_local: int) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self.num_local = num_local
        self._ranks = ranks
        self._peers = [peer for peer in range(self.size) if peer != self.rank]
        self._comm = comm
        self._wire = _Wire(comm)
        self._meetings = _Meetings(self._wire, self.rank, ranks)
        self._letters = _Letters(self._wire, self.rank, ranks)
        self._notices = _Notices(self._wire, self.rank, self.size)
        self._scratch: Tensor | None = None
        self._is_under_way = False
        self._is_closed = False

    # -- collectives ---------------------------------------------------------------------------------------------

    @_collective
    def all_reduce(self, call: Call, tensor: Tensor, reduction: Reduction) -> Steps:
        yield from self._reduce(call, tensor, reduction, None)

    @_collective
    def reduce(self, call: Call, tensor: Tensor, reduction: Reduction, root: int) -> Steps:
        yield from self._reduce(call, tensor, reduction, root)

    def _reduce(self, call: Call, tensor: Tensor, reduction: Reduction, root: int | None) -> Steps:
        """[Note: own sums]

        Args:
            root: who gets the result; None stands for all.
        """
        gets_it = root in (None, self.rank)
        if tensor.nbytes <= self._meetings.inline_bytes:
            yield from self._meetings.meet(call, [tensor])
            if gets_it:
                parts = self._meetings.data(tensor.dtype, tensor.numel())
                parts[self.rank] = tensor
                reduce_into(tensor, parts, reduction)
            return
        yield from self._meetings.meet(call)
        nothing = [tensor[:0]] * self.size
        for block in torch.split(tensor, _BLOCK_BYTES // tensor.itemsize):
            shares = block.tensor_split(self.size)
            mine = shares[self.rank]
            parts = self._room(mine)
            yield from self._exchange(shares, parts)
            reduced = mine if gets_it else parts[self.rank]
            parts[self.rank] = mine
            reduce_into(reduced, parts, reduction)
            gives = [reduced if root in (None, peer) else reduced[:0] for peer in range(self.size)]
            yield from self._exchange(gives, shares if gets_it else nothing)

    @_collective
    def broadcast(self, call: Call, tensor: Tensor, root: int) -> Steps:
        is_small = tensor.nbytes <= self._meetings.inline_bytes
        yield from self._meetings.meet(call, [tensor] if is_small and self.rank == root else [])
        if not is_small:
            requests = [self._comm.Ibcast(message, root) for message in _messages_of(tensor)]
            # Data pass from rank to rank: it may be any that is waited for.
            yield from self._wire.finish_collective(requests, [self._peers] * len(requests), tensor)
        elif self.rank != root:
            tensor.copy_(self._meetings.data(tensor.dtype, tensor.numel())[root])

    @_collective
    def all_gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor) -> Steps:
        is_small = max(output.nbytes for output in outputs) <= self._meetings.inline_bytes
        yield from self._meetings.meet(call, [mine] if is_small else [])
        if is_small:
            sizes = [output.numel() for output in outputs]
            for output, part in zip(outputs, self._meetings.data(mine.dtype, max(sizes)), strict=True):
                output.copy_(part[: output.numel()])
        else:
            outputs[self.rank].copy_(mine)
            yield from self._exchange([mine] * self.size, outputs)

    @_collective
    def gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor, root: int) -> Steps:
        gives = [mine if peer == root else mine[:0] for peer in range(self.size)]
        yield from self._exchange_unevenly(call, gives, outputs or [mine[:0]] * self.size)

    @_collective
    def scatter(self, call: Call, output: Tensor, inputs: Sequence[Tensor], root: int) -> Steps:
        takes = [output if peer == root else output[:0] for peer in range(self.size)]
        yield from self._exchange_unevenly(call, inputs or [output[:0]] * self.size, takes)

    @_collective
    def all_to_all(self, call: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Steps:
        yield from self._exchange_unevenly(call, inputs, outputs)

    @_collective
    def reduce_scatter(self, call: Call, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> Steps:
        if sum(piece.nbytes for piece in inputs) <= self._meetings.inline_bytes:
            yield from self._meetings.meet(call, inputs)
            start = sum(piece.numel() for piece in inputs[: self.rank])
            parts = self._meetings.data(output.dtype, output.numel(), start)
            reduce_into(output, parts, reduction)
            return
        yield from self._meetings.meet(call)
        window = _BLOCK_BYTES // output.itemsize // self.size
        for start in range(0, max(piece.numel() for piece in inputs), window):
            pieces = [piece[start : start + window] for piece in inputs]
            parts = self._room(pieces[self.rank])
            yield from self._exchange(pieces, parts)
            parts[self.rank] = pieces[self.rank]
            reduce_into(output[start : start + window], parts, reduction)

    @_collective
    def barrier(self, call: Call) -> Steps:
        yield from self._meetings.meet(call)

    def _exchange(self, gives: Sequence[Tensor], takes: Sequence[Tensor]) -> Steps:
        """Send each peer what is given to it, and receive what is taken from it."""
        requests: list[MPI.Request] = []
        partners: list[Sequence[int]] = []
        for step in range(1, self.size):  # each rank begins with another one
            source, to = (self.rank - step) % self.size, (self.rank + step) % self.size
            receives = self._wire.receive(takes[source], source, _DATA)
            sends = self._wire.send(gives[to], to, _DATA)
            requests += receives + sends
            partners += [(source,)] * len(receives) + [(to,)] * len(sends)
        yield from self._wire.finish_collective(requests, partners, gives, takes)

    def _exchange_unevenly(self, call: Call, gives: Sequence[Tensor], takes: Sequence[Tensor]) -> Steps:
        """Agree on who has how much for whom, and exchange that."""
        mine = torch.tensor([[piece.numel() for piece in pieces] for pieces in (gives, takes)])  # (2, size)
        yield from self._meetings.meet(call, [mine.view(-1)])
        tables = torch.stack(self._meetings.data(mine.dtype, mine.numel())).view(self.size, 2, self.size)
        given, taken = tables[:, 0], tables[:, 1].t()  # (giver, taker)
        for giver, taker in (given != taken).nonzero().tolist():
            raise CollectiveMismatchError(
                f"{call.kind}: rank {self._ranks[giver]} has {given[giver, taker]} elements for rank "
                f"{self._ranks[taker]}, which expects {taken[giver, taker]}. Sizes must be the same on both sides."
                + (f" This rank's call is at {call.where}." if call.where else "")
            )
        takes[self.rank].copy_(gives[self.rank])
        yield from self._exchange(gives, takes)

    def _room(self, part: Tensor) -> list[Tensor]:
        """For each rank, memory for a tensor such as ``part``, until the next call of this."""
        stride = -(-_BLOCK_BYTES // self.size // 64) * 64 + 64
        if self._scratch is None:
            self._scratch = torch.empty(self.size, stride, dtype=torch.uint8)
        return [row[: part.nbytes].view(part.dtype) for row in self._scratch]

    # -- messages ------------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, to: int, tag: int) -> Steps:
        return self._letters.send(tensor, to, tag)

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> Generator[None, None, int]:
        return self._letters.receive(tensor, source, tag)

    # -- waiting -------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        return self._letters.poll()

    def pause(self, timeout_s: float) -> bool:
        self._wire.nap(timeout_s)
        return False

    def nudge(self) -> None:
        """Naps are short."""

    def is_settled(self) -> bool:
        return False  # what a rank has sent before it left may still be on its way

    def check_peers(self, awaited: Sequence[int]) -> None:
        if self._is_closed:
            return
        self._notices.read()
        gone = [peer for peer in self._notices.seen if peer in awaited]  # who left first is why others did
        if self._is_under_way:
            gone = [peer for peer in gone if self._notices.seen[peer].num_done < self._meetings.number]
        failed = [peer for peer in gone if self._notices.seen[peer].has_failed]
        if not self._is_under_way and len(gone) < len(awaited):
            gone = failed  # of several, any one may send what anybody may send
        if not gone:
            return
        notice, name = self._notices.seen[gone[0]], f"rank {self._ranks[gone[0]]}"
        if notice.has_failed:
            raise PeerError(f"{self._me()}: {name} failed, and takes part in this group no more:\n{notice.words}")
        raise PeerError(
            f"{self._me()}: {name} has left the group. All ranks must call collectives equally often before they end."
        )

    def absent(self) -> list[int]:
        return self._wire.awaited()

    def give_up(self, reason: str) -> None:
        self._notices.announce(self._num_done(), has_failed=True, words=reason)

    def depart(self, last_words: str) -> None:
        self._notices.announce(self._num_done(), has_failed=bool(last_words), words=last_words)

    def close(self) -> None:
        if self._is_closed or MPI.Is_finalized():
            return
        self.depart("It left in the middle of a collective or a message." if self._wire.is_torn else "")
        self._is_closed = True
        _leaving.append(self)
        _see_off()

    def try_to_free(self) -> bool:
        """After ``close``: free the communicator, if all ranks have left the group; whether they have."""
        if not self._notices.are_complete():
            return False
        if not self._wire.is_torn:
            self._meetings.close()
            self._comm.Free()
        return True

    def _num_done(self) -> int:
        """How many collectives this rank has finished. What is torn is the last one, or a message after it."""
        return self._meetings.number - (self._is_under_way or self._wire.is_torn)

    def _me(self) -> str:
        return f"rank {self._ranks[self.rank]}"


# -- the beginning and the end of groups, and of MPI -----------------------------------------------------------------

_pid = os.getpid()
_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()
_leaving: list[Mpi] = []  # whose peers have not all left yet
_seeing_off = threading.Lock()
_connecting: list[threading.Thread] = []  # that have taken too long


def make_mpi(options: Any) -> CollectiveGroup:
    """What c10d calls for ``backend="mpi"``. A collective call of the group's ranks.

    Args:
        options: as of c10d's ``DistributedBackendOptions``; for the group of all ranks, ``global_ranks_in_group`` is
            empty.
    Raises:
        CommunicationError: this process is another rank to its launcher than to MPI, MPI cannot be used by several
            threads, or not all ranks came in time.
    """
    atexit.unregister(_end)  # last registered, it is the first to run: before what it needs is gone
    atexit.register(_end)
    _check_process()
    _check_rank()
    _see_off()
    ranks, timeout_s = list(options.global_ranks_in_group), options.timeout.total_seconds()
    comm, num_local = _connect_within(timeout_s, ranks)
    ranks = ranks or list(range(comm.Get_size()))
    group = CollectiveGroup(Mpi(comm, ranks, num_local), ranks, timeout_s, make_companion(options))
    _engines.add(group.engine)
    return group


def _check_process() -> None:
    if os.getpid() != _pid:
        raise CommunicationError(
            "this process was forked from one that uses MPI, and cannot use it itself. Make groups in the ranks only."
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise CommunicationError(
            "MPI was started for fewer threads than the backend 'mpi' needs, MPI_THREAD_MULTIPLE. Leave mpi4py.rc as "
            "it is, or use an MPI library that was built with threads."
        )


def _check_rank() -> None:
    """c10d's ranks, or those that a launcher has set, must be MPI's."""
    mpis = (MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size())
    if dist.is_initialized():
        told, teller = (dist.get_rank(), dist.get_world_size()), "in the default group"
    else:
        placement = read_placement(os.environ)
        told, teller = (placement.rank, placement.world_size), f"by its environment ({placement.launcher})"
        if placement.launcher == "none":
            told = mpis
    if told != mpis:
        raise CommunicationError(
            f"this process is rank {told[0]} of {told[1]} {teller}, but rank {mpis[0]} of {mpis[1]} to MPI. Start the "
            "job with MPI's own launcher and no other, as in `mpirun -n 4 python script.py`."
        )


def _connect_within(timeout_s: float, ranks: list[int]) -> tuple[MPI.Intracomm, int]:
    """``_connect``, in a thread that is left to itself if it takes too long: what it calls waits without end."""
    outcome: list[tuple[MPI.Intracomm, int]] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(_connect(ranks))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="paceline mpi", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not outcome:
        _connecting.append(thread)
        members = f"ranks {', '.join(map(str, ranks))}" if ranks else "all ranks"
        raise CommunicationError(
            f"rank {MPI.COMM_WORLD.Get_rank()}: not all ranks came to make the group of {members} within "
            f"{timeout_s:g} s. All must call init_process_group and new_group alike."
        )
    return outcome[0]


def _connect(ranks: list[int]) -> tuple[MPI.Intracomm, int]:
    """A communicator of these ranks alone, and how many of them are on this host."""
    world = MPI.COMM_WORLD
    if ranks:
        everyone = world.Get_group()
        members = everyone.Incl(ranks)
        comm = world.Create_group(members)
        members.Free()
        everyone.Free()
    else:
        comm = world.Dup()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    num_local = local.Get_size()
    local.Free()
    return comm, num_local


def _see_off() -> None:
    """Free what belonged to groups that all their ranks have left."""
    if _seeing_off.acquire(blocking=False):  # a group that is garbage may end in the middle of this
        try:
            for transport in list(_leaving):
                if transport.try_to_free():
                    _leaving.remove(transport)
        finally:
            _seeing_off.release()


def _end() -> None:
    """At exit, before mpi4py ends MPI: that waits for all ranks, so a rank that has failed must end them instead."""
    if os.getpid() != _pid or MPI.Is_finalized():
        return
    error = getattr(sys, "last_value", None)  # set once an exception has ended the script
    if error is not None or any(thread.is_alive() for thread in _connecting):
        MPI._set_abort_status(1)  # as `python -m mpi4py` does: at the end, MPI_Abort in the place of MPI_Finalize
    _remove_leftovers()
    deadline = time.monotonic() + (_LEAVING_S if error is None else _LAST_WORDS_S)
    with contextlib.suppress(MPI.Exception):
        for engine in list(_engines):
            engine.depart("".join(traceback.format_exception(error)) if error is not None else "")
            engine.close()
        while _leaving and time.monotonic() < deadline:
            _see_off()
            time.sleep(_LONGEST_NAP_S)


def _remove_leftovers() -> None:
    """Open MPI 5 leaves a file in /dev/shm for each process that no launcher has started."""
    if MPI.COMM_WORLD.Get_size() == 1 and read_placement(os.environ).launcher == "none":
        for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
            if "/dev/shm/sm_segment." in line:
                pathlib.Path(line.split()[-1]).unlink(missing_ok=True)
