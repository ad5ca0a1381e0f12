"""What becomes of each block of a tensor on its way between the ranks of several hosts.

Lane l joins the l-th rank of every host; a block is shared out among the lanes. All ranks of a host go together from
one station to the next, where they meet in shared memory; only those with a lane talk to other hosts:

    give, meet, near                   all ranks of a host: write what one has, read what the others here have
    pack            ~~ wire ~~>        each lane: reduce or pick its share of that, and send it
    [turn           ~~ wire ~~>]       each lane: reduce what came, and send that
    unpack, meet, take                 each lane: write what came; all: read it

The invariant: what is on the wire, and when, follows from the call alone, so no rank is told what it gets.
"""
# ruff: noqa: ARG002 - each station is given all that some collective needs there

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.comm.memory.transport import shares_of
from paceline.comm.reductions import reduce_into
from paceline.comm.transport import Reduction
from paceline.errors import CollectiveMismatchError

Sends = dict[int, Tensor]  # by host

_SUM = Reduction("sum")
_NARROW = (torch.float16, torch.bfloat16)
_MOST_ROOMS = 32


@dataclass(frozen=True)
class Site:
    """Where a rank stands.

    Attributes:
        hosts: of each host, its ranks in the group; in the order of their first ones.
        host: this rank's.
        me: this rank's place among those of its host.
        num_lanes: that carry the collective.
        at_once: whether it is small: it has one lane and one block, which is sent with the call itself.
    """

    hosts: tuple[tuple[int, ...], ...]
    host: int
    me: int
    num_lanes: int
    at_once: bool = False

    @property
    def others(self) -> list[int]:
        """The other hosts."""
        return [host for host in range(len(self.hosts)) if host != self.host]

    def host_of(self, rank: int) -> int:
        return next(host for host, ranks in enumerate(self.hosts) if rank in ranks)


class Rooms:
    """Memory for blocks, used again and again: fresh pages cost more than what is done in them."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}  # by size, as bytes
        self._num_free = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor, uninitialised."""
        num_bytes = numel * dtype.itemsize
        if self._free.get(num_bytes):
            self._num_free -= 1
            return self._free[num_bytes].pop().view(dtype)
        return torch.empty(numel, dtype=dtype)

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        """Nobody reads or writes these any more."""
        for tensor in tensors:
            if self._num_free >= _MOST_ROOMS:  # of sizes that do not come again, perhaps
                self._free.clear()
                self._num_free = 0
            self._free.setdefault(tensor.nbytes, []).append(tensor.view(torch.uint8))
            self._num_free += 1


class Flow:
    """A collective that moves nothing; those that do override some of this.

    Args:
        rooms: for what is to be sent.

    Attributes:
        num_blocks: of which there is always one.
        numel: of what is there in each part at once; None where that varies.
        comes_here: whether anything comes from other hosts, so that there is a second meeting for each block.
        starts_here: whether the ranks of this host give anything, so that there is a first one.
        turns: whether what has come to a lane makes it send something.
    """

    dtype = torch.uint8
    num_blocks = 1
    numel: int | None = None
    starts_here = True
    comes_here = True
    turns = False

    def __init__(self, site: Site, rooms: Rooms) -> None:
        self.site = site
        self.rooms = rooms

    def give(self, block: int, part: Tensor) -> None:
        """Write what this rank has into its part of the memory."""

    def near(self, block: int, parts: Sequence[Tensor]) -> None:
        """Read what is for this rank in those of its host."""

    def pack(self, block: int, parts: Sequence[Tensor]) -> Sends:
        """What this lane sends, and to which hosts; it must stay as it is until it is unpacked."""
        return {}

    def expects(self, block: int) -> dict[int, int]:
        """How many elements come from which hosts on this lane."""
        return {}

    def turn(self, block: int, arrived: Sends) -> Sends:
        """What this lane sends when ``expects`` has arrived."""
        return {}

    def expects_in_turn(self, block: int) -> dict[int, int]:
        """How many elements come for what others have sent in turn."""
        return {}

    def unpack(self, block: int, arrived: Sends, in_turn: Sends, part: Tensor) -> None:
        """Write what has arrived into this rank's part."""

    def take(self, block: int, parts: Sequence[Tensor]) -> None:
        """Read what the lanes have written."""


