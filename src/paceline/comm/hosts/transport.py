"""The backend ``hier``: collectives among ranks of several hosts.

Ranks of one host share memory; between hosts, each byte crosses the wire once. ``flows`` says what becomes of the
blocks of a tensor, here they are kept going: several are on the wire while others pass through memory.

Every collective begins in the same way. The ranks of each host meet, and compare their calls; the first rank of each
host, its *head*, tells the other heads what was called, and its host what it has heard. What is small goes with that.

[Note: the last meeting] Nobody may leave a collective, and then the group, while others of his host still need him, or
need to be told by him of a failure elsewhere. So a collective ends with a meeting, after everything has been sent.

The invariant: as in shared memory, all ranks see a mismatch, none has written to a result, and the group goes on.
"""

import hashlib
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.hosts.across import Across
from paceline.comm.hosts.flows import AllGather, Broadcast, Flow, Reduce, ReduceScatter, Rooms, Sends, Site, Sizes
from paceline.comm.hosts.post import Gone, Parcel, Post, memory_of
from paceline.comm.hosts.wire import Wire
from paceline.comm.memory.messages import _DTYPES
from paceline.comm.memory.transport import SharedMemory
from paceline.comm.transport import Call, Reduction, Steps, Transport
from paceline.errors import CollectiveMismatchError, PeerError
from paceline.rendezvous.peers import name_ranks

_COLLECTIVES, _MESSAGES = range(2)  # channels

# Blocks of this size keep a wire of 1 Gbit/s as busy as larger ones do; so do half as large ones, but not one of 10.
BUFFER_BYTES = 1 << 20
_DEPTH = 6  # blocks on the wire
_SMALL_BYTES = 1 << 17  # sent to all other hosts together with the call
_CALL_BYTES = 1024
_VERDICT_BYTES = 4096  # at the beginning of a buffer; what is small follows
_AGREED, _DIFFERENT, _WAITING = range(3)  # the first of them

_GRACE_S = 0.2  # in which a rank's last words, and what it had sent before, should come
_SHORTEST_NAP_S, _LONGEST_NAP_S = 5e-4, 5e-3
_MOST_REMEMBERED = 512  # calls that come again


@dataclass
class _Block:
    """A block that is on the wire."""

    sent: list[Parcel] = field(default_factory=list)
    came: list[Parcel] = field(default_factory=list)
    arrived: Sends = field(default_factory=dict)
    in_turn: Sends = field(default_factory=dict)


