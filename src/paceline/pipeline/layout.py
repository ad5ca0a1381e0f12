"""Which ranks run which lane: a row for each lane, with its replicas.

The invariant: every rank of the world has exactly one place, and all lanes have equally many replicas.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.distributed.device_mesh import DeviceMesh

from paceline.errors import PipelineError

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