class Reduce(Flow):
    """``all_reduce``, and ``reduce`` to one rank.

    Two hosts tell each other what they have, and both reduce it. Among more of them each reduces a part of each lane's
    share for all, and then tells the result to those that want it.

    Args:
        root: its rank; None stands for all.
    """

    def __init__(
        self,
        site: Site,
        rooms: Rooms,
        tensor: Tensor,
        reduction: Reduction,
        block_numel: int,
        size: int,
        root: int | None,
    ) -> None:
        super().__init__(site, rooms)
        self.dtype = tensor.dtype
        self._blocks = _blocks_of(tensor, block_numel)
        self.num_blocks = len(self._blocks)
        self.numel = tensor.numel() if site.at_once else None
        self._reduction, self._size = reduction, size
        everybody = range(len(site.hosts))
        self._targets = list(everybody) if root is None else [site.host_of(root)]
        self._takes = root is None or root == site.hosts[site.host][site.me]
        self.comes_here = site.host in self._targets
        self.turns = len(site.hosts) > 2 and not site.at_once
        self._is_alone = len(site.hosts[site.host]) == 1  # so what it has needs no other memory
        is_scaled = reduction.name == "premul_sum" or (reduction.name == "avg" and tensor.dtype in _NARROW)
        self._sends_as_is = self._is_alone and not is_scaled and (self._takes or not self.turns)
        self._own: dict[int, Tensor] = {}

    def give(self, block: int, part: Tensor) -> None:
        """All but the share that this rank reduces itself."""
        mine = self._blocks[block]
        for lane, (first, last) in enumerate(_shares_of(mine.numel(), self.site.num_lanes)):
            if lane != self.site.me:
                _between(part, first, last).copy_(_between(mine, first, last))

    def pack(self, block: int, parts: Sequence[Tensor]) -> Sends:
        first, last = self._share(block, self.site.me)
        given = [self._blocks[block] if place == self.site.me else part for place, part in enumerate(parts)]
        if self._sends_as_is:
            own = given[0]
        else:
            own = self.rooms.take(last - first, self.dtype)
            sum_here(own, [_between(part, first, last) for part in given], self._reduction, self._size)
        self._own[block] = own
        if not self.turns:
            return {host: own for host in self._targets if host != self.site.host}
        return {host: own[slice(*self._part(block, host))] for host in self.site.others}

    def expects(self, block: int) -> dict[int, int]:
        if not self.turns:
            return self._from_others(self._length(block)) if self.comes_here else {}
        first, last = self._part(block, self.site.host)
        return self._from_others(last - first)

    def turn(self, block: int, arrived: Sends) -> Sends:
        own = self._own[block][slice(*self._part(block, self.site.host))]
        sum_hosts(own, self._in_order(own, arrived), self._reduction, self._size)
        return {host: own for host in self._targets if host != self.site.host}

    def expects_in_turn(self, block: int) -> dict[int, int]:
        if not self.comes_here:
            return {}
        parts = {host: self._part(block, host) for host in self.site.others}
        return {host: last - first for host, (first, last) in parts.items()}

    def unpack(self, block: int, arrived: Sends, in_turn: Sends, part: Tensor) -> None:
        own, (first, last) = self._own.pop(block), self._share(block, self.site.me)
        room = self._blocks[block] if self._is_alone else _between(part, first, last)
        if self.turns:
            for host, told in {**in_turn, self.site.host: own[slice(*self._part(block, self.site.host))]}.items():
                room[slice(*self._part(block, host))].copy_(told)
        else:
            sum_hosts(room, self._in_order(own, arrived), self._reduction, self._size)
        if not self._sends_as_is:
            self.rooms.give_back([own])

    def take(self, block: int, parts: Sequence[Tensor]) -> None:
        if self._takes and not self._is_alone:
            _take_shares(self._blocks[block], parts, self.site.num_lanes)

    def _share(self, block: int, lane: int) -> tuple[int, int]:
        return _shares_of(self._blocks[block].numel(), self.site.num_lanes)[lane]

    def _length(self, block: int) -> int:
        first, last = self._share(block, self.site.me)
        return last - first

    def _part(self, block: int, host: int) -> tuple[int, int]:
        """Of this lane's share, what ``host`` reduces."""
        return _shares_of(self._length(block), len(self.site.hosts))[host]

    def _from_others(self, numel: int) -> dict[int, int]:
        return dict.fromkeys(self.site.others, numel)

    def _in_order(self, own: Tensor, arrived: Sends) -> list[Tensor]:
        """By host; nothing has arrived where there is nothing."""
        return [own if host == self.site.host else arrived.get(host, own) for host in range(len(self.site.hosts))]


