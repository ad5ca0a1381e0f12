"""``load``: what a file holds, on all ranks, once it is known to be good.

The invariant: nothing that a file says is believed before its checksum, and no code that it holds is run unasked.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.checkpoint import files, shards
from paceline.checkpoint.packing import moved, pack
from paceline.checkpoint.prefixes import fitted
from paceline.checkpoint.ranks import on_first, ranks_of
from paceline.errors import CheckpointError


def load(
    path: str | os.PathLike[str],
    map_location: str | torch.device = "cpu",
    *,
    model: nn.Module | None = None,
    weights_only: bool = True,
    alone: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """What ``save``, torch.save, torch.distributed.checkpoint or safetensors has written, on every rank.

    All ranks call it. The first one reads the file; the others get its tensors from it, and need no disk in common.
    Sharded tensors come whole.

    Args:
        path: a file; or a folder of torch.distributed.checkpoint.
        map_location: the device of all tensors; each rank may have its own. Until then they are on the CPU.
        model: state dicts get the names that this module has, be it wrapped or not: ``module.`` and ``_orig_mod.`` come
            and go. It is not changed.
        weights_only: False also makes objects of any class, by running code that is named in the file.
        alone: each rank that calls this reads the file itself, and waits for no other.
        group: the ranks that call this; by default all.
    Returns:
        The object. Tensors that shared memory share it.
    Raises:
        CheckpointMissingError: there is no such file.
        CheckpointDamagedError: it is not as it was written; the message names the newest good one beside it.
        CheckpointError: it cannot be read; or it holds objects that ``weights_only`` refuses. These, like the two
            above, on all ranks alike. On one rank alone: it is not in ``group``, or ``map_location`` is no device.
    """
    try:
        device = torch.device(map_location)
    except (RuntimeError, TypeError):
        raise CheckpointError(
            f"map_location={map_location!r}: expected a device, such as 'cpu' or 'cuda:0'. Tensors are read to the CPU "
            "and then moved there, wherever they were saved."
        ) from None
    ranks = ranks_of(group, alone=alone)
    text = os.fspath(path)
    obj = on_first(ranks, lambda: _read(text, weights_only), tell=False)
    if ranks.world_size > 1:
        packed = ranks.broadcast(pack(obj) if ranks.rank == 0 else None)
        obj = obj if ranks.rank == 0 else packed.unpack()
    obj = moved(obj, device)
    return obj if model is None else fitted(obj, model)


def _read(path: str, weights_only: bool) -> Any:
    if shards.is_folder(path):
        return shards.read_folder(path)
    obj = files.read(path, weights_only=weights_only)
    return shards.read(path, obj) if shards.is_index(obj) else obj
