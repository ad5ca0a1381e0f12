"""``broadcast``, from host to host.

The invariant: each host sends on what it gets while it gets it, so all are done hardly later than the first.
"""
# ruff: noqa: ARG002 - each station is given all that some collective needs there

from collections.abc import Sequence

from torch import Tensor

from paceline.comm.hosts.flows.flow import Flow, Sends, Site, between, blocks_of, take_shares
from paceline.comm.hosts.rooms import Rooms
from paceline.comm.shares import shares_of


class Broadcast(Flow):
    """``broadcast``."""

    def __init__(self, site: Site, rooms: Rooms, tensor: Tensor, block_numel: int, root: int) -> None:
        super().__init__(site, rooms)
        self.dtype = tensor.dtype
        self._blocks = blocks_of(tensor, block_numel)
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
            between(part, 0, mine.numel()).copy_(mine)

    def near(self, block: int, parts: Sequence[Tensor]) -> None:
        if self.starts_here and self.site.me != self._root:
            mine = self._blocks[block]
            mine.copy_(between(parts[self._root], 0, mine.numel()))

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
        take_shares(self._blocks[block], parts, self.site.num_lanes)

    def _share(self, block: int, lane: int) -> tuple[int, int]:
        return shares_of(self._blocks[block].numel(), self.site.num_lanes)[lane]
