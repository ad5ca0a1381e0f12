"""The backend ``hier``: collectives among ranks of several hosts.

Ranks of one host share memory; between hosts, each byte crosses the wire once. ``flows`` says what becomes of the blocks
of a tensor, here they are kept going: several are on the wire while others pass through memory, so that the wire never
waits for the memory.

Every collective begins in the same way. The ranks of each host meet, and compare their calls; the first rank of each
host, its *head*, tells the other heads what was called, and its host what it has heard. What is small is sent with that.

[Note: the last meeting] Nobody may leave a collective, and then the group, while others of his host still need him, or
need to be told by him of a failure elsewhere. So a collective ends with a meeting, after everything has been sent.

The invariant: as in shared memory, all ranks see a mismatch, none has written to a result, and the group goes on.
"""

import hashlib
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.across import Across
from paceline.comm.flows import AllGather, Broadcast, Flow, Reduce, ReduceScatter, Sends, Site, Sizes
from paceline.comm.messages import _DTYPES
from paceline.comm.post import Gone, Parcel, Post, memory_of
from paceline.comm.shm import SharedMemory
from paceline.comm.transport import Call, Reduction, Steps, Transport
from paceline.errors import CollectiveMismatchError, PeerError
from paceline.rendezvous.peers import name_ranks

_COLLECTIVES, _MESSAGES = range(2)  # channels
_ABSENCE = -1  # the key of frames that tell whom a host waits for

_SMALL_BYTES = 1 << 14  # what is sent with the call
_VERDICT_BYTES = 4096  # of a buffer, before what is small
_CALL_BYTES = 1024
_AGREED, _DIFFERENT, _WAITING = range(3)
# Blocks of this size keep a wire of 1 Gbit/s as busy as larger ones do; so do half as large ones, but not one of 10.
BUFFER_BYTES = 1 << 20
_DEPTH = 6  # blocks on the wire
_GRACE_S = 0.2  # in which a rank's last words, and what it had sent before, should come
_SHORTEST_NAP_S, _LONGEST_NAP_S = 5e-4, 5e-3


