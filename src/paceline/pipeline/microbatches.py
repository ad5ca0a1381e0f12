"""Cutting a batch into microbatches.

The invariant: no sample is lost or repeated, their order is kept, and sizes differ by at most one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import DataError
from paceline.parallel.data_parallel.containers import parts_of, path_to
from paceline.pipeline.values import put_together, take_apart


def sizes_of(num_samples: int, most: int) -> tuple[int, ...]:
    """Of ``most`` microbatches, or of fewer where there are fewer samples; the larger ones first."""
    count = max(1, min(most, num_samples))
    share, rest = divmod(num_samples, count)
    return (share + 1,) * rest + (share,) * (count - rest)


def num_samples(value: Any, dim: int, path: str) -> int | None:
    """The size along ``dim`` that all tensors with dimensions have; None where there is no such tensor.

    Raises:
        DataError: they differ, or have too few dimensions.
    """
    found: list[tuple[str, Tensor]] = [item for item in _tensors(value, path) if item[1].dim() > 0]
    for name, tensor in found:
        if tensor.dim() <= dim:
            raise DataError(
                f"{name} has shape {tuple(tensor.shape)}, but the batch is dimension {dim}. Give `dim`, or a tensor of "
                "that dimension."
            )
        if tensor.size(dim) != found[0][1].size(dim):
            first = found[0]
            raise DataError(
                f"tensors of one batch must have one size along dimension {dim}, but {first[0]} has "
                f"{first[1].size(dim)} and {name} has {tensor.size(dim)}. What every microbatch needs whole must be a "
                "buffer of the module, or have no dimensions."
            )
    return found[0][1].size(dim) if found else None


def has_batch(value: Any) -> bool:
    """Whether there is a tensor with dimensions in it."""
    return any(tensor.dim() > 0 for _, tensor in _tensors(value, ""))


def split(value: Any, sizes: Sequence[int], dim: int) -> list[Any]:
    """A value for each microbatch; tensors without dimensions, and all that is no tensor, go into each whole."""
    shell, tensors = take_apart(value)
    shares = [
        [tensor] * len(sizes) if tensor.dim() == 0 else torch.split(tensor, list(sizes), dim) for tensor in tensors
    ]
    return [put_together(shell, [share[number] for share in shares]) for number in range(len(sizes))]


def _tensors(value: Any, path: str) -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(path, value)]
    parts = parts_of(value) or []
    return [item for key, part in parts for item in _tensors(part, path_to(path, value, key))]
