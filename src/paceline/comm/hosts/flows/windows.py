"""``all_gather`` and ``reduce_scatter``: collectives of lists with a tensor for each rank.

A block is a window of each tensor. The windows of a host's ranks, one after another, are what its lanes share out.

The invariant: what lies where in a block follows from the sizes of the tensors, which all ranks know.
"""
# ruff: noqa: ARG002 - each station is given all that some collective needs there

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.comm.hosts.flows.flow import Flow, Sends, Site
from paceline.comm.hosts.flows.sums import sum_here, sum_hosts
from paceline.comm.hosts.rooms import Rooms
from paceline.comm.transport import Reduction


class _Windows(Flow):
    """Of a list with a tensor for each rank, a window of each at a time."""

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
        share = torch.empty(last - first, dtype=self.dtype, device="cpu")
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


def _overlaps(lengths: Sequence[int], first: int, last: int) -> Iterator[tuple[int, slice, slice]]:
    """Where a range of several tensors, one after another, lies: which one, where in it, and where in the range."""
    start = 0
    for index, length in enumerate(lengths):
        low, high = max(first, start), min(last, start + length)
        if low < high:
            yield index, slice(low - start, high - start), slice(low - first, high - first)
        start += length