class Hierarchical(Transport):
    """See ``Transport``.

    Args:
        local: among the ranks of this host.
        hosts: of each host, its ranks in the group.
        ranks: the global rank of each rank in the group, for errors.

    Attributes:
        num_lanes: how many ranks of each host talk to those of the other hosts: the first ones.
    """

    name = "hier"

    def __init__(
        self, local: SharedMemory, post: Post, hosts: Sequence[Sequence[int]], rank: int, ranks: Sequence[int]
    ) -> None:
        super().__init__(rank, len(ranks))
        self.local = local
        self.num_local = local.size
        self.num_lanes = min(map(len, hosts))
        self._ranks = ranks
        self._post = post
        host = next(index for index, members in enumerate(hosts) if rank in members)
        self._site = Site(tuple(map(tuple, hosts)), host, local.rank, self.num_lanes)
        self._at_once = replace(self._site, num_lanes=1, at_once=True)
        self._members = self._site.hosts[host]
        self._far = [peer for peer in range(self.size) if peer not in self._members]
        self._is_head = local.rank == 0
        self._number = 0  # of the collective
        self._expected: dict[tuple[int, int], Parcel] = {}  # by source and key
        self._num_near = self._num_far = 0  # who waits for ranks of this host, and who for others alone
        self._awaited: list[Parcel] = []  # of the collective
        self._is_beginning = False  # whether not all hosts are known to have come to the collective
        self._is_judging = False  # whether this rank waits until they are
        self._verdict_at = 0  # where in memory a head writes what it has heard
        self._called: set[int] = set()  # the hosts whose heads have told what they have called
        self._told_absent: dict[int, tuple[int, memoryview]] = {}  # by host, with the collective's number
        self._own_absent: tuple[int, list[int]] = (0, [])  # what this head has told
        self._is_late = False
        self._across: Across | None = None
        local._messages._ranks = [*local.ranks, *ranks]  # messages from far count on from those of this host
        post.open(_COLLECTIVES, self._place, self._arrived)
        post.open(_MESSAGES, self._place_message, self._message_arrived)
        if local.rank < self.num_lanes:
            for other in self._site.others:
                post.connect(_COLLECTIVES, hosts[other][local.rank])

    # -- collectives ---------------------------------------------------------------------------------------------

    def all_reduce(self, call: Call, tensor: Tensor, reduction: Reduction) -> Steps:
        return self._reduce(call, tensor, reduction, None)

    def reduce(self, call: Call, tensor: Tensor, reduction: Reduction, root: int) -> Steps:
        return self._reduce(call, tensor, reduction, root)

    def _reduce(self, call: Call, tensor: Tensor, reduction: Reduction, root: int | None) -> Steps:
        site, numel = self._route(tensor.nbytes), self._block_numel(tensor.dtype)
        return self._run(call, Reduce(site, tensor, reduction, numel, self.size, root))

    def broadcast(self, call: Call, tensor: Tensor, root: int) -> Steps:
        site, numel = self._route(tensor.nbytes), self._block_numel(tensor.dtype)
        return self._run(call, Broadcast(site, tensor, numel, root))

    def all_gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor) -> Steps:
        site = self._route(sum(output.nbytes for output in outputs))
        return self._run(call, AllGather(site, outputs, mine, self._block_numel(mine.dtype)))

    def reduce_scatter(self, call: Call, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> Steps:
        site = self._route(sum(piece.nbytes for piece in inputs))
        return self._run(call, ReduceScatter(site, output, inputs, reduction, self._block_numel(output.dtype)))

    def gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor, root: int) -> Steps:
        gives = [mine if peer == root else mine[:0] for peer in range(self.size)]
        return self._exchange(call, outputs or [mine[:0]] * self.size, gives)

    def scatter(self, call: Call, output: Tensor, inputs: Sequence[Tensor], root: int) -> Steps:
        takes = [output if peer == root else output[:0] for peer in range(self.size)]
        return self._exchange(call, takes, inputs or [output[:0]] * self.size)

    def all_to_all(self, call: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Steps:
        return self._exchange(call, outputs, inputs)

    def barrier(self, call: Call) -> Steps:
        return self._run(call, Flow(self._route(0)))

    # -- messages ------------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, to: int, tag: int) -> Steps:
        if to in self._members:
            yield from self.local.send(tensor, self._members.index(to), tag)
            return
        parcel = self._post.send(_MESSAGES, to, tag, memory_of(tensor), _DTYPES.index(tensor.dtype))
        try:
            self._num_far += 1
            while not parcel.is_done:
                yield
        finally:
            self._num_far -= 1
            self._post.withdraw(_MESSAGES, parcel)

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> Generator[None, None, int]:
        is_far = source is not None and source not in self._members
        code = None if source is None else self.local.size + source if is_far else self._members.index(source)
        steps = self.local.receive(tensor, code, tag)
        self._count(is_far, 1)
        try:
            next(steps)  # and with that, it can be found
            self._post.resume(_MESSAGES)
            while True:
                next(steps)
                yield
        except StopIteration as end:
            index = int(end.value)
            return self._members[index] if index < self.local.size else index - self.local.size
        finally:
            steps.close()
            self._count(is_far, -1)

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
        if self._num_far or self._expected or self._post.num_unsent:  # one cannot sleep on both
            quiet_s = time.monotonic() - self._post.last_news
            timeout_s = min(timeout_s, max(_SHORTEST_NAP_S, min(quiet_s / 4, _LONGEST_NAP_S)))
        return self.local.pause(timeout_s)

    def heard(self) -> None:
        self.local.heard()

    def nudge(self) -> None:
        self.local.nudge()

    def check_peers(self, awaited: Sequence[int]) -> None:
        near = [self._members.index(peer) for peer in awaited if peer in self._members]
        # While the heads compare calls, their hosts wait for them, though others are late.
        self.local.check_peers([*near, *self.local.absent()] if self._is_judging else near)
        # Before the heads have spoken, everybody is awaited, though not everybody is known to be missing.
        for peer in self._far if self._is_beginning else awaited:
            gone = self._post.gone.get(peer)
            if gone is not None and self._is_in_vain(gone):
                raise self._peer_error(peer, gone)
        self._is_late = True

    def absent(self) -> list[int]:
        if not self._is_judging:
            if self._awaited:
                return [parcel.peer for parcel in self._awaited if not parcel.is_done]
            return [self._members[index] for index in self.local.absent()]
        if self._is_head:
            return self._absent_elsewhere()
        text = bytes(self.local.arena.memory[self._verdict_at : self._verdict_at + _VERDICT_BYTES])
        told = text[1:].split(b"\0")[0].decode(errors="replace").split(",") if text[0] == _WAITING else []
        return [int(rank) for rank in told if rank.isdigit()] or [self._members[0]]

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
            self._across = None

    # -- for averages --------------------------------------------------------------------------------------------

    def open_across(self, store: dist.Store, timeout_s: float) -> Callable[[Tensor], dist.Work]:
        """What starts sums over the hosts on this rank's lane. A collective call, once for a group.

        Args:
            store: of this group alone.
        """
        if self._site.me >= self.num_lanes:
            return _refuse
        if self._across is None:
            mates = [self._site.hosts[host][self._site.me] for host in self._site.others]

            def find_gone() -> PeerError | None:
                told = [(mate, self._post.gone[mate]) for mate in mates if mate in self._post.gone]
                return next((self._peer_error(mate, gone) for mate, gone in told if self._is_in_vain(gone)), None)

            names = name_ranks([self._ranks[mate] for mate in mates])
            store = dist.PrefixStore(f"lane {self._site.me}/", store)
            self._across = Across(store, self._site.host, len(self._site.hosts), timeout_s, find_gone, names)
        return self._across

    # -- how a collective runs -----------------------------------------------------------------------------------

    def _route(self, num_bytes: int) -> Site:
        return self._at_once if num_bytes <= _SMALL_BYTES else self._site

    def _block_numel(self, dtype: torch.dtype) -> int:
        return self.local.arena.layout.buffer_bytes // dtype.itemsize

    def _run(self, call: Call, flow: Flow) -> Steps:
        parts = yield from self._agree(call, flow)
        if flow.site.at_once:
            return
        is_lane = self._site.me < self.num_lanes
        sent: dict[int, list[Parcel]] = {}
        came: dict[int, dict[int, Parcel]] = {}
        turned: dict[int, dict[int, Parcel]] = {}
        for step in range(flow.num_blocks + _DEPTH):
            if step < flow.num_blocks:
                if step and flow.starts_here:
                    parts = self._next_parts(flow.dtype)
                    flow.give(step, parts[self._site.me])
                    yield from self._near(self.local._meet(None))
                if flow.starts_here:
                    flow.near(step, parts)
                if is_lane:
                    came[step] = self._expect_all(step, flow.expects(step), flow.dtype)
                    sends = flow.pack(step, parts) if flow.starts_here else {}
                    sent[step] = self._send_all(step, sends)
            turning = step - _DEPTH // 2
            if flow.turns and is_lane and 0 <= turning < flow.num_blocks:
                yield from self._await(came[turning].values())
                turned[turning] = self._expect_all(turning, flow.expects_in_turn(turning), flow.dtype)
                sends = flow.turn(turning, _opened(came[turning], flow.dtype))
                sent[turning] += self._send_all(turning, sends)
            last = step - _DEPTH
            if last < 0 or last >= flow.num_blocks:
                continue
            arrived, in_turn = came.pop(last, {}), turned.pop(last, {})
            yield from self._await([*arrived.values(), *in_turn.values()])
            yield from self._await(sent.pop(last, []))
            if flow.comes_here:
                parts = self._next_parts(flow.dtype)
                if is_lane:
                    opened = _opened(arrived, flow.dtype), _opened(in_turn, flow.dtype)
                    flow.unpack(last, *opened, parts[self._site.me])
                yield from self._near(self.local._meet(None))
                flow.take(last, parts)
        if not flow.comes_here:  # [Note: the last meeting]
            self._next_parts(flow.dtype)
            yield from self._near(self.local._meet(None))

    def _agree(self, call: Call, flow: Flow) -> Generator[None, None, Sequence[Tensor]]:
        """Meet with all ranks, and compare what was called; do what can be done at once.

        Returns:
            The memory that holds what the ranks of this host give of the first block.
        Raises:
            CollectiveMismatchError: on all ranks.
        """
        self._number += 1
        self._is_beginning = True
        parts = self._next_parts(flow.dtype)
        flow.give(0, parts[self._site.me])
        mismatch = None
        try:
            yield from self._near(self.local._meet(call))
        except CollectiveMismatchError as error:
            mismatch = error
        rooms = self._next_parts(torch.uint8)
        if mismatch and not self._is_head:  # the head tells the others first
            self._is_beginning = False
            raise mismatch
        layout, memory = self.local.arena.layout, self.local.arena.memory
        self._verdict_at = layout.start(0) + layout.stream + self.local._buffer * layout.buffer_bytes
        self._is_judging = True
        try:
            if self._is_head:
                memory[self._verdict_at] = _WAITING
                memory[self._verdict_at + 1] = 0
                yield from self._judge(call, flow, mismatch, parts, rooms[0])
                self._is_judging = self._is_beginning = False
            yield from self._near(self.local._meet(None))
        finally:
            self._is_judging = self._is_beginning = False
        if memory[self._verdict_at] != _AGREED:
            text = bytes(memory[self._verdict_at + 1 : self._verdict_at + _VERDICT_BYTES])
            raise CollectiveMismatchError(text.split(b"\0")[0].decode(errors="replace"))
        if flow.site.at_once:
            flow.near(0, parts)
            if flow.comes_here:
                flow.take(0, [rooms[0][_VERDICT_BYTES:].view(flow.dtype)])
        return parts

    def _judge(
        self, call: Call, flow: Flow, mismatch: CollectiveMismatchError | None, parts: Sequence[Tensor], room: Tensor
    ) -> Steps:
        """On a head: tell the others what was called here, and write for this host how it compares."""
        common = _common(call)
        text = (b"\0" + str(mismatch).encode() if mismatch else common + str(call).encode())[:_CALL_BYTES]
        text = text.ljust(-(-len(text) // 64) * 64, b"\0")  # what follows is aligned
        sends = flow.pack(0, parts) if flow.site.at_once and mismatch is None else {}
        sent, came = [], {}
        self._called = set()
        for host in self._site.others:
            head = self._site.hosts[host][0]
            frame = b"".join((text, memory_of(sends[host]) or b"")) if host in sends else text
            came[host] = self._expect(head, self._key(0), None)
            sent.append(self._post.send(_COLLECTIVES, head, self._key(0), memoryview(frame), len(text)))
        for host, parcel in came.items():
            yield from self._await([parcel])
            self._called.add(host)
            self.local.arena.memory[self._verdict_at + 1] = 0
        yield from self._await(sent)
        if mismatch:
            raise mismatch
        verdict, arrived = "", {}
        for host, parcel in came.items():
            assert parcel.memory is not None
            theirs = bytes(parcel.memory[: parcel.extra])
            if theirs.startswith(common):
                if len(parcel.memory) > parcel.extra:
                    arrived[host] = torch.frombuffer(parcel.memory, dtype=torch.uint8)[parcel.extra :].view(flow.dtype)
                continue
            what = theirs.split(b"\0")[1].decode(errors="replace")
            me, other = self._ranks[self.rank], self._ranks[parcel.peer]
            verdict = verdict or (
                what
                if theirs[0] == 0
                else f"rank {me} called {call}, but rank {other} called {what}. All ranks must call the same collectives "
                "in the same order, with tensors of the same size and dtype."
            )
        if not verdict and flow.site.at_once and flow.comes_here:
            try:
                flow.unpack(0, arrived, {}, room[_VERDICT_BYTES:].view(flow.dtype))
            except CollectiveMismatchError as error:
                verdict = str(error)
        encoded = verdict.encode()[: _VERDICT_BYTES - 2] + b"\0"
        memory = self.local.arena.memory
        memory[self._verdict_at + 1 : self._verdict_at + 1 + len(encoded)] = encoded
        memory[self._verdict_at] = _DIFFERENT if verdict else _AGREED

    def _exchange(self, call: Call, takes: Sequence[Tensor], gives: Sequence[Tensor]) -> Steps:
        """From each rank to each, straight from its memory: between hosts there is nothing to be saved."""
        yield from self._agree(call, Sizes(self._at_once, call.kind, gives, takes, self._ranks))
        came = [self._expect(peer, self._key(1), memory_of(takes[peer])) for peer in self._far if takes[peer].numel()]
        sent = [
            self._post.send(_COLLECTIVES, peer, self._key(1), memory_of(gives[peer]))
            for peer in self._far
            if gives[peer].numel()
        ]
        near = [[tensors[peer] for peer in self._members] for tensors in (takes, gives)]
        yield from self._near(self.local.all_to_all(call, *near))
        yield from self._await(came)
        yield from self._await(sent)
        self._next_parts(torch.uint8)  # [Note: the last meeting]
        yield from self._near(self.local._meet(None))

    # -- between hosts -------------------------------------------------------------------------------------------

    def _key(self, index: int) -> int:
        """The name of a frame of this collective."""
        return self._number << 32 | index

    def _send_all(self, block: int, sends: Sends) -> list[Parcel]:
        me = self._site.me
        return [
            self._post.send(_COLLECTIVES, self._site.hosts[host][me], self._key(1 + block), memory_of(tensor))
            for host, tensor in sends.items()
            if tensor.numel()
        ]

    def _expect_all(self, block: int, numels: dict[int, int], dtype: torch.dtype) -> dict[int, Parcel]:
        me = self._site.me
        return {
            host: self._expect(
                self._site.hosts[host][me], self._key(1 + block), memory_of(torch.empty(numel, dtype=dtype))
            )
            for host, numel in numels.items()
            if numel
        }

    def _expect(self, source: int, key: int, memory: memoryview | None) -> Parcel:
        """A frame to come; without ``memory``, of any size."""
        parcel = Parcel(source, memory)
        self._expected[source, key] = parcel
        self._post.resume(_COLLECTIVES, source)
        return parcel

    def _place(self, source: int, key: int, num_bytes: int, extra: int) -> memoryview | None:
        if key == _ABSENCE:
            memory = memoryview(bytearray(num_bytes))
            self._told_absent[self._site.host_of(source)] = extra, memory.cast("q")
            return memory
        parcel = self._expected.get((source, key))
        if parcel is None:
            return None
        if parcel.memory is None:
            parcel.memory, parcel.extra = memoryview(bytearray(num_bytes)), extra
        assert len(parcel.memory) == num_bytes
        return parcel.memory

    def _arrived(self, source: int, key: int) -> None:
        if key != _ABSENCE:
            self._expected.pop((source, key)).is_done = True

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

    def _is_in_vain(self, gone: Gone) -> bool:
        """Whether to wait for a rank that is gone, or for what it had sent before."""
        if time.monotonic() - gone.since < _GRACE_S:
            return False
        return gone.has_failed or bool(gone.words) or not self._post.may_come(gone.rank)

    def _peer_error(self, peer: int, gone: Gone) -> PeerError:
        members = self._site.hosts[self._site.host_of(peer)]
        me, name = f"rank {self._ranks[self.rank]}", f"rank {self._ranks[peer]}"
        if gone.has_failed or gone.words:
            return PeerError(f"{me}: {name} failed, and takes part in this group no more:\n{gone.words}")
        if gone.has_spoken:
            return PeerError(
                f"{me}: {name} has left the group. All ranks must call collectives equally often before they end."
            )
        others = [self._ranks[member] for member in members if member != peer]
        where = f"on the host of {name_ranks(others)}" if others else "on another host"
        return PeerError(
            f"{me}: {name}, {where}, has ended without a word or cannot be reached any more ({gone.sign}). Its own output "
            "may say why. If it runs still, set GLOO_SOCKET_IFNAME to the interface that leads to the other hosts."
        )

    # -- between two ranks ---------------------------------------------------------------------------------------

    def _place_message(self, source: int, tag: int, num_bytes: int, extra: int) -> memoryview | None:
        """Where a message goes; while nobody waits for any, the sender must."""
        messages = self.local._messages
        if not messages._requests:
            return None
        message = messages._begin(self.local.size + source, tag, num_bytes, _DTYPES[extra])
        return memory_of(message.memory) or memoryview(b"")

    def _message_arrived(self, source: int, _: int) -> None:
        message = self.local._messages._arriving.pop(self.local.size + source)
        message.num_arrived = message.num_bytes

    # -- who waits for whom --------------------------------------------------------------------------------------

    def _near(self, steps: Steps) -> Steps:
        """Steps that wait for ranks of this host."""
        self._num_near += 1
        try:
            yield from steps
        finally:
            self._num_near -= 1

    def _count(self, is_far: bool, change: int) -> None:
        if is_far:
            self._num_far += change
        else:
            self._num_near += change

    def _next_parts(self, dtype: torch.dtype) -> list[Tensor]:
        return self.local._next_buffer(dtype)

    def _absent_elsewhere(self) -> list[int]:
        """On a head that waits for others: which ranks have not come, as far as their hosts have told."""
        absent: list[int] = []
        for host in self._site.others:
            if host not in self._called:
                number, ranks = self._told_absent.get(host, (0, memoryview(b"")))
                absent += ranks.tolist() if number == self._number and len(ranks) else self._site.hosts[host]
        return absent

    def _tell_absent(self) -> None:
        """On a head that waits: tell the other heads, or this host, for whom."""
        if not self._is_head or not self._is_beginning:
            return
        if self._is_judging:
            text = ",".join(map(str, self._absent_elsewhere())).encode()[: _VERDICT_BYTES - 2] + b"\0"
            self.local.arena.memory[self._verdict_at + 1 : self._verdict_at + 1 + len(text)] = text
            return
        mine = self._number, self.absent()
        if mine[1] and mine != self._own_absent:
            self._own_absent = mine
            for host in self._site.others:
                self._post.send(
                    _COLLECTIVES, self._site.hosts[host][0], _ABSENCE, memory_of(torch.tensor(mine[1])), self._number
                )


def _refuse(share: Tensor) -> dist.Work:
    raise AssertionError("this rank has no lane, and so no share")


def _common(call: Call) -> bytes:
    """What all ranks must have called alike."""
    text = f"{call.kind}|{call.dtype}|{call.numel}|{call.detail}".encode()
    if len(text) > _CALL_BYTES // 2:  # it may list a size for each rank
        text = text[: _CALL_BYTES // 4] + hashlib.blake2b(text, digest_size=16).hexdigest().encode()
    return text + b"\0"


def _opened(parcels: dict[int, Parcel], dtype: torch.dtype) -> Sends:
    """What has come, as tensors."""
    return {
        host: torch.frombuffer(parcel.memory, dtype=torch.uint8).view(dtype)
        for host, parcel in parcels.items()
        if parcel.memory is not None
    }
