"""``all_reduce``, and ``reduce`` to one rank, among hosts.

Two hosts tell each other what they have, and both reduce it. Among more of them each reduces a part of each lane's
share for all, and then tells the result to those that want it.

The invariant: each part is reduced in the order of hosts, and where several hosts reduce it, from the same bits.
"""

from collections.abc import Sequence

from torch import Tensor

from paceline.comm.hosts.flows.flow import Flow, Sends, Site, between, blocks_of, take_shares
from paceline.comm.hosts.flows.sums import sum_here, sum_hosts
from paceline.comm.hosts.rooms import Rooms
from paceline.comm.reductions import NARROW
from paceline.comm.shares import shares_of
from paceline.comm.transport import Reduction


class Reduce(Flow):
    """``all_reduce``, and ``reduce`` to one rank.

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
        self._blocks = blocks_of(tensor, block_numel)
        self.num_blocks = len(self._blocks)
        self.numel = tensor.numel() if site.at_once else None
        self._reduction, self._size = reduction, size
        everybody = range(len(site.hosts))
        self._targets = list(everybody) if root is None else [site.host_of(root)]
        self._takes = root is None or root == site.hosts[site.host][site.me]
        self.comes_here = site.host in self._targets
        self.turns = len(site.hosts) > 2 and not site.at_once
        self._is_alone = len(site.hosts[site.host]) == 1  # so what it has needs no other memory
        is_scaled = reduction.name == "avg" and tensor.dtype in NARROW
        self._sends_as_is = self._is_alone and not is_scaled and (self._takes or not self.turns)
        self._own: dict[int, Tensor] = {}

    def give(self, block: int, part: Tensor) -> None:
        """All but the share that this rank reduces itself."""
        mine = self._blocks[block]
        for lane, (first, last) in enumerate(shares_of(mine.numel(), self.site.num_lanes)):
            if lane != self.site.me:
                between(part, first, last).copy_(between(mine, first, last))

    def pack(self, block: int, parts: Sequence[Tensor]) -> Sends:
        first, last = self._share(block, self.site.me)
        given = [self._blocks[block] if place == self.site.me else part for place, part in enumerate(parts)]
        if self._sends_as_is:
            own = given[0]
        else:
            own = self.rooms.take(last - first, self.dtype)
            sum_here(own, [between(part, first, last) for part in given], self._reduction, self._size)
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
        room = self._blocks[block] if self._is_alone else between(part, first, last)
        if self.turns:
            for host, told in {**in_turn, self.site.host: own[slice(*self._part(block, self.site.host))]}.items():
                room[slice(*self._part(block, host))].copy_(told)
        else:
            sum_hosts(room, self._in_order(own, arrived), self._reduction, self._size)
        if not self._sends_as_is:
            self.rooms.give_back([own])

    def take(self, block: int, parts: Sequence[Tensor]) -> None:
        if self._takes and not self._is_alone:
            take_shares(self._blocks[block], parts, self.site.num_lanes)

    def _share(self, block: int, lane: int) -> tuple[int, int]:
        return shares_of(self._blocks[block].numel(), self.site.num_lanes)[lane]

    def _length(self, block: int) -> int:
        first, last = self._share(block, self.site.me)
        return last - first

    def _part(self, block: int, host: int) -> tuple[int, int]:
        """Of this lane's share, what ``host`` reduces."""
        return shares_of(self._length(block), len(self.site.hosts))[host]

    def _from_others(self, numel: int) -> dict[int, int]:
        return dict.fromkeys(self.site.others, numel)

    def _in_order(self, own: Tensor, arrived: Sends) -> list[Tensor]:
        """By host; nothing has arrived where there is nothing."""
        return [own if host == self.site.host else arrived.get(host, own) for host in range(len(self.site.hosts))]