class Hierarchical(Transport):
    """See ``Transport``.

    Args:
        local: among the ranks of this host.
        hosts: of each host, its ranks in the group.
        ranks: the global rank of each rank in the group, for errors.
        block_bytes: what fits into a buffer on every host.

    Attributes:
        num_lanes: how many ranks of each host, the first ones, talk to those of the other hosts.
    """

    name = "hier"

    def __init__(
        self,
        local: SharedMemory,
        post: Post,
        hosts: Sequence[Sequence[int]],
        rank: int,
        ranks: Sequence[int],
        block_bytes: int,
    ) -> None:
        super().__init__(rank, len(ranks))
        self.local = local
        self.num_local = local.size
        self.num_lanes = min(map(len, hosts))
        host = next(index for index, members in enumerate(hosts) if rank in members)
        self._site = Site(tuple(map(tuple, hosts)), host, local.rank, self.num_lanes)
        self._at_once = replace(self._site, num_lanes=1, at_once=True)
        self._members = self._site.hosts[host]
        self._far = [peer for peer in range(self.size) if peer not in self._members]
        self._ranks = ranks
        self._block_bytes = block_bytes
        self._small_bytes = min(_SMALL_BYTES // (len(hosts) - 1), block_bytes - _VERDICT_BYTES)
        self._is_head = local.rank == 0
        self._is_lane = local.rank < self.num_lanes
        self._post = post
        self._wire = Wire(post, _COLLECTIVES, self._hear_of_absent)
        self._across: Across | None = None
        self._number = 0  # of the collective
        self._memory = Rooms()
        self._rooms: dict[tuple[int, torch.dtype, int | None], Tensor] = {}  # slicing costs more than looking up
        self._spelled: dict[Call, tuple[bytes, bytes]] = {}  # what all must have in common, and all of it
        self._num_near = self._num_far = 0  # waits for ranks of this host, and waits for others alone
        self._awaited: list[Parcel] = []  # of the collective
        self._is_beginning = False  # whether not all hosts are known to have come to the collective
        self._is_judging = False  # whether this rank waits until they are
        self._verdict_at = 0  # where in memory a head writes what it has heard
        self._called: set[int] = set()  # the hosts whose heads have told what they have called
        self._told_absent: dict[int, tuple[int, list[int]]] = {}  # by host: a collective's number and who is late
        self._own_absent: tuple[int, list[int]] = (0, [])  # what this head has told
        self._is_late = False
        local._messages._ranks = [*local.ranks, *ranks]  # messages from far count on from those of this host
        post.open(_MESSAGES, self._place_message, self._message_arrived)
        if self._is_lane:
            for other in self._site.others:
                post.connect(_COLLECTIVES, hosts[other][local.rank])

    # -- collectives ---------------------------------------------------------------------------------------------

    def all_reduce(self, call: Call, tensor: Tensor, reduction: Reduction) -> Steps:
        return self._reduce(call, tensor, reduction, None)

    def reduce(self, call: Call, tensor: Tensor, reduction: Reduction, root: int) -> Steps:
        return self._reduce(call, tensor, reduction, root)

    def _reduce(self, call: Call, tensor: Tensor, reduction: Reduction, root: int | None) -> Steps:
        site, numel = self._route(tensor.nbytes), self._block_numel(tensor.dtype)
        return self._run(call, Reduce(site, self._memory, tensor, reduction, numel, self.size, root))

    def broadcast(self, call: Call, tensor: Tensor, root: int) -> Steps:
        site, numel = self._route(tensor.nbytes), self._block_numel(tensor.dtype)
        return self._run(call, Broadcast(site, self._memory, tensor, numel, root))

    def all_gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor) -> Steps:
        site = self._route(sum(output.nbytes for output in outputs))
        return self._run(call, AllGather(site, self._memory, outputs, mine, self._block_numel(mine.dtype)))

    def reduce_scatter(self, call: Call, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> Steps:
        site = self._route(sum(piece.nbytes for piece in inputs))
        return self._run(
            call, ReduceScatter(site, self._memory, output, inputs, reduction, self._block_numel(output.dtype))
        )

    def gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor, root: int) -> Steps:
        gives = [mine if peer == root else mine[:0] for peer in range(self.size)]
        return self._exchange(call, outputs or [mine[:0]] * self.size, gives)

    def scatter(self, call: Call, output: Tensor, inputs: Sequence[Tensor], root: int) -> Steps:
        takes = [output if peer == root else output[:0] for peer in range(self.size)]
        return self._exchange(call, takes, inputs or [output[:0]] * self.size)

    def all_to_all(self, call: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Steps:
        return self._exchange(call, outputs, inputs)

    def barrier(self, call: Call) -> Steps:
        return self._run(call, Flow(self._at_once, self._memory))

    # -- messages ------------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, to: int, tag: int) -> Steps:
        if to in self._members:
            yield from self.local.send(tensor, self._members.index(to), tag)
            return
        parcel = self._post.send(_MESSAGES, to, tag, memory_of(tensor), _DTYPES.index(tensor.dtype))
        self._num_far += 1
        try:
            while not parcel.is_done:
                yield
        finally:
            self._num_far -= 1
            self._post.withdraw(_MESSAGES, parcel)

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> Generator[None, None, int]:
        """Messages from far are put where those of this host are, and found there."""
        is_far = source is not None and source not in self._members
        place = None if source is None else self.local.size + source if is_far else self._members.index(source)
        steps = self.local.receive(tensor, place, tag)
        self._num_far, self._num_near = self._num_far + is_far, self._num_near + (not is_far)
        try:
            next(steps)  # with that, it can be found
            self._post.resume(_MESSAGES)
            while True:
                next(steps)
                yield
        except StopIteration as end:
            place = int(end.value)
            return self._members[place] if place < self.local.size else place - self.local.size
        finally:
            steps.close()
            self._num_far, self._num_near = self._num_far - is_far, self._num_near - (not is_far)

    def _place_message(self, source: int, tag: int, num_bytes: int, extra: int) -> memoryview | None:
        """Where a message goes; while nobody waits for any, the sender must wait."""
        messages = self.local._messages
        if not messages._requests:
            return None
        message = messages._begin(self.local.size + source, tag, num_bytes, _DTYPES[extra])
        return memory_of(message.memory) or memoryview(b"")

    def _message_arrived(self, source: int, _: int) -> None:
        message = self.local._messages._arriving.pop(self.local.size + source)
        message.num_arrived = message.num_bytes

    # -- waiting -------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        has_any = self.local.poll()
        has_any = self._post.poll() or has_any
        if self._is_late:
            self._is_late = False
            self._tell_absent()
        return has_any

    def is_settled(self) -> bool:
        return self.local.is_settled() and self._post.is_quiet()

    def pause(self, timeout_s: float) -> bool:
        if self._num_far and not self._num_near:
            self._post.sleep(min(timeout_s, _LONGEST_NAP_S))
            return False
        if self._num_far or self._wire.is_expecting or self._post.num_unsent:  # one cannot sleep on both
            quiet_s = time.monotonic() - self._post.last_news
            timeout_s = min(timeout_s, max(_SHORTEST_NAP_S, min(quiet_s / 4, _LONGEST_NAP_S)))
        return self.local.pause(timeout_s)

    def heard(self) -> None:
        self.local.heard()

    def nudge(self) -> None:
        self.local.nudge()

    def give_up(self, reason: str) -> None:
        self.local.give_up(reason)
        self._post.announce(has_failed=True, words=reason)
        if self._across is not None:
            self._across.abort()

    def depart(self, last_words: str) -> None:
        self.local.depart(last_words)
        self._post.announce(has_failed=False, words=last_words)

    def close(self) -> None:
        self.local.close()
        self._post.announce(has_failed=False, words="")
        self._post.close()
        if self._across is not None:
            self._across.close()

    # -- for averages --------------------------------------------------------------------------------------------

    def open_across(self, store: dist.Store, timeout_s: float) -> Callable[[Tensor], dist.Work]:
        """What starts sums over the hosts on this rank's lane. A collective call, once for a group.

        Args:
            store: for this alone.
        """
        if not self._is_lane:
            return _refuse
        mates = [self._site.hosts[host][self._site.me] for host in self._site.others]

        def find_gone() -> PeerError | None:
            told = [self._post.gone[mate] for mate in mates if mate in self._post.gone]
            return next((self._peer_error(gone) for gone in told if self._is_in_vain(gone)), None)

        self._across = Across(
            dist.PrefixStore(f"lane {self._site.me}/", store),
            self._site.host,
            len(self._site.hosts),
            address=self._post.address,
            timeout_s=timeout_s,
            find_gone=find_gone,
            mates=name_ranks([self._ranks[mate] for mate in mates]),
        )
        return self._across

    # -- how a collective runs -----------------------------------------------------------------------------------

    def _route(self, num_bytes: int) -> Site:
        return self._at_once if num_bytes <= self._small_bytes else self._site

    def _block_numel(self, dtype: torch.dtype) -> int:
        return self._block_bytes // dtype.itemsize

    def _run(self, call: Call, flow: Flow) -> Steps:
        parts = yield from self._agree(call, flow)
        if flow.site.at_once:
            return
        me, blocks = self._site.me, [_Block() for _ in range(flow.num_blocks)]
        for step in range(flow.num_blocks + _DEPTH):
            if step < flow.num_blocks:
                if step and flow.starts_here:
                    parts = self.local._next_buffer(flow.dtype)
                    flow.give(step, parts[me])
                    yield from self._meet()
                if flow.starts_here:
                    flow.near(step, parts)
                if self._is_lane:
                    block = blocks[step]
                    block.arrived = self._expect(step, block, flow.expects(step), flow.dtype)
                    if flow.starts_here:
                        self._send(step, block, flow.pack(step, parts))
            turning = step - _DEPTH // 2
            if flow.turns and self._is_lane and 0 <= turning < flow.num_blocks:
                block = blocks[turning]
                yield from self._await(block.came)
                block.in_turn = self._expect(turning, block, flow.expects_in_turn(turning), flow.dtype)
                self._send(turning, block, flow.turn(turning, block.arrived))
            last = step - _DEPTH
            if 0 <= last < flow.num_blocks:
                block, blocks[last] = blocks[last], _Block()
                yield from self._await([*block.came, *block.sent])
                if flow.comes_here:
                    parts = self.local._next_buffer(flow.dtype)
                    if self._is_lane:
                        flow.unpack(last, block.arrived, block.in_turn, parts[me])
                        self._memory.give_back([*block.arrived.values(), *block.in_turn.values()])
                    yield from self._meet()
                    flow.take(last, parts)
        if not flow.comes_here:  # [Note: the last meeting]
            self.local._next_buffer(flow.dtype)
            yield from self._meet()

    def _send(self, number: int, block: _Block, sends: Sends) -> None:
        to = [(self._site.hosts[host][self._site.me], tensor) for host, tensor in sends.items()]
        block.sent += self._wire.send_all(self._number, 1 + number, to)

    def _expect(self, number: int, block: _Block, numels: dict[int, int], dtype: torch.dtype) -> Sends:
        """What is to come, by host."""
        rooms = {host: self._memory.take(numel, dtype) for host, numel in numels.items() if numel}
        sources = [(self._site.hosts[host][self._site.me], room) for host, room in rooms.items()]
        block.came += self._wire.expect_all(self._number, 1 + number, sources)
        return rooms

    def _exchange(self, call: Call, takes: Sequence[Tensor], gives: Sequence[Tensor]) -> Steps:
        """From each rank to each, straight from its memory: between hosts there is nothing to be saved."""
        yield from self._agree(call, Sizes(self._at_once, self._memory, call.kind, gives, takes, self._ranks))
        came = self._wire.expect_all(self._number, 1, [(peer, takes[peer]) for peer in self._far])
        sent = self._wire.send_all(self._number, 1, [(peer, gives[peer]) for peer in self._far])
        near = [[tensors[peer] for peer in self._members] for tensors in (takes, gives)]
        yield from self._near(self.local.all_to_all(call, *near))
        yield from self._await([*came, *sent])
        self.local._next_buffer(torch.uint8)  # [Note: the last meeting]
        yield from self._meet()

    def _await(self, parcels: Iterable[Parcel]) -> Steps:
        """Wait until they have come, or been sent."""
        self._awaited = [parcel for parcel in parcels if not parcel.is_done]
        self._num_far += 1
        try:
            while self._awaited:
                if self._awaited[-1].is_done:
                    self._awaited.pop()
                else:
                    yield
        finally:
            self._num_far -= 1
            self._awaited = []

    def _meet(self, call: Call | None = None) -> Steps:
        self.local._come(call)
        self._num_near += 1
        try:
            yield from self.local._await_all(call)
        finally:
            self._num_near -= 1

    def _near(self, steps: Steps) -> Steps:
        """Steps that wait for ranks of this host."""
        self._num_near += 1
        try:
            yield from steps
        finally:
            self._num_near -= 1

    # -- how it begins -------------------------------------------------------------------------------------------

    def _agree(self, call: Call, flow: Flow) -> Generator[None, None, Sequence[Tensor]]:
        """Meet with all ranks, and compare what was called; do all of it that can be done at once.

        Returns:
            The memory that holds what the ranks of this host give of the first block.
        Raises:
            CollectiveMismatchError: on all ranks.
        """
        self._number += 1
        self._is_beginning = True
        parts = self.local._next_buffer(flow.dtype, flow.numel)
        flow.give(0, parts[self._site.me])
        mismatch = None
        try:
            yield from self._meet(call)
        except CollectiveMismatchError as error:
            mismatch = error
        room = self._room(flow)
        if mismatch is not None and not self._is_head:  # the head tells the others first
            self._is_beginning = False
            raise mismatch
        layout, memory = self.local.arena.layout, self.local.arena.memory
        self._verdict_at = layout.start(0) + layout.stream + self.local._buffer * layout.buffer_bytes
        self._is_judging = True
        try:
            if self._is_head:
                memory[self._verdict_at] = _WAITING
                memory[self._verdict_at + 1] = 0
                yield from self._judge(call, flow, mismatch, parts, room)
                self._is_judging = self._is_beginning = False
            yield from self._meet()
        finally:
            self._is_judging = self._is_beginning = False
        if memory[self._verdict_at] != _AGREED:
            raise CollectiveMismatchError(self._read_verdict())
        if flow.site.at_once:
            flow.near(0, parts)
            if flow.comes_here:
                flow.take(0, [room])
        return parts

    def _room(self, flow: Flow) -> Tensor:
        """In the head's part of the next buffer, behind the verdict."""
        head, *_ = self.local._next_buffer(torch.uint8)
        key = self.local._buffer, flow.dtype, flow.numel
        room = self._rooms.get(key)
        if room is None:
            if len(self._rooms) >= _MOST_REMEMBERED:
                self._rooms.clear()
            room = self._rooms[key] = head[_VERDICT_BYTES:].view(flow.dtype)[: flow.numel]
        return room

    def _judge(
        self, call: Call, flow: Flow, mismatch: CollectiveMismatchError | None, parts: Sequence[Tensor], room: Tensor
    ) -> Steps:
        """On a head: tell the others what was called here, and write down for this host how that compares.

        Args:
            mismatch: what is wrong on this host already.
            room: for that, and for what has come with the calls.
        """
        common, text = self._spell(call) if mismatch is None else (b"", _padded(b"\0" + str(mismatch).encode()))
        sends = flow.pack(0, parts) if flow.site.at_once and mismatch is None else {}
        sent, came = [], {}
        self._called = set()
        for host in self._site.others:
            head = self._site.hosts[host][0]
            frame = b"".join((text, memory_of(sends[host]) or b"")) if host in sends else text
            came[host] = self._wire.expect(head, self._number, 0)
            sent.append(self._wire.send(head, self._number, 0, memoryview(frame), len(text)))
        for host, parcel in came.items():
            yield from self._await([parcel])
            self._called.add(host)
            self._write_verdict(_WAITING, "")
        yield from self._await(sent)
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

    def _spell(self, call: Call) -> tuple[bytes, bytes]:
        spelled = self._spelled.get(call)
        if spelled is None:
            if len(self._spelled) >= _MOST_REMEMBERED:
                self._spelled.clear()
            common = f"{call.kind}|{call.dtype}|{call.numel}|{call.detail}".encode()
            if len(common) > _CALL_BYTES // 2:  # it may list a size for each rank
                common = common[: _CALL_BYTES // 4] + hashlib.blake2b(common, digest_size=16).hexdigest().encode()
            common += b"\0"
            spelled = self._spelled[call] = common, _padded(common + str(call).encode())
        return spelled

    def _compare(self, call: Call, peer: int, theirs: bytes) -> str:
        """What is wrong, where ``peer`` has called something else, or knows already that something is wrong."""
        head, what = (text.decode(errors="replace") for text in theirs.split(b"\0")[:2])
        if not head:
            return what
        return (
            f"rank {self._ranks[self.rank]} called {call}, but rank {self._ranks[peer]} called {what}. All ranks must "
            "call the same collectives in the same order, with tensors of the same size and dtype."
        )

    def _write_verdict(self, verdict: int, text: str) -> None:
        memory, start = self.local.arena.memory, self._verdict_at + 1
        encoded = text.encode()[: _VERDICT_BYTES - 2] + b"\0"
        memory[start : start + len(encoded)] = encoded
        memory[self._verdict_at] = verdict

    def _read_verdict(self) -> str:
        memory = self.local.arena.memory[self._verdict_at + 1 : self._verdict_at + _VERDICT_BYTES]
        return bytes(memory).split(b"\0")[0].decode(errors="replace")

    # -- who is missing ------------------------------------------------------------------------------------------

    def check_peers(self, awaited: Sequence[int]) -> None:
        near = [self._members.index(peer) for peer in awaited if peer in self._members]
        # While heads wait for others, their hosts wait for them.
        self.local.check_peers([*near, *self.local.absent()] if self._is_judging else near)
        # Before the heads have spoken, everybody is needed, though not everybody is known to be missing.
        for peer in self._far if self._is_beginning else awaited:
            gone = self._post.gone.get(peer)
            if gone is not None and self._is_in_vain(gone):
                raise self._peer_error(gone)
        self._is_late = True

    def absent(self) -> list[int]:
        if self._is_judging and self._is_head:
            return self._absent_elsewhere()
        if self._is_judging:
            told = self._read_verdict() if self.local.arena.memory[self._verdict_at] == _WAITING else ""
            return [int(rank) for rank in told.split(",") if rank.isdigit()] or [self._members[0]]
        if self._awaited:
            return [parcel.peer for parcel in self._awaited if not parcel.is_done]
        return [self._members[place] for place in self.local.absent()]

    def _absent_elsewhere(self) -> list[int]:
        """On a head that waits for others: which ranks have not come, as far as their hosts have told."""
        absent: list[int] = []
        for host in self._site.others:
            if host not in self._called:
                number, told = self._told_absent.get(host, (0, []))
                absent += told if number == self._number else self._site.hosts[host]
        return absent

    def _tell_absent(self) -> None:
        """On a head that waits: tell the other heads, or this host, for whom."""
        if not self._is_head or not self._is_beginning:
            return
        if self._is_judging:
            self._write_verdict(_WAITING, ",".join(map(str, self._absent_elsewhere())))
            return
        mine = self._number, self.absent()
        if mine[1] and mine != self._own_absent:
            self._own_absent = mine
            for host in self._site.others:
                self._wire.note(self._site.hosts[host][0], *mine)

    def _hear_of_absent(self, source: int, number: int, ranks: list[int]) -> None:
        self._told_absent[self._site.host_of(source)] = number, ranks

    def _is_in_vain(self, gone: Gone) -> bool:
        """Whether to wait for a rank that is gone, or for what it had sent before."""
        if time.monotonic() - gone.since < _GRACE_S:
            return False
        return gone.has_failed or bool(gone.words) or not self._post.may_come(gone.rank)

    def _peer_error(self, gone: Gone) -> PeerError:
        me, name = f"rank {self._ranks[self.rank]}", f"rank {self._ranks[gone.rank]}"
        if gone.has_failed or gone.words:
            return PeerError(f"{me}: {name} failed, and takes part in this group no more:\n{gone.words}")
        if gone.has_spoken:
            return PeerError(
                f"{me}: {name} has left the group. All ranks must call collectives equally often before they end."
            )
        members = self._site.hosts[self._site.host_of(gone.rank)]
        others = [self._ranks[member] for member in members if member != gone.rank]
        where = f"on the host of {name_ranks(others)}" if others else "on another host"
        return PeerError(
            f"{me}: {name}, {where}, has ended without a word or cannot be reached any more ({gone.sign}). Its own "
            "output may say why. If it still runs, set GLOO_SOCKET_IFNAME to the interface that leads to other hosts."
        )


def _padded(text: bytes) -> bytes:
    """No longer than a call may be; what follows it is aligned."""
    text = text[:_CALL_BYTES]
    return text.ljust(-(-len(text) // 64) * 64, b"\0")


def _refuse(share: Tensor) -> dist.Work:
    raise AssertionError(f"this rank has no lane, and so no share, but one of {share.numel()} elements")
