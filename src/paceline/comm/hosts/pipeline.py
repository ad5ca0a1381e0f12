"""How the blocks of a collective are kept going: several are on the wire while others pass through memory.

[Note: the last meeting] Nobody may leave a collective, and then the group, while others of his host still need him, or
need to be told by him of a failure elsewhere. So a collective ends with a meeting, after everything has been sent.

The invariant: a block's memory is used again only when all that was sent from it, or was to come into it, is over.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.comm.hosts.flows import Flow, Sends, Site, Sizes
from paceline.comm.hosts.frames import Parcel
from paceline.comm.hosts.meetings import Meetings
from paceline.comm.hosts.rooms import Rooms
from paceline.comm.hosts.waits import Waits
from paceline.comm.hosts.wire import Wire
from paceline.comm.memory.transport import SharedMemory
from paceline.comm.transport import Call, Steps

_DEPTH = 6  # blocks on the wire


@dataclass
class _Block:
    """A block that is on the wire."""

    sent: list[Parcel] = field(default_factory=list)
    came: list[Parcel] = field(default_factory=list)
    arrived: Sends = field(default_factory=dict)
    in_turn: Sends = field(default_factory=dict)


class Pipeline:
    """What one rank does for the collectives of a group.

    Args:
        memory: for blocks.
    """

    def __init__(
        self, local: SharedMemory, wire: Wire, waits: Waits, meetings: Meetings, site: Site, memory: Rooms
    ) -> None:
        self._local = local
        self._wire = wire
        self._waits = waits
        self._meetings = meetings
        self._site = site
        self._memory = memory
        self._members = site.hosts[site.host]
        self._far = sorted(rank for host in site.others for rank in site.hosts[host])
        self._is_lane = site.me < site.num_lanes

    def run(self, call: Call, flow: Flow) -> Steps:
        """A whole collective."""
        parts = yield from self._meetings.agree(call, flow)
        if flow.site.at_once:
            return
        me, blocks = self._site.me, [_Block() for _ in range(flow.num_blocks)]
        for step in range(flow.num_blocks + _DEPTH):
            if step < flow.num_blocks:
                if step and flow.starts_here:
                    parts = self._local.meetings.next_buffer(flow.dtype)
                    flow.give(step, parts[me])
                    yield from self._waits.meet()
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
                yield from self._waits.far(block.came)
                block.in_turn = self._expect(turning, block, flow.expects_in_turn(turning), flow.dtype)
                self._send(turning, block, flow.turn(turning, block.arrived))
            last = step - _DEPTH
            if 0 <= last < flow.num_blocks:
                block, blocks[last] = blocks[last], _Block()
                yield from self._waits.far([*block.came, *block.sent])
                if flow.comes_here:
                    parts = self._local.meetings.next_buffer(flow.dtype)
                    if self._is_lane:
                        flow.unpack(last, block.arrived, block.in_turn, parts[me])
                        self._memory.give_back([*block.arrived.values(), *block.in_turn.values()])
                    yield from self._waits.meet()
                    flow.take(last, parts)
        if not flow.comes_here:  # [Note: the last meeting]
            self._local.meetings.next_buffer(flow.dtype)
            yield from self._waits.meet()

    def _send(self, number: int, block: _Block, sends: Sends) -> None:
        to = [(self._site.hosts[host][self._site.me], tensor) for host, tensor in sends.items()]
        block.sent += self._wire.send_all(self._meetings.number, 1 + number, to)

    def _expect(self, number: int, block: _Block, numels: dict[int, int], dtype: torch.dtype) -> Sends:
        """What is to come, by host."""
        rooms = {host: self._memory.take(numel, dtype) for host, numel in numels.items() if numel}
        sources = [(self._site.hosts[host][self._site.me], room) for host, room in rooms.items()]
        block.came += self._wire.expect_all(self._meetings.number, 1 + number, sources)
        return rooms

    def exchange(self, call: Call, sizes: Sizes, takes: Sequence[Tensor], gives: Sequence[Tensor]) -> Steps:
        """From each rank to each, straight from its memory: between hosts there is nothing to be saved.

        Args:
            sizes: with which it begins.
        """
        yield from self._meetings.agree(call, sizes)
        came = self._wire.expect_all(self._meetings.number, 1, [(peer, takes[peer]) for peer in self._far])
        sent = self._wire.send_all(self._meetings.number, 1, [(peer, gives[peer]) for peer in self._far])
        near = [[tensors[peer] for peer in self._members] for tensors in (takes, gives)]
        yield from self._waits.near(self._local.all_to_all(call, *near))
        yield from self._waits.far([*came, *sent])
        self._local.meetings.next_buffer(torch.uint8)  # [Note: the last meeting]
        yield from self._waits.meet()
