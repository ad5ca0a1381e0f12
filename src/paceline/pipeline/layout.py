"""Which devices or ranks run which lane; for ranks, a row for each lane, with its replicas.

The invariant: every rank of the world has exactly one place, and all lanes have equally many replicas.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paceline import world
from paceline.errors import PipelineError
from paceline.parallel.data_parallel.devices import DeviceLike, all_devices, as_device

Ranks: TypeAlias = Sequence[int] | Sequence[Sequence[int]] | DeviceMesh


@dataclass(frozen=True)
class Layout:
    """``rows[lane][replica]`` is a rank."""

    rows: tuple[tuple[int, ...], ...]

    @property
    def num_lanes(self) -> int:
        return len(self.rows)

    @property
    def num_replicas(self) -> int:
        return len(self.rows[0])

    def column(self, replica: int) -> list[int]:
        """The ranks of one replica of the whole model, in the order of lanes."""
        return [row[replica] for row in self.rows]

    def place_of(self, rank: int) -> tuple[int, int]:
        """Lane and replica."""
        return next((lane, row.index(rank)) for lane, row in enumerate(self.rows) if rank in row)


def make_layout(ranks: Ranks, world_size: int) -> Layout:
    """Read what a user may give.

    Args:
        ranks: one for each lane, or for each lane its replicas; or a mesh of one dimension (lanes) or two (lanes,
            replicas).
    Raises:
        PipelineError: rows of different length, or ranks that are missing, twice, or not in the world.
    """
    given: list[Any] = ranks.mesh.tolist() if isinstance(ranks, DeviceMesh) else list(ranks)
    rows = tuple(tuple(row) if isinstance(row, Sequence) else (int(row),) for row in given)
    if not rows or len({len(row) for row in rows}) != 1 or not rows[0]:
        raise PipelineError(f"ranks={given}: expected for each lane one rank, or equally many replicas.")
    placed = sorted(rank for row in rows for rank in row)
    if placed != list(range(world_size)):
        raise PipelineError(
            f"ranks={given}: expected each rank of the world (0 to {world_size - 1}) once, got {placed}. Name all, or "
            "start fewer."
        )
    return Layout(rows)


def choose_lanes(devices: Sequence[DeviceLike] | None, ranks: Ranks | None) -> Layout | list[torch.device]:
    """The devices of this process, or the ranks of the world.

    Raises:
        PipelineError: both are given, there is no device, or ranks do not fit the world.
    """
    if devices is not None and ranks is not None:
        raise PipelineError("devices and ranks are both given; expected the devices of one process, or ranks.")
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    is_alone = dist.is_initialized() and not all_devices()  # a script for ranks, started as one process
    if devices is None and (ranks is not None or world_size > 1 or is_alone):
        if not dist.is_initialized():
            raise PipelineError("ranks are given, but there is no process group. Call paceline.init() first.")
        return make_layout(list(range(world_size)) if ranks is None else ranks, world_size)
    chosen = all_devices() if devices is None else [as_device(device) for device in devices]
    if not chosen:
        raise PipelineError("there is no accelerator here, and no devices are given; say devices=['cpu', 'cpu'].")
    return chosen


def device_of_this_rank() -> torch.device:
    """The world's; the CPU where there is no world of paceline's."""
    here = world.current()
    return torch.device("cpu") if here is None else here.device
