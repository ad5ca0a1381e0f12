"""Looking into samplers that others have made: what they draw from, and whether they shard already.

The invariant: nothing here draws from a sampler or changes it.
"""

from collections.abc import Iterator
from typing import Any

import torch.utils.data.distributed
from torch import Generator
from torch.utils.data import RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from paceline.errors import DataError

_OF_KNOWN_LENGTH = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


def is_sampler(thing: Any) -> bool:
    """Whether something gives indices or batches of them, rather than samples by index, whatever its class.

    Raises:
        DataError: it is an iterator, which gives them only once.
    """
    if isinstance(thing, Iterator):
        raise DataError(
            f"a {type(thing).__name__} gives what it has only once, and nothing in the second epoch. Give a sampler, "
            "which begins anew each time, or a list's indices as SubsetRandomSampler(list)."
        )
    return isinstance(thing, Sampler) or (hasattr(thing, "__iter__") and not hasattr(thing, "__getitem__"))


def chain_of(sampler: Any) -> Iterator[Any]:
    """A sampler and those that it draws from, as torch's batch samplers and ours hold theirs; outermost first."""
    seen: set[int] = set()
    while sampler is not None and id(sampler) not in seen:
        seen.add(id(sampler))
        yield sampler
        sampler = getattr(sampler, "sampler", getattr(sampler, "wrapped", None))


def generators_of(sampler: Any) -> list[tuple[Generator, int]]:
    """The generators that a sampler and those below it hold, each with the seed that it was given."""
    found = [getattr(link, "generator", None) for link in chain_of(sampler)]
    return [(generator, generator.initial_seed()) for generator in found if isinstance(generator, Generator)]


def words_of(sampler: Any) -> str:
    """What a sampler's state should have in common with it: the classes that it consists of, with their sizes."""
    words = []
    for link in chain_of(sampler):
        size = len(link) if type(link) in _OF_KNOWN_LENGTH else getattr(link, "batch_size", None)
        words.append(type(link).__name__ + (f"({size})" if isinstance(size, int) else ""))
    return " of ".join(words)


def length_of(sampler: Any) -> int | None:
    """How many items an epoch of a sampler has; None where it can't tell."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None


def set_epoch_of(sampler: Any, epoch: int) -> None:
    """Tell a sampler, and those below it, which epoch is meant, where they have ``set_epoch``."""
    for link in chain_of(sampler):
        if hasattr(link, "set_epoch"):
            link.set_epoch(epoch)


def is_sharded(sampler: Any) -> bool:
    """Whether a sampler, or one below it, already gives a rank's share."""
    return any(isinstance(link, torch.utils.data.distributed.DistributedSampler) for link in chain_of(sampler))