class Broadcast(Flow):
    """From host to host: each sends on what it gets while it gets it, so all are done hardly later than the first."""

    def __init__(self, site: Site, rooms: Rooms, tensor: Tensor, block_numel: int, root: int) -> None:
        super().__init__(site, rooms)
        self.dtype = tensor.dtype
        self._blocks = _blocks_of(tensor, block_numel)
        self.num_blocks = len(self._blocks)
        self.numel = tensor.numel() if site.at_once else None
        source, num_hosts = site.host_of(root), len(site.hosts)
        self.starts_here = site.host == source
        self.comes_here = not self.starts_here
        self._root = site.hosts[source].index(root)
        before, after = (site.host - 1) % num_hosts, (site.host + 1) % num_hosts
        self._before = source if site.at_once else before
        self._after = [host for host in (site.others if site.at_once else [after]) if host != source]
        self.turns = self.comes_here and bool(self._after)

    def give(self, block: int, part: Tensor) -> None:
        if self.starts_here and self.site.me == self._root:  # asked of all hosts for the first block
            mine = self._blocks[block]
            _between(part, 0, mine.numel()).copy_(mine)

    def near(self, block: int, parts: Sequence[Tensor]) -> None:
        if self.starts_here and self.site.me != self._root:
            mine = self._blocks[block]
            mine.copy_(_between(parts[self._root], 0, mine.numel()))

    def pack(self, block: int, parts: Sequence[Tensor]) -> Sends:
        if not self.starts_here:
            return {}
        first, last = self._share(block, self.site.me)
        return dict.fromkeys(self._after, parts[self._root][first:last].clone())

    def expects(self, block: int) -> dict[int, int]:
        first, last = self._share(block, self.site.me)
        return {self._before: last - first} if self.comes_here else {}

    def turn(self, block: int, arrived: Sends) -> Sends:
        return dict.fromkeys(self._after, arrived[self._before]) if arrived else {}

    def unpack(self, block: int, arrived: Sends, in_turn: Sends, part: Tensor) -> None:
        if arrived:
            first, last = self._share(block, self.site.me)
            part[first:last].copy_(arrived[self._before])

    def take(self, block: int, parts: Sequence[Tensor]) -> None:
        _take_shares(self._blocks[block], parts, self.site.num_lanes)

    def _share(self, block: int, lane: int) -> tuple[int, int]:
        return _shares_of(self._blocks[block].numel(), self.site.num_lanes)[lane]


class _Windows(Flow):
    """Of a list with a tensor for each rank, a block is a window of each.

    The windows of a host's ranks, one after another, are what its lanes share out.
    """

    def __init__(self, site: Site, rooms: Rooms, sizes: Sequence[int], dtype: torch.dtype, window: int) -> None:
        super().__init__(site, rooms)
        self.dtype = dtype
        self._sizes = sizes  # by rank
        self._window = max(1, max(sizes) if site.at_once else window)
        self.num_blocks = max(1, math.ceil(max(sizes) / self._window))

    def _range(self, block: int, rank: int) -> tuple[int, int]:
        """Which elements of ``rank``'s tensor are in the block."""
        first = min(block * self._window, self._sizes[rank])
        return first, min(first + self._window, self._sizes[rank])

    def _lengths(self, block: int, host: int) -> list[int]:
        ranges = [self._range(block, rank) for rank in self.site.hosts[host]]
        return [last - first for first, last in ranges]

    def _share(self, block: int, host: int, lane: int) -> tuple[int, int]:
        """Of all windows of ``host``, what the lane carries."""
        total, num_lanes = sum(self._lengths(block, host)), self.site.num_lanes
        return total * lane // num_lanes, total * (lane + 1) // num_lanes


