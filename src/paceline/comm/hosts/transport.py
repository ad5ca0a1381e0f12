"""The backend ``hier``: collectives among ranks of several hosts.

Ranks of one host share memory; between hosts, each byte crosses the wire once. A collective begins in ``meetings``,
where what is small is done at once; ``flows`` say what becomes of the blocks of the rest, and ``pipeline`` keeps them
going.

The invariant: whatever a rank waits for, near or far, it is told who has gone, and why.
"""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.explain import peer_failed, peer_left
from paceline.comm.hosts.across import Across
from paceline.comm.hosts.flows import AllGather, Broadcast, Flow, Reduce, ReduceScatter, Site, Sizes
from paceline.comm.hosts.frames import memory_of
from paceline.comm.hosts.meetings import VERDICT_BYTES, Meetings
from paceline.comm.hosts.pipeline import Pipeline
from paceline.comm.hosts.post import Gone, Post
from paceline.comm.hosts.rooms import Rooms
from paceline.comm.hosts.waits import Waits
from paceline.comm.hosts.wire import Wire
from paceline.comm.memory.inbox import DTYPES
from paceline.comm.memory.transport import SharedMemory
from paceline.comm.transport import Call, Reduction, Steps, Transport
from paceline.errors import PeerError
from paceline.rendezvous.peers import name_ranks

_COLLECTIVES, _MESSAGES = range(2)  # channels

# Blocks of this size keep a wire of 1 Gbit/s as busy as larger ones do; so do half as large ones, but not one of 10.
BUFFER_BYTES = 1 << 20
_SMALL_BYTES = 1 << 17  # sent to all other hosts together with the call
_GRACE_S = 0.2  # in which a rank's last words, and what it had sent before, should come


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
        self._small_bytes = min(_SMALL_BYTES // (len(hosts) - 1), block_bytes - VERDICT_BYTES)
        self._is_lane = local.rank < self.num_lanes
        self._post = post
        self._wire = Wire(post, _COLLECTIVES)
        self._waits = Waits(local, self._wire, post)
        self._meetings = Meetings(local, self._wire, self._waits, self._site, rank, ranks)
        self._across: Across | None = None
        self._memory = Rooms()
        self._pipeline = Pipeline(local, self._wire, self._waits, self._meetings, self._site, self._memory)
        self._is_late = False
        local.messages.inbox.also_from(ranks)  # counted on from those of this host
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
        return self._pipeline.run(call, Reduce(site, self._memory, tensor, reduction, numel, self.size, root))

    def broadcast(self, call: Call, tensor: Tensor, root: int) -> Steps:
        site, numel = self._route(tensor.nbytes), self._block_numel(tensor.dtype)
        return self._pipeline.run(call, Broadcast(site, self._memory, tensor, numel, root))

    def all_gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor) -> Steps:
        site = self._route(sum(output.nbytes for output in outputs))
        return self._pipeline.run(call, AllGather(site, self._memory, outputs, mine, self._block_numel(mine.dtype)))

    def reduce_scatter(self, call: Call, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> Steps:
        site = self._route(sum(piece.nbytes for piece in inputs))
        return self._pipeline.run(
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
        return self._pipeline.run(call, Flow(self._at_once, self._memory))

    def _route(self, num_bytes: int) -> Site:
        return self._at_once if num_bytes <= self._small_bytes else self._site

    def _block_numel(self, dtype: torch.dtype) -> int:
        return self._block_bytes // dtype.itemsize

    def _exchange(self, call: Call, takes: Sequence[Tensor], gives: Sequence[Tensor]) -> Steps:
        sizes = Sizes(self._at_once, self._memory, call, gives, takes, self._ranks)
        return self._pipeline.exchange(call, sizes, takes, gives)

    # -- messages ------------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, to: int, tag: int) -> Steps:
        if to in self._members:
            yield from self.local.send(tensor, self._members.index(to), tag)
            return
        parcel = self._post.send(_MESSAGES, to, tag, memory_of(tensor), DTYPES.index(tensor.dtype))
        self._waits.num_far += 1
        try:
            while not parcel.is_done:
                yield
        finally:
            self._waits.num_far -= 1
            self._post.withdraw(_MESSAGES, parcel)

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> Generator[None, None, int]:
        """Messages from far are put where those of this host are, and found there."""
        is_far = source is not None and source not in self._members
        place = None if source is None else self.local.size + source if is_far else self._members.index(source)
        steps = self.local.receive(tensor, place, tag)
        waits = self._waits
        waits.num_far, waits.num_near = waits.num_far + is_far, waits.num_near + (not is_far)
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
            waits.num_far, waits.num_near = waits.num_far - is_far, waits.num_near - (not is_far)

    def _place_message(self, source: int, tag: int, num_bytes: int, extra: int) -> memoryview | None:
        """Where a message goes; while nobody waits for any, the sender must wait."""
        inbox = self.local.messages.inbox
        if not inbox.is_awaited:
            return None
        message = inbox.begin(self.local.size + source, tag, num_bytes, DTYPES[extra])
        return memory_of(message.memory) or memoryview(b"")

    def _message_arrived(self, source: int, _: int) -> None:
        self.local.messages.inbox.end(self.local.size + source)

    # -- waiting -------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        has_any = self.local.poll()
        has_any = self._post.poll() or has_any
        if self._is_late:
            self._is_late = False
            self._meetings.tell_absent()
        return has_any

    def is_settled(self) -> bool:
        return self.local.is_settled() and self._post.is_quiet()

    def pause(self, timeout_s: float) -> bool:
        return self._waits.pause(timeout_s)

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

    # -- who is missing ------------------------------------------------------------------------------------------

    def check_peers(self, awaited: Sequence[int]) -> None:
        near = [self._members.index(peer) for peer in awaited if peer in self._members]
        # While heads wait for others, their hosts wait for them.
        self.local.check_peers([*near, *self.local.absent()] if self._meetings.is_judging else near)
        # Before the heads have spoken, everybody is needed, though not everybody is known to be missing.
        for peer in self._far if self._meetings.is_beginning else awaited:
            gone = self._post.gone.get(peer)
            if gone is not None and self._is_in_vain(gone):
                raise self._peer_error(gone)
        self._is_late = True

    def absent(self) -> list[int]:
        return self._meetings.absent()

    def _is_in_vain(self, gone: Gone) -> bool:
        """Whether to wait for a rank that is gone, or for what it had sent before."""
        if time.monotonic() - gone.since < _GRACE_S:
            return False
        return gone.has_failed or bool(gone.words) or not self._post.may_come(gone.rank)

    def _peer_error(self, gone: Gone) -> PeerError:
        me, name = self._ranks[self.rank], f"rank {self._ranks[gone.rank]}"
        if gone.has_failed or gone.words:
            return peer_failed(me, name, gone.words)
        if gone.has_spoken:
            return peer_left(me, name)
        members = self._site.hosts[self._site.host_of(gone.rank)]
        others = [self._ranks[member] for member in members if member != gone.rank]
        where = f"on the host of {name_ranks(others)}" if others else "on another host"
        return PeerError(
            f"rank {me}: {name}, {where}, has ended without a word or cannot be reached any more ({gone.sign}). Its "
            "own output may say why. If it still runs, set GLOO_SOCKET_IFNAME to the interface that leads to other "
            "hosts."
        )


def _refuse(share: Tensor) -> dist.Work:
    raise AssertionError(f"this rank has no lane, and so no share, but one of {share.numel()} elements")
