"""How many elements each rank gives to each: what ranks that exchange pieces of any sizes must know first.

The invariant: nothing is exchanged before all ranks know that what each gives is what the other takes.
"""
# ruff: noqa: ARG002 - each station is given all that some collective needs there

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.explain import different_sizes
from paceline.comm.hosts.flows.flow import Flow, Sends, Site
from paceline.comm.hosts.rooms import Rooms
from paceline.comm.transport import Call


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
        call: Call,
        gives: Sequence[Tensor],
        takes: Sequence[Tensor],
        ranks: Sequence[int],
    ) -> None:
        super().__init__(site, rooms)
        self._call = call._replace(where="")  # of this rank alone, while others are told too
        self._ranks = ranks
        numels = [tensor.numel() for tensors in (gives, takes) for tensor in tensors]
        self._mine = torch.tensor(numels, device="cpu")
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
                    raise different_sizes(self._call, self._ranks[giver], given, self._ranks[taker], taken)
