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
from paceline.checkpoint.placing import into_tensors_of, merge
from paceline.checkpoint.prefixes import fitted
from paceline.checkpoint.ranks import on_all, on_first, ranks_of
from paceline.checkpoint.torch_folders import is_folder
from paceline.errors import CheckpointError


def load(
    path: str | os.PathLike[str],
    map_location: str | torch.device = "cpu",
    *,
    model: nn.Module | None = None,
    into: dict[str, Any] | None = None,
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
        into: a state, such as that of ``state_dict()``, whose tensors are filled, be they whole or sharded (DTensor),
            and whose other values are replaced; what it does not have is not read, but that an empty dict takes all.
            Of a sharded file each rank reads its own part, whatever number of ranks has written it.
        weights_only: False also makes objects of any class, by running code that is named in the file.
        alone: each rank that calls this reads the file itself, and waits for no other.
        group: the ranks that call this; by default all.
    Returns:
        The object, which is ``into`` where that is given. Tensors that shared memory share it.
    Raises:
        CheckpointMissingError: there is no such file.
        CheckpointDamagedError: it is not as it was written; the message names the newest good one beside it.
        CheckpointError: it cannot be read; or it holds objects that ``weights_only`` refuses; or it lacks what ``into``
            has. These, like the two above, on all ranks alike. On one rank alone: it is not in ``group``,
            ``map_location`` is no device, or ``into`` no dict.
    """
    try:
        device = torch.device(map_location)
    except (RuntimeError, TypeError):
        raise CheckpointError(
            f"map_location={map_location!r}: expected a device, such as 'cpu' or 'cuda:0'. Tensors are read to the CPU "
            "and then moved there, wherever they were saved."
        ) from None
    if into is not None and (model is not None or not isinstance(into, dict)):
        given = "came with model=" if model is not None else f"is a {type(into).__name__}"
        raise CheckpointError(f"into= {given}: expected a dict alone, such as model.state_dict(), which has the names.")
    ranks = ranks_of(group, alone=alone)
    text = os.fsdecode(path)
    found = on_first(ranks, lambda: _read(text, weights_only, into is None), tell=False)
    shards_found = ranks.told(found if isinstance(found, shards.Shards) else None)
    if shards_found is not None:
        assert into is not None
        target = into_tensors_of(into)
        found = on_all(ranks, lambda: shards_found.read(target, weights_only=weights_only))
    elif ranks.world_size > 1:
        packed = ranks.broadcast(pack(found) if ranks.rank == 0 else None)
        found = found if ranks.rank == 0 else packed.unpack()
    if into is not None:
        return on_all(ranks, lambda: merge(into, found, lambda problem: f"{text} does not fit: {problem}."))
    found = moved(found, device)
    return found if model is None else fitted(found, model)


def _read(path: str, weights_only: bool, is_whole: bool) -> Any:
    """What the file holds; the parts of it that are to be read by each rank."""
    if is_folder(path):
        found: Any = shards.Shards(path)
    else:
        found = files.read(path, weights_only=weights_only)
        if not shards.is_index(found):
            return found
        found = shards.verified(path, found)
    return found.read(weights_only=weights_only) if is_whole else found
