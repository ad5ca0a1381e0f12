"""Noticing that data is sharded twice or not at all, while training goes on.

The invariant: no rank ever waits for another here. Each leaves a note in the store of the process group and looks, once
or twice, whether others have left theirs; so a rank that looks at its data alone hangs nobody.
"""

import contextlib
import hashlib
import json
import pathlib
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch.distributed as dist

from paceline.data.digests import digest_if_any, digest_of, digest_of_subset

_num_made: Counter[str] = Counter()
_MANY_LOOKS = 20


class Watch:
    """What the ranks of a loader have in common, or should have, said once.

    Args:
        is_sharded: whether the loader shards. If so, ranks should deal alike; if not, first batches should differ.
    """

    def __init__(self, dataset: Any, *, is_sharded: bool) -> None:
        self._dataset = dataset
        self._is_sharded = is_sharded
        # By where it is made: on rank 0 there may be loaders that the others don't have.
        place = _where()
        _num_made[place] += 1
        self._key = f"paceline/data/{place}/{_num_made[place]}"
        self._note: dict[str, Any] | None = None
        self._looks_left = 3
        self._dealt: Mapping[str, Any] | None = None

    def begin(self, dealt: Mapping[str, Any] | None) -> None:
        """Begin a pass.

        Args:
            dealt: what decides which samples a rank gets; None where the loader does not deal them to all ranks.
        """
        self._dealt = dealt

    def see(self, batch: Any, opening: bytes | None) -> None:
        """Take notice of one of the first two batches of a pass.

        Args:
            opening: what was read first of a stream, if that is known.
        """
        if self._looks_left and dist.is_initialized() and dist.get_world_size() > 1:
            try:
                self._compare_ranks(batch, opening)
            except RuntimeError:  # the rank that keeps the store has gone, on which no data depend
                self._looks_left = 0

    def warn_of_workers(self) -> None:
        """Warn, once, that workers have read the same stream from different samples on."""
        if self._looks_left:
            self._looks_left = 0
            warnings.warn(
                f"two workers read a {type(self._dataset).__name__} from different samples on: if it is shared out "
                "among them, this loader shares it out again, and most samples come nowhere. Give sharded=True then.",
                stacklevel=4,
            )

    def _compare_ranks(self, batch: Any, opening: bytes | None) -> None:
        store = _store()
        if store is None or (self._is_sharded and self._dealt is None):
            return
        if self._note is None:
            self._note = self._described(batch, opening)
            store.set(f"{self._key}/{dist.get_rank()}", json.dumps(self._note))
            return
        self._looks_left -= 1
        rank, world_size = dist.get_rank(), dist.get_world_size()
        # A few will do: what is wrong between any two ranks is wrong between some neighbours, or with rank 0.
        others = sorted({0, (rank + 1) % world_size, (rank - 1) % world_size} - {rank})
        notes = {rank: json.loads(store.get(key)) for rank in others if store.check([key := f"{self._key}/{rank}"])}
        for name, own in self._note.items():
            theirs = {rank: note.get(name) for rank, note in notes.items()}
            odd = {rank: value for rank, value in theirs.items() if (value == own) != self._is_sharded}
            if None in (own, *theirs.values()):
                continue  # it could not be told
            if odd:
                self._looks_left = 0
                warnings.warn(self._warning(name, own, odd), stacklevel=4)
                return

    def _described(self, batch: Any, opening: bytes | None) -> dict[str, Any]:
        if not self._is_sharded:
            digest = digest_if_any(batch)
            return {"batch": None if digest is None else digest.hex()}
        opened = None if opening is None else opening.hex()
        return {"dataset": _description(self._dataset), "opening": opened, **(self._dealt or {})}

    def _warning(self, name: str, own: Any, odd: Mapping[int, Any]) -> str:
        me, others = f"rank {dist.get_rank()}", _ranks_in_words([*odd])
        if name == "batch":
            return (
                f"{me}: {others} loaded the same first batch: nothing shards this loader, and every rank trains on "
                "the same samples. Wrap its sampler in a paceline DistributedSampler; or leave out the sampler, or "
                "sharded=True."
            )
        if name == "dataset":
            return (
                f"{me}: the loader shards its dataset, but {others} gave it another one: it is of another length, or a "
                "Subset of other samples. Either it was sharded before, and most samples come on no rank: then give "
                "sharded=True. Or random_split drew differently on each rank: seed it alike."
            )
        if name == "opening":
            return (
                f"{me}: the stream that this loader shards began with another sample on {others}. Either it shares "
                "itself out, and most samples come on no rank: then give sharded=True. Or it shuffles by a generator "
                "of its own: seed that alike, or draw from torch's, numpy's or Python's global one."
            )
        return (
            f"{me}: this loader has {name}={own!r}, but on {others} it has {name}={next(iter(odd.values()))!r}. Ranks "
            "that do not deal alike give some samples twice and others never: make loaders with the same arguments on "
            "all ranks, and load the same state."
        )


def warn_of_looks(num_looks: int) -> None:
    """Warn, once, of a training loop that seems to begin a pass for each batch.

    Args:
        num_looks: how many passes of a shuffling loader were given up after the same first batch, one after another.
    """
    if num_looks == _MANY_LOOKS:
        warnings.warn(
            f"{num_looks} passes in a row were given up after their first batch, and all had the same one, since such "
            "a pass is taken for a look at the data. For another batch each time keep one iterator: "
            "batches = iter(loader), then next(batches).",
            stacklevel=3,
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


def _description(dataset: Any) -> str:
    """What must be alike where ranks have the same dataset: its length, and the indices of subsets of it."""
    length = None
    with contextlib.suppress(TypeError, NotImplementedError):
        length = len(dataset)
    return digest_of([length, digest_of_subset(dataset)]).hex()


def _where() -> str:
    """The lines outside of paceline that led here, as a digest. Ranks that run the same program agree on it."""
    lines = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith("paceline."):
            lines.append(f"{pathlib.PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}")
        frame = frame.f_back
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _ranks_in_words(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"


def _store() -> dist.Store | None:
    """The store by which the ranks met; a group of MPI's has none."""
    store: dist.Store | None = dist.distributed_c10d._get_default_store()
    return store
