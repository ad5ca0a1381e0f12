"""What data holds, in 32 bytes: the same wherever the contents are the same, on any rank and in any process.

The invariant: nothing that differs between processes goes in, such as addresses, or the order of a set.
"""

import dataclasses
import hashlib
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

_SAMPLED = 1000


def digest_of(sample: Any) -> bytes:
    """The sha256 of what a sample holds, whatever it is made of."""
    hasher = hashlib.sha256()
    for part in _encoded(sample):
        hasher.update(part)
    return hasher.digest()


def digest_if_any(sample: Any) -> bytes | None:
    """``digest_of``, or None for what can't be taken apart: an object that refuses to be pickled, a sparse tensor."""
    try:
        return digest_of(sample)
    except Exception:  # pickle runs the objects' own code, which may raise anything
        return None


def digest_of_subset(dataset: Any) -> bytes | None:
    """A digest of which samples subsets of subsets choose; None if the dataset is no ``Subset``."""
    chosen: list[Any] = []
    while isinstance(dataset, Subset):
        # Ends and evenly between: enough to tell subsets apart, without reading millions.
        numbers = np.linspace(0, max(len(dataset.indices) - 1, 0), _SAMPLED).astype(int).tolist()
        chosen.append([int(dataset.indices[number]) for number in numbers if number < len(dataset.indices)])
        dataset = dataset.dataset
    return digest_of(chosen) if chosen else None


def _encoded(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        yield f"tensor {plain.dtype} {tuple(plain.shape)} ".encode()
        yield _bytes_of(plain)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield f"array {value.dtype.str} {value.shape} ".encode()
        yield value.tobytes()
    elif isinstance(value, Mapping):
        yield f"map {len(value)} ".encode()
        for key, part in value.items():
            yield from _encoded(key)
            yield from _encoded(part)
    elif isinstance(value, (list, tuple)):
        yield f"sequence {len(value)} ".encode()
        for part in value:
            yield from _encoded(part)
    elif isinstance(value, (set, frozenset)):
        yield f"set {len(value)} ".encode()
        yield from sorted(digest_of(part) for part in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield f"{type(value).__qualname__} ".encode()
        yield from _encoded({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    elif isinstance(value, (bytes, str, int, float, complex, type(None))):
        yield f"{type(value).__name__} {value!r} ".encode()
    else:
        yield pickle.dumps(value)


def _bytes_of(plain: Tensor) -> bytes:
    return plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
