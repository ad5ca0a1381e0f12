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

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.hosts.rooms import Rooms
from paceline.comm.shares import shares_of

Sends = dict[int, Tensor]  # by host


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


def blocks_of(tensor: Tensor, numel: int) -> list[Tensor]:
    """At least one."""
    if tensor.numel() <= numel:
        return [tensor]
    return [tensor[start : start + numel] for start in range(0, tensor.numel(), numel)]


def between(tensor: Tensor, first: int, last: int) -> Tensor:
    """A slice; of nothing is made what is there."""
    return tensor if last - first == tensor.numel() else tensor[first:last]


def take_shares(output: Tensor, parts: Sequence[Tensor], num_lanes: int) -> None:
    """Fill ``output`` with what the lanes have written."""
    for part, (first, last) in zip(parts, shares_of(output.numel(), num_lanes), strict=False):
        between(output, first, last).copy_(between(part, first, last))
