"""Groups of ranks for a pipeline, and what all ranks of the world must have alike.

The invariant: these are collective calls of the world, in one order on all ranks.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from paceline.errors import PipelineError
from paceline.parallel.groups import cpu_backend_of, timeout_of
from paceline.pipeline.layout import Layout


def make_groups(layout: Layout, rank: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """This rank's column, for messages, and its replicas. A collective call of the world, in one order."""
    lane, replica = layout.place_of(rank)
    everybody = dist.group.WORLD
    assert everybody is not None
    timeout, on_cpu = timeout_of(everybody), cpu_backend_of(everybody)
    columns = [dist.new_group(layout.column(number), timeout, on_cpu) for number in range(layout.num_replicas)]
    if layout.num_replicas == 1:
        return columns[replica], None
    rows = [dist.new_group(list(row), timeout) for row in layout.rows]
    return columns[replica], rows[lane]


def agree(what: Any, explain: Callable[[int, Any, Any], str | None]) -> None:
    """Compare what all ranks say. A collective call of the world.

    Args:
        explain: of a rank, what it says and what rank 0 says: the difference, if there is one.
    Raises:
        PipelineError: on every rank, if any differs.
    """
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, what)
    for rank, theirs in enumerate(said):
        if (difference := explain(rank, theirs, said[0])) is not None:
            raise PipelineError(difference)


def from_first(make: Callable[[], Any]) -> Any:
    """What rank 0 makes, or the exception that it raised there. A collective call of the world."""
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box[0] = True, make()
        except Exception as error:
            box[0] = False, error
    dist.broadcast_object_list(box, src=0)
    succeeded, value = box[0]
    if not succeeded:
        raise value
    return value
