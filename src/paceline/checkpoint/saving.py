"""``save``: one file for a whole job.

The invariant: on no rank does it return before the file is durable, and on all of them it raises if it is not.
"""

import os
from typing import Any

import torch.distributed as dist

from paceline.checkpoint import files, shards
from paceline.checkpoint.placing import gathered
from paceline.checkpoint.ranks import on_all, on_first, ranks_of
from paceline.checkpoint.safetensors import is_safetensors
from paceline.errors import CheckpointError


def save(
    obj: Any, path: str | os.PathLike[str], *, alone: bool = False, group: dist.ProcessGroup | None = None
) -> None:
    """Save ``obj`` once for all ranks, in place of ``path``: what torch.load reads, with a checksum.

    All ranks call it. The first one writes what it was given; the others' objects don't count and may be None. A crash
    at any moment, a full disk included, leaves the file that was there. Where the object holds sharded tensors
    (DTensor), each rank writes its own shards with torch.distributed.checkpoint, into a folder beside the file.

    A name that ends in ``.safetensors`` makes a file of that format, which holds a dict of tensors by name, whole.

    Args:
        obj: whatever torch.save takes. For ``load`` to need no trust: tensors, numbers, strings, None and dicts, lists,
            tuples and sets of them.
        path: a file. Its folder must be there.
        alone: this rank writes, whichever it is, and waits for no other.
        group: the ranks that call this; by default all.
    Raises:
        CheckpointError: on all ranks alike: the disk is full or refuses, or the object does not fit the format. On one
            rank alone: it is not in ``group``, or ``alone`` and the state is sharded.
        Exception: on the first rank, whatever pickling an object raises; the others are told of it.
    """
    ranks = ranks_of(group, alone=alone)
    text = os.fsdecode(path)
    if alone and shards.is_sharded(obj):
        raise CheckpointError(
            f"{text}: the state is sharded, and alone=True would save this rank's part only. Call save on all ranks, "
            "without it; or give it whole tensors, as of full_tensor()."
        )
    if not alone and ranks.told(shards.is_sharded(obj)):
        if not is_safetensors(text):
            shards.save(obj, text, ranks)
            return
        obj = on_all(ranks, lambda: gathered(obj))
    on_first(ranks, lambda: files.write(obj, text))
