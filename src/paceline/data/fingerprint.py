"""What each rank really gets, told by the contents of its samples: for whoever doubts how a loader shards.

The invariant: looking changes nothing, neither the epoch, nor the place in it, nor any random state.
"""

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Generator, Tensor
from torch.utils.data import IterableDataset

from paceline.data.digests import digest_of
from paceline.data.exchange import ranks_of
from paceline.data.sampler import DistributedSampler
from paceline.data.seeds import kept_randomness
from paceline.data.stream import ShardedStream
from paceline.data.wrapping import chain_of, length_of
from paceline.errors import DataError

_NUM_NAMED = 5


@dataclass(frozen=True)
class Fingerprint:
    """What the ranks get in one epoch, compared. ``str()`` of it says so in words.

    Attributes:
        digests: of all of a rank's samples in order, by rank; hexadecimal sha256.
        num_samples: by rank, repetitions included.
        num_shared: how many different samples come on several ranks.
        shared: the first of them; dataset indices, or digests where there are no indices.
        num_alike: how many contents come on several ranks under different indices; None without indices.
        num_missing: how many samples of the dataset come on no rank; None without indices.
        missing: the first of them.
    """

    digests: tuple[str, ...]
    num_samples: tuple[int, ...]
    num_shared: int
    shared: tuple[int | str, ...]
    num_alike: int | None
    num_missing: int | None
    missing: tuple[int, ...]

    @property
    def is_partition(self) -> bool:
        """Whether each sample comes on exactly one rank, as far as that can be told."""
        return not self.num_shared and not self.num_missing and not self.num_alike

    def __str__(self) -> str:
        lines = [
            f"rank {rank}: {count} samples, sha256 {digest[:16]}"
            for rank, (count, digest) in enumerate(zip(self.num_samples, self.digests, strict=True))
        ]
        if len(self.digests) > 1 and len(set(self.digests)) == 1:
            lines.append("All ranks get the same samples: nothing shards them.")
        elif self.num_shared:
            lines.append(f"{self.num_shared} samples come on several ranks: {_named(self.shared, self.num_shared)}.")
        if self.num_missing:
            lines.append(f"{self.num_missing} samples come on no rank: {_named(self.missing, self.num_missing)}.")
        if self.num_alike:
            lines.append(
                f"{self.num_alike} contents come on several ranks under different indices: the dataset holds equal "
                "samples, or the ranks list it in different orders."
            )
        if self.is_partition:
            lines.append("No sample comes on two ranks" + (", and none is left out." if self.num_missing == 0 else "."))
        return "\n".join(lines)


def fingerprint(loader: Any, *, group: dist.ProcessGroup | None = None) -> Fingerprint:
    """Compare what the ranks get from a loader in the epoch in use. A collective call.

    Samples of a map-style dataset are loaded one by one, in this process, as ``dataset[index]``: random augmentations
    make their contents differ. So are those of an iterable dataset that the loader shards. Those of another one come
    out of the loader's batches, cut along dimension 0.

    Args:
        loader: torch's or ours; any sampler.
        group: the ranks that are compared; by default all.
    Returns:
        The same on all ranks.
    Raises:
        DataError: on all ranks alike: a rank's samples could not be loaded or taken apart.
    """
    ranks = ranks_of(group)
    length = None if isinstance(loader.dataset, IterableDataset) else length_of(loader.dataset)
    indices, digests, problem = None, [], None
    try:
        with kept_randomness(), _kept_generators(loader):
            indices = None if length is None else _indices(loader)
            samples = _samples(loader) if indices is None else (loader.dataset[index] for index in indices)
            digests = [digest_of(sample) for sample in samples]
    except Exception as error:  # whatever the dataset raises; the other ranks are not to wait for this one
        problem = error
    found = ranks.all((indices, b"".join(digests), None if problem is None else f"{type(problem).__name__}: {problem}"))
    for rank, part in zip(ranks.names, found, strict=True):
        if part[2] is not None:
            raise DataError(f"rank {rank} could not load its samples to look at them: {part[2]}") from problem
    return compare([part[0] for part in found], [_cut(part[1]) for part in found], length)


def compare(indices: Sequence[list[Any] | None], digests: Sequence[list[bytes]], length: int | None) -> Fingerprint:
    """Put together what was found on each rank; a pure function.

    Args:
        indices: dataset indices by rank; None without.
        digests: of the samples by rank, in the same order.
        length: of the dataset; None without indices.
    """
    named: list[Sequence[Any]] = [part if own is None else own for own, part in zip(indices, digests, strict=True)]
    on_ranks = Counter(name for names in named for name in set(names))
    shared = [name for name, count in on_ranks.items() if count > 1]
    num_alike = num_missing = None
    missing: list[int] = []
    if length is not None and all(own is not None for own in indices):
        homes: dict[bytes, set[tuple[int, Any]]] = {}
        for rank, (names, part) in enumerate(zip(named, digests, strict=True)):
            for name, digest in zip(names, part, strict=True):
                homes.setdefault(digest, set()).add((rank, name))
        num_alike = sum(
            len({rank for rank, _ in home}) > 1 and len({name for _, name in home}) > 1 for home in homes.values()
        )
        missing = [index for index in range(length) if index not in on_ranks]
        num_missing = len(missing)
    return Fingerprint(
        digests=tuple(hashlib.sha256(b"".join(part)).hexdigest() for part in digests),
        num_samples=tuple(len(part) for part in digests),
        num_shared=len(shared),
        shared=tuple(name.hex()[:16] if isinstance(name, bytes) else name for name in shared[:_NUM_NAMED]),
        num_alike=num_alike,
        num_missing=num_missing,
        missing=tuple(missing[:_NUM_NAMED]),
    )


def _indices(loader: Any) -> list[Any]:
    """What the loader would load in the epoch in use, in order."""
    drawn = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    with contextlib.ExitStack() as stack:
        for link in chain_of(drawn):
            if isinstance(link, DistributedSampler):
                stack.enter_context(link.held())
        items = list(drawn)
    return [index for item in items for index in (item if isinstance(item, (list, tuple)) else [item])]


@contextlib.contextmanager
def _kept_generators(loader: Any) -> Iterator[None]:
    """Put back the generators that the loader and its samplers hold."""
    drawn = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    held = {id(link): link.generator for link in (loader, *chain_of(drawn)) if hasattr(link, "generator")}
    states = [(generator, generator.get_state()) for generator in held.values() if isinstance(generator, Generator)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def _samples(loader: Any) -> Iterator[Any]:
    """The samples of the epoch in use, where they have no indices."""
    source = getattr(loader, "source", None)
    if isinstance(source, ShardedStream):
        yield from source.look()
        return
    for batch in loader:
        if loader.batch_sampler is None:
            yield batch
        else:
            yield from _rows(batch)


def _rows(batch: Any) -> Iterator[Any]:
    """A batch's samples, from a structure of tensors and lists."""
    if isinstance(batch, Mapping):
        columns = [list(_rows(part)) for part in batch.values()]
        yield from (dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True))
    elif isinstance(batch, (list, tuple)) and batch and isinstance(batch[0], (Tensor, list, tuple, Mapping)):
        yield from zip(*[list(_rows(part)) for part in batch], strict=True)
    else:
        yield from batch


def _cut(digests: bytes) -> list[bytes]:
    return [digests[start : start + 32] for start in range(0, len(digests), 32)]


def _named(first: Sequence[Any], count: int) -> str:
    return ", ".join(map(str, first)) + (", ..." if count > len(first) else "")
