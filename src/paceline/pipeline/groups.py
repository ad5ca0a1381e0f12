"""Groups of ranks for a pipeline.

The invariant: they are made in one order on all ranks of the world.
"""

import torch.distributed as dist

from paceline.parallel.groups import cpu_backend_of, timeout_of
from paceline.pipeline.layout import Layout


def make_groups(layout: Layout, rank: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """This rank's column, for messages, and its replicas. A collective call of the world, in one order.

    c10d numbers the ranks of a group in the order of the world's, whatever the order of lanes.
    """
    lane, replica = layout.place_of(rank)
    everybody = dist.group.WORLD
    assert everybody is not None
    timeout, on_cpu = timeout_of(everybody), cpu_backend_of(everybody)
    columns = [dist.new_group(layout.column(number), timeout, on_cpu) for number in range(layout.num_replicas)]
    if layout.num_replicas == 1:
        return columns[replica], None
    rows = [dist.new_group(list(row), timeout) for row in layout.rows]
    return columns[replica], rows[lane]
