"""Datasets that are tensors: a batch is read at once, not sample by sample, with the same result.

The invariant: no code of the user's is passed over. So it is for exactly torch's own classes and collate function.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate, default_collate_fn_map


class Rows(Dataset[Any]):
    """A ``TensorDataset``, or subsets of one, whose batches come collated.

    Attributes:
        dataset: what was given.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._subsets = []
        while type(dataset) is Subset:
            self._subsets.append(dataset)
            dataset = dataset.dataset
        self._whole: TensorDataset = dataset

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        inner = indices
        for subset in self._subsets:
            inner = [subset.indices[index] for index in inner]
        rows = torch.tensor(inner)
        if rows.dim() != 1 or rows.dtype != torch.int64:  # whatever else can index a tensor
            return default_collate([self.dataset[index] for index in indices])  # type: ignore[no-untyped-call]
        return [tensor[rows] for tensor in self._whole.tensors]


def rows_of(dataset: Any, collate_fn: Callable[[Any], Any]) -> Rows | None:
    """The dataset to be read by batches, if that is the same as collating its samples."""
    inner = dataset
    while type(inner) is Subset:
        inner = inner.dataset
    if type(inner) is not TensorDataset or collate_fn is not default_collate:
        return None
    if default_collate_fn_map.get(Tensor) is not collate_tensor_fn or not all(map(_is_plain, inner.tensors)):
        return None
    return Rows(dataset)


def as_it_is(batch: Any) -> Any:
    """The collate function of batches that come collated."""
    return batch


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor and tensor.layout == torch.strided and tensor.is_contiguous() and not tensor.is_quantized
    )
