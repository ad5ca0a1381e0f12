"""Where all ranks of all hosts learn what the others have called: every collective begins there.

The ranks of each host meet, and compare their calls; the first rank of each host, its *head*, tells the other heads
what was called, and its host what it has heard, in a verdict that lies in memory. What is small goes with that: then
the collective is over when it has begun.

The invariant: as in shared memory, all ranks see a mismatch, none has written to a result, and the group goes on.
"""

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from paceline.comm.calls import SpelledCalls, called, padded
from paceline.comm.explain import different_calls
from paceline.comm.hosts.flows import Flow, Site
from paceline.comm.hosts.frames import memory_of
from paceline.comm.hosts.waits import Waits
from paceline.comm.hosts.wire import Wire
from paceline.comm.memory.transport import SharedMemory
from paceline.comm.transport import Call, Steps
from paceline.errors import CollectiveMismatchError

_CALL_BYTES, _CALL_ALIGNMENT = 1024, 64
VERDICT_BYTES = 4096  # at the beginning of a buffer; what is small follows
_AGREED, _DIFFERENT, _WAITING = range(3)  # the first of them
_MOST_REMEMBERED = 512  # sizes that come again


class Meetings:
    """The meetings of one rank with those of all hosts.

    Args:
        ranks: the global rank of each rank in the group, for errors.

    Attributes:
        number: of the collective.
        is_beginning: whether not all hosts are known to have come to it.
        is_judging: whether this rank waits until they are.
    """

    def __init__(
        self, local: SharedMemory, wire: Wire, waits: Waits, site: Site, rank: int, ranks: Sequence[int]
    ) -> None:
        self.number = 0
        self.is_beginning = False
        self.is_judging = False
        self._local = local
        self._wire = wire
        self._waits = waits
        self._site = site
        self._members = site.hosts[site.host]
        self._rank = rank
        self._ranks = ranks
        self._is_head = local.rank == 0
        self._rooms: dict[tuple[int, torch.dtype, int | None], Tensor] = {}  # slicing costs more than looking up
        self._spelled = SpelledCalls(_CALL_BYTES, _CALL_ALIGNMENT)
        self._verdict_at = 0  # where in memory a head writes what it has heard
        self._called: set[int] = set()  # the hosts whose heads have told what they have called
        self._told_absent: dict[int, tuple[int, list[int]]] = {}  # by host: a collective's number and who is late
        self._own_absent: tuple[int, list[int]] = (0, [])  # what this head has told
        wire.on_note(self._hear_of_absent)

    # -- how a collective begins ---------------------------------------------------------------------------------

    def agree(self, call: Call, flow: Flow) -> Generator[None, None, Sequence[Tensor]]:
        """Meet with all ranks, and compare what was called; do all of it that can be done at once.

        Returns:
            The memory that holds what the ranks of this host give of the first block.
        Raises:
            CollectiveMismatchError: on all ranks.
        """
        self.number += 1
        self.is_beginning = True
        parts = self._local.meetings.next_buffer(flow.dtype, flow.numel)
        flow.give(0, parts[self._site.me])
        mismatch = None
        try:
            yield from self._waits.meet(call)
        except CollectiveMismatchError as error:
            mismatch = error
        room = self._room(flow)
        if mismatch is not None and not self._is_head:  # the head tells the others first
            self.is_beginning = False
            raise mismatch
        memory = self._local.arena.memory
        self._verdict_at = self._local.meetings.start_of(0)
        self.is_judging = True
        try:
            if self._is_head:
                memory[self._verdict_at] = _WAITING
                memory[self._verdict_at + 1] = 0
                yield from self._judge(call, flow, mismatch, parts, room)
                self.is_judging = self.is_beginning = False
            yield from self._waits.meet()
        finally:
            self.is_judging = self.is_beginning = False
        if memory[self._verdict_at] != _AGREED:
            raise CollectiveMismatchError(self._read_verdict())
        if flow.site.at_once:
            flow.near(0, parts)
            if flow.comes_here:
                flow.take(0, [room])
        return parts

    def _room(self, flow: Flow) -> Tensor:
        """In the head's part of the next buffer, behind the verdict."""
        head, *_ = self._local.meetings.next_buffer(torch.uint8)
        key = self._local.meetings.buffer, flow.dtype, flow.numel
        room = self._rooms.get(key)
        if room is None:
            if len(self._rooms) >= _MOST_REMEMBERED:
                self._rooms.clear()
            room = self._rooms[key] = head[VERDICT_BYTES:].view(flow.dtype)[: flow.numel]
        return room

    def _judge(
        self, call: Call, flow: Flow, mismatch: CollectiveMismatchError | None, parts: Sequence[Tensor], room: Tensor
    ) -> Steps:
        """On a head: tell the others what was called here, and write down for this host how that compares.

        Args:
            mismatch: what is wrong on this host already.
            room: for that, and for what has come with the calls.
        """
        common, text = self._spelled[call] if mismatch is None else (b"", _spell_mismatch(mismatch))
        sends = flow.pack(0, parts) if flow.site.at_once and mismatch is None else {}
        sent, came = [], {}
        self._called = set()
        for host in self._site.others:
            head = self._site.hosts[host][0]
            frame = b"".join((text, memory_of(sends[host]) or b"")) if host in sends else text
            came[host] = self._wire.expect(head, self.number, 0)
            sent.append(self._wire.send(head, self.number, 0, memoryview(frame), len(text)))
        for host, parcel in came.items():
            yield from self._waits.far([parcel])
            self._called.add(host)
            self._write_verdict(_WAITING, "")
        yield from self._waits.far(sent)
        if mismatch is not None:
            raise mismatch
        verdict, arrived = "", {}
        for host, parcel in came.items():
            assert parcel.memory is not None
            theirs = bytes(parcel.memory[: parcel.extra])
            if not theirs.startswith(common):
                verdict = verdict or self._compare(call, parcel.peer, theirs)
            elif len(parcel.memory) > parcel.extra:
                arrived[host] = torch.frombuffer(parcel.memory, dtype=torch.uint8)[parcel.extra :].view(flow.dtype)
        if not verdict and flow.site.at_once and flow.comes_here:
            try:
                flow.unpack(0, arrived, {}, room)
            except CollectiveMismatchError as error:
                verdict = str(error)
        self._write_verdict(_DIFFERENT if verdict else _AGREED, verdict)

    def _compare(self, call: Call, peer: int, theirs: bytes) -> str:
        """What is wrong, where ``peer`` has called something else, or knows already that something is wrong."""
        if theirs.startswith(b"\0"):
            return called(theirs)
        return str(different_calls(self._ranks[self._rank], call, self._ranks[peer], called(theirs)))

    def _write_verdict(self, verdict: int, text: str) -> None:
        memory, start = self._local.arena.memory, self._verdict_at + 1
        encoded = text.encode()[: VERDICT_BYTES - 2] + b"\0"
        memory[start : start + len(encoded)] = encoded
        memory[self._verdict_at] = verdict

    def _read_verdict(self) -> str:
        memory = self._local.arena.memory[self._verdict_at + 1 : self._verdict_at + VERDICT_BYTES]
        return bytes(memory).split(b"\0")[0].decode(errors="replace")

    # -- who is missing ------------------------------------------------------------------------------------------

    def absent(self) -> list[int]:
        """Which ranks have not come to what this one waits for in the collective."""
        if self.is_judging and self._is_head:
            return self._absent_elsewhere()
        if self.is_judging:
            told = self._read_verdict() if self._local.arena.memory[self._verdict_at] == _WAITING else ""
            return [int(rank) for rank in told.split(",") if rank.isdigit()] or [self._members[0]]
        if self._waits.parcels:
            return [parcel.peer for parcel in self._waits.parcels if not parcel.is_done]
        return [self._members[place] for place in self._local.absent()]

    def _absent_elsewhere(self) -> list[int]:
        """On a head that waits for others: which ranks have not come, as far as their hosts have told."""
        absent: list[int] = []
        for host in self._site.others:
            if host not in self._called:
                number, told = self._told_absent.get(host, (0, []))
                absent += told if number == self.number else self._site.hosts[host]
        return absent

    def tell_absent(self) -> None:
        """On a head that waits: tell the other heads, or this host, for whom."""
        if not self._is_head or not self.is_beginning:
            return
        if self.is_judging:
            self._write_verdict(_WAITING, ",".join(map(str, self._absent_elsewhere())))
            return
        mine = self.number, self.absent()
        if mine[1] and mine != self._own_absent:
            self._own_absent = mine
            for host in self._site.others:
                self._wire.note(self._site.hosts[host][0], *mine)

    def _hear_of_absent(self, source: int, number: int, ranks: list[int]) -> None:
        self._told_absent[self._site.host_of(source)] = number, ranks


def _spell_mismatch(mismatch: CollectiveMismatchError) -> bytes:
    """In the place of a call: that something is wrong, and what. It has nothing in common with any call."""
    return padded((b"\0" + str(mismatch).encode())[: _CALL_BYTES - 1] + b"\0", _CALL_ALIGNMENT)
