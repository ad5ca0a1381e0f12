"""Noticing that data is sharded twice or not at all, while training goes on.

The invariant: no rank ever waits for another here. Each leaves a note in the store of the process group and looks, once
or twice, whether others have left theirs; so a rank that looks at its data alone hangs nobody.
"""

import contextlib
import pathlib
import sys
import warnings
from collections import Counter
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import Subset

from paceline.data.fingerprint import digest_of

_num_made: Counter[str] = Counter()
_SAMPLED = 1000


class Watch:
    """What the ranks of a loader have in common, or should have, said once.

    Args:
        is_sharded: whether the loader shards. If so, all ranks should have one dataset; if not, first batches should
            differ.
    """

    def __init__(self, dataset: Any, *, is_sharded: bool) -> None:
        self._dataset = dataset
        self._is_sharded = is_sharded
        # By the line that makes it: on rank 0 there may be loaders that the others don't have.
        line = _line_of_user()
        _num_made[line] += 1
        self._key = f"paceline/data/{line}/{_num_made[line]}"
        self._note = b""
        self._num_looks = 3

    def see(self, batch: Any, number: int) -> None:
        """Take notice of a pass's batch; ``number`` counts from 1."""
        if number > 2 or not self._num_looks or not dist.is_initialized() or dist.get_world_size() < 2:
            return
        store = _store()
        if store is None:
            return
        if not self._note:
            self._note = _description(self._dataset) if self._is_sharded else digest_of(batch)
            store.set(f"{self._key}/{dist.get_rank()}", self._note.hex())
            return
        self._num_looks -= 1
        rank, world_size = dist.get_rank(), dist.get_world_size()
        # A few will do: what is wrong between any two ranks is wrong between some neighbours, or with rank 0.
        others = sorted({0, (rank + 1) % world_size, (rank - 1) % world_size} - {rank})
        notes = {rank: store.get(key) for rank in others if store.check([key := f"{self._key}/{rank}"])}
        odd = [rank for rank, note in notes.items() if (bytes.fromhex(note.decode()) == self._note) != self._is_sharded]
        if odd:
            self._num_looks = 0
            warnings.warn(self._warning(odd), stacklevel=4)

    def _warning(self, odd: list[int]) -> str:
        me, others = f"rank {dist.get_rank()}", _ranks_in_words(odd)
        if self._is_sharded:
            return (
                f"{me}: the loader shards its dataset, but {others} gave it another one: it is of another length, or a "
                "Subset of other samples. Either it was sharded before, and most samples come on no rank: then give "
                "sharded=True. Or random_split drew differently on each rank: seed it alike."
            )
        return (
            f"{me}: {others} loaded the same first batch: nothing shards this loader, and every rank trains on "
            "the same samples. Wrap its sampler in a paceline DistributedSampler; or leave out the sampler, or "
            "sharded=True."
        )


def mentions_rank(function: Any) -> bool:
    """Whether a function's own code asks which rank it runs on."""
    code = getattr(function, "__code__", None)
    return code is not None and bool({"get_rank", "get_world_size"} & {*code.co_names})


def warn_of_sharding_twice(dataset: Any, worker_init_fn: Any) -> None:
    """Warn where an iterable dataset, or what prepares it in workers, seems to share out samples by itself."""
    code = getattr(worker_init_fn, "__code__", None)
    if code is not None and "get_worker_info" in code.co_names:
        what = "worker_init_fn asks for get_worker_info"
    elif mentions_rank(type(dataset).__iter__):
        what = f"{type(dataset).__name__}.__iter__ asks for its rank"
    else:
        return
    warnings.warn(
        f"{what}: if samples are shared out there, this loader shares them out again, and most come on no rank. Give "
        "sharded=True then.",
        stacklevel=4,
    )


def _description(dataset: Any) -> bytes:
    """What must be alike where ranks have the same dataset: its length, and the indices of subsets of it."""
    parts: list[Any] = []
    while dataset is not None:
        with contextlib.suppress(TypeError, NotImplementedError):
            parts.append(len(dataset))
        if not isinstance(dataset, Subset):
            break
        # Ends and evenly between: enough to tell subsets apart, without reading millions.
        numbers = np.linspace(0, max(len(dataset.indices) - 1, 0), _SAMPLED).astype(int).tolist()
        parts.append([int(dataset.indices[number]) for number in numbers if number < len(dataset.indices)])
        dataset = dataset.dataset
    return digest_of(parts)


def _line_of_user() -> str:
    """The file and line outside of paceline that is making a loader."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("paceline."):
        frame = frame.f_back
    return f"{pathlib.PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _ranks_in_words(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"


def _store() -> dist.Store | None:
    """The store by which the ranks met; a group of MPI's has none."""
    store: dist.Store | None = dist.distributed_c10d._get_default_store()
    return store