class AllGather(_Windows):
    """Each lane tells all other hosts its share of what this host's ranks have."""

    def __init__(self, site: Site, rooms: Rooms, outputs: Sequence[Tensor], mine: Tensor, block_numel: int) -> None:
        # What comes from all other hosts must fit into a lane's part of the memory.
        window = min(block_numel, (block_numel - len(site.hosts)) * site.num_lanes // len(outputs))
        super().__init__(site, rooms, [output.numel() for output in outputs], mine.dtype, window)
        self._outputs = outputs
        self._mine = mine

    def give(self, block: int, part: Tensor) -> None:
        first, last = self._range(block, self.site.hosts[self.site.host][self.site.me])
        part[: last - first].copy_(self._mine[first:last])

    def near(self, block: int, parts: Sequence[Tensor]) -> None:
        for part, rank in zip(parts, self.site.hosts[self.site.host], strict=True):
            first, last = self._range(block, rank)
            self._outputs[rank][first:last].copy_(part[: last - first])

    def pack(self, block: int, parts: Sequence[Tensor]) -> Sends:
        first, last = self._share(block, self.site.host, self.site.me)
        share = torch.empty(last - first, dtype=self.dtype)
        for index, inner, outer in _overlaps(self._lengths(block, self.site.host), first, last):
            share[outer].copy_(parts[index][inner])
        return dict.fromkeys(self.site.others, share)

    def expects(self, block: int) -> dict[int, int]:
        return {host: last - first for host, (first, last) in self._shares(block, self.site.me).items()}

    def unpack(self, block: int, arrived: Sends, in_turn: Sends, part: Tensor) -> None:
        start = 0
        for host, (first, last) in self._shares(block, self.site.me).items():
            if last > first:
                part[start : start + last - first].copy_(arrived[host])
            start += last - first

    def take(self, block: int, parts: Sequence[Tensor]) -> None:
        for lane in range(self.site.num_lanes):
            start = 0
            for host, (first, last) in self._shares(block, lane).items():
                share = parts[lane][start : start + last - first]
                start += last - first
                for index, inner, outer in _overlaps(self._lengths(block, host), first, last):
                    rank = self.site.hosts[host][index]
                    offset = self._range(block, rank)[0]
                    self._outputs[rank][offset + inner.start : offset + inner.stop].copy_(share[outer])

    def _shares(self, block: int, lane: int) -> dict[int, tuple[int, int]]:
        return {host: self._share(block, host, lane) for host in self.site.others}


class ReduceScatter(_Windows):
    """Each lane reduces its share of what is for a host over the ranks of this one, and sends it there."""

    def __init__(
        self,
        site: Site,
        rooms: Rooms,
        output: Tensor,
        inputs: Sequence[Tensor],
        reduction: Reduction,
        block_numel: int,
    ) -> None:
        super().__init__(site, rooms, [piece.numel() for piece in inputs], output.dtype, block_numel // len(inputs))
        self._output, self._inputs, self._reduction = output, inputs, reduction
        self._own: dict[int, Tensor] = {}

    def give(self, block: int, part: Tensor) -> None:
        start = 0
        for ranks in self.site.hosts:
            for rank in ranks:
                first, last = self._range(block, rank)
                part[start : start + last - first].copy_(self._inputs[rank][first:last])
                start += last - first

    def pack(self, block: int, parts: Sequence[Tensor]) -> Sends:
        sends, start = {}, 0
        for host in range(len(self.site.hosts)):
            first, last = self._share(block, host, self.site.me)
            share = self.rooms.take(last - first, self.dtype)
            given = [part[start + first : start + last] for part in parts]
            sum_here(share, given, self._reduction, len(self._inputs))
            start += sum(self._lengths(block, host))
            sends[host] = share
        self._own[block] = sends.pop(self.site.host)
        return sends

    def expects(self, block: int) -> dict[int, int]:
        first, last = self._share(block, self.site.host, self.site.me)
        return dict.fromkeys(self.site.others, last - first)

    def unpack(self, block: int, arrived: Sends, in_turn: Sends, part: Tensor) -> None:
        own = self._own.pop(block)
        given = [own if host == self.site.host else arrived.get(host, own) for host in range(len(self.site.hosts))]
        sum_hosts(part[: own.numel()], given, self._reduction, len(self._inputs))

    def take(self, block: int, parts: Sequence[Tensor]) -> None:
        offset = self._range(block, self.site.hosts[self.site.host][self.site.me])[0]
        lengths = self._lengths(block, self.site.host)
        for lane in range(self.site.num_lanes):
            first, last = self._share(block, self.site.host, lane)
            for index, inner, outer in _overlaps(lengths, first, last):
                if index == self.site.me:
                    self._output[offset + inner.start : offset + inner.stop].copy_(parts[lane][outer])


class Sizes(Flow):
    """How many elements each rank gives to each, and how many it expects: whether that is the same.

    Args:
        ranks: the global rank of each rank in the group, for errors.
    """

    dtype = torch.int64

    def __init__(
        self,
        site: Site,
        rooms: Rooms,
        kind: str,
        gives: Sequence[Tensor],
        takes: Sequence[Tensor],
        ranks: Sequence[int],
    ) -> None:
        super().__init__(site, rooms)
        self._kind, self._ranks = kind, ranks
        self._mine = torch.tensor([[tensor.numel() for tensor in tensors] for tensors in (gives, takes)]).view(-1)
        self._own = self._mine

    def give(self, block: int, part: Tensor) -> None:
        part[: self._mine.numel()].copy_(self._mine)

    def pack(self, block: int, parts: Sequence[Tensor]) -> Sends:
        self._own = torch.cat([part[: self._mine.numel()] for part in parts])
        return dict.fromkeys(self.site.others, self._own)

    def expects(self, block: int) -> dict[int, int]:
        return {host: self._mine.numel() * len(self.site.hosts[host]) for host in self.site.others}

    def unpack(self, block: int, arrived: Sends, in_turn: Sends, part: Tensor) -> None:
        """Compare.

        Raises:
            CollectiveMismatchError: they differ.
        """
        size = len(self._ranks)
        tables: dict[int, Any] = {}
        for host, ranks in enumerate(self.site.hosts):
            told = self._own if host == self.site.host else arrived[host]
            tables |= dict(zip(ranks, told.view(len(ranks), 2, size).tolist(), strict=True))
        for giver in range(size):
            for taker in range(size):
                given, taken = tables[giver][0][taker], tables[taker][1][giver]
                if given != taken:
                    raise CollectiveMismatchError(
                        f"{self._kind}: rank {self._ranks[giver]} has {given} elements for rank {self._ranks[taker]}, "
                        f"which expects {taken}. Sizes must be the same on both sides."
                    )


def _blocks_of(tensor: Tensor, numel: int) -> list[Tensor]:
    """At least one."""
    if tensor.numel() <= numel:
        return [tensor]
    return [tensor[start : start + numel] for start in range(0, tensor.numel(), numel)]


_shares_of = functools.lru_cache(maxsize=1024)(shares_of)


def _between(tensor: Tensor, first: int, last: int) -> Tensor:
    """A slice; of nothing is made what is there."""
    return tensor if last - first == tensor.numel() else tensor[first:last]


def _take_shares(output: Tensor, parts: Sequence[Tensor], num_lanes: int) -> None:
    """Fill ``output`` with what the lanes have written."""
    for part, (first, last) in zip(parts, _shares_of(output.numel(), num_lanes), strict=False):
        _between(output, first, last).copy_(_between(part, first, last))


def sum_here(output: Tensor, parts: Sequence[Tensor], reduction: Reduction, size: int) -> None:
    """Reduce what the ranks of one host have. [Note: averages of halves]"""
    if reduction.name != "avg":
        reduce_into(output, parts, reduction)
    elif output.dtype in _NARROW:
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        total *= _scale(size)
        output.copy_(total)
    else:
        reduce_into(output, parts, _SUM)


def sum_hosts(output: Tensor, parts: Sequence[Tensor], reduction: Reduction, size: int) -> None:
    """Reduce what ``sum_here`` has made on each host.

    [Note: averages of halves] A sum may overflow where the average does not. So between hosts halves are scaled down,
    by a power of two, which costs no digit that the average would have.
    """
    if reduction.name == "avg" and output.dtype in _NARROW:
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        total /= _scale(size) * size
        output.copy_(total)
        return
    reduce_into(output, parts, _SUM if reduction.name in ("avg", "premul_sum") else reduction)
    if reduction.name == "avg":
        if output.is_floating_point() or output.is_complex():
            output /= size
        else:
            output.div_(size, rounding_mode="trunc")


def _scale(size: int) -> float:
    """The largest power of two that is not larger than 1/size."""
    return float(2.0 ** -math.ceil(math.log2(size)))


def _overlaps(lengths: Sequence[int], first: int, last: int) -> Iterator[tuple[int, slice, slice]]:
    """Where a range of several tensors, one after another, lies: which one, where in it, and where in the range."""
    start = 0
    for index, length in enumerate(lengths):
        low, high = max(first, start), min(last, start + length)
        if low < high:
            yield index, slice(low - start, high - start), slice(low - first, high - first)
        start += length
