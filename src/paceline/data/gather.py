"""Results of an evaluation, computed in shares by all ranks, put together in the dataset's order.

The invariant: each sample's result comes once, however the sampler padded or sharded, and all ranks either return
the same result or raise the same error. For that, what each rank has is exchanged and checked before any payload.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.data.exchange import Ranks, ranks_of
from paceline.data.loader import DataLoader
from paceline.data.outputs import Leaves, Shape, agree, describe, leaves_of, rebuild, spell
from paceline.data.sampler import DistributedSampler
from paceline.errors import DataError


def gather(outputs: Any, indices: Any, *, group: dist.ProcessGroup | None = None) -> Any:
    """Collect every rank's results, one a sample, and return them on all ranks in the order of the dataset.

    A sample that came more than once, through padding, keeps the result from its first position in the epoch. Samples
    that no rank had are left out. Every rank of the group must call this, with or without samples.

    Args:
        outputs: this rank's n results: a tensor (n, ...); a list or tuple of tensors, batches to be joined along
            dimension 0, or n tensors without dimensions; a list or tuple of n other objects, which can be pickled; or a
            dict with str keys or a namedtuple of any of these. An empty list will do on a rank without samples.
            Gradients are not followed.
        indices: the loader or ``DistributedSampler`` that gave the samples, before its next pass begins; or the
            samples' dataset indices in the order of ``outputs``, as n integers in a tensor, array or sequence, or as
            a list of tensors, one a batch.
        group: the ranks that take part; by default all, or this process alone where no group is initialised.
    Returns:
        For a tensor, a tensor (N, ...) on this rank's own device (the CPU where it had nothing), N being the number
        of different indices; for objects, a list of N; for a dict or namedtuple, the same with these inside.
    Raises:
        DataError: on all ranks alike: a rank's outputs and indices differ in number, ranks differ in structure, dtype
            or trailing shape, or a rank's arguments are none of the above. On this rank alone: it is not in ``group``.
    """
    ranks = ranks_of(group)
    report, own_indices, leaves = _inspect(outputs, indices, ranks)
    reports = dict(zip(ranks.names, ranks.all(report), strict=True))
    shape = _check(reports)
    counts = [report.num_indices for report in reports.values()]
    index_rows = ranks.rows(_to_bytes(torch.from_numpy(own_indices)), counts)
    taken = _take_in_dataset_order([_from_bytes(rows.cpu(), torch.int64, ()).numpy() for rows in index_rows])
    values: dict[tuple[str, ...], Any] = {}
    for path, leaf in leaves_of(shape).items():
        own = leaves.get(path)
        if leaf.kind == "tensor":
            rows = own if isinstance(own, Tensor) else torch.empty((0, *leaf.row_shape), dtype=leaf.dtype)
            parts = ranks.rows(_to_bytes(rows), counts)
            values[path] = _from_bytes(_merge_rows(parts, taken).to(rows.device), rows.dtype, leaf.row_shape)
        else:
            values[path] = _merge_objects([ranks.unpack(part) for part in ranks.all(own)], taken)
    return rebuild(shape, values, outputs)


@dataclass(frozen=True)
class _Report:
    """What a rank tells the others before any payload moves."""

    problem: str | None
    num_indices: int
    shape: Shape


def _inspect(outputs: Any, indices: Any, ranks: Ranks) -> tuple[_Report, npt.NDArray[np.int64], Leaves]:
    """Look at this rank's arguments; what is wrong with them becomes part of the report, so that all ranks hear."""
    try:
        own_indices = _as_indices(indices)
        shape, leaves = describe(outputs)
        for path, leaf in leaves.items():
            if isinstance(leaf, list):
                leaves[path] = _pack(leaf, path, ranks)
    except DataError as error:
        return _Report(str(error), 0, Shape("empty")), np.empty(0, np.int64), {}
    return _Report(None, len(own_indices), shape), own_indices, leaves


def _pack(objects: list[Any], path: tuple[str, ...], ranks: Ranks) -> Any:
    try:
        return ranks.pack(objects)
    except Exception as error:  # pickle runs the objects' own code, which may raise anything
        raise DataError(
            f"{spell(path)} holds an object that can't be sent to the other ranks: {type(error).__name__}: {error}"
        ) from error


def _as_indices(indices: Any) -> npt.NDArray[np.int64]:
    if isinstance(indices, (DataLoader, DistributedSampler)):
        return indices.indices()
    given = type(indices).__name__
    if isinstance(indices, (torch.utils.data.DataLoader, torch.utils.data.Sampler)):
        raise DataError(
            f"indices is torch's {given}, which does not tell which samples it gave. Load from a paceline.DataLoader, "
            "made with the same arguments but the sampler, and pass that; or pass the paceline DistributedSampler that "
            "torch's loader draws from; or let the dataset return each sample's index, and pass those."
        )
    if isinstance(indices, Mapping):
        raise DataError(
            f"indices is a {given} of {sorted(map(str, indices))}; pass one of its values: the integers in the order "
            "of outputs, as a tensor or a list of tensors"
        )
    if isinstance(indices, (list, tuple)) and indices and all(isinstance(i, Tensor) and i.dim() == 1 for i in indices):
        indices = torch.cat(list(indices))
    if isinstance(indices, Tensor):
        indices = indices.detach().cpu().numpy()
    try:
        array = np.asarray(indices)
    except ValueError:  # a ragged sequence
        array = np.empty((), dtype=object)
    if array.shape == (0,):
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(
            "indices should be a paceline DataLoader or DistributedSampler, or integers in one dimension; "
            f"got {given} with shape {array.shape} and dtype {array.dtype}"
        )
    if array.min() < 0:
        raise DataError(f"indices should be 0 or more, got {array.min()}; count from the dataset's start")
    return array.astype(np.int64)


def _check(reports: Mapping[int, _Report]) -> Shape:
    """Find the structure that all ranks share, or raise the first thing that is wrong on any of them."""
    for rank, report in reports.items():
        if report.problem is not None:
            raise DataError(f"rank {rank}: {report.problem}")
        for path, leaf in leaves_of(report.shape).items():
            if leaf.num_rows != report.num_indices:
                raise DataError(
                    f"rank {rank}: {spell(path)} has results for {leaf.num_rows} samples, but there are "
                    f"{report.num_indices} indices. {leaf.advice}"
                )
    return agree({rank: report.shape for rank, report in reports.items()})


def _take_in_dataset_order(indices: Sequence[npt.NDArray[np.int64]]) -> list[tuple[Tensor, Tensor]]:
    """Decide which of each rank's rows are kept and where they go.

    Returns:
        For each rank its kept rows' numbers and their places in the result; each place is filled once.
    """
    flat = np.concatenate(indices)
    rank_of = np.repeat(np.arange(len(indices)), [len(part) for part in indices])
    row_of = np.concatenate([np.arange(len(part)) for part in indices])
    # Row k of rank r was position k * N + r of the epoch, so the first by (row, rank) is no padding.
    order = np.lexsort((rank_of, row_of, flat))
    first = np.ones(len(flat), dtype=bool)
    first[1:] = np.diff(flat[order]) != 0
    kept = order[first]
    taken = []
    for rank in range(len(indices)):
        places = np.flatnonzero(rank_of[kept] == rank)
        taken.append((torch.from_numpy(row_of[kept[places]]), torch.from_numpy(places)))
    return taken


def _merge_rows(parts: Sequence[Tensor], taken: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    total = sum(len(places) for _, places in taken)
    merged = parts[0].new_empty((total, parts[0].shape[1]))
    for part, (rows, places) in zip(parts, taken, strict=True):
        merged[places.to(merged.device)] = part[rows.to(merged.device)]
    return merged


def _merge_objects(parts: Sequence[list[Any]], taken: Sequence[tuple[Tensor, Tensor]]) -> list[Any]:
    merged: list[Any] = [None] * sum(len(places) for _, places in taken)
    for part, (rows, places) in zip(parts, taken, strict=True):
        for row, place in zip(rows.tolist(), places.tolist(), strict=True):
            merged[place] = part[row]
    return merged


def _to_bytes(rows: Tensor) -> Tensor:
    """The rows as bytes, (n, row_bytes): every backend and every kind of indexing knows uint8."""
    row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
    if rows.numel() == 0:
        return torch.empty((len(rows), row_bytes), dtype=torch.uint8, device=rows.device)
    plain = rows.resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8).view(len(rows), row_bytes)


def _from_bytes(rows: Tensor, dtype: torch.dtype, row_shape: tuple[int, ...]) -> Tensor:
    shape = (len(rows), *row_shape)
    if rows.numel() == 0:
        return torch.empty(shape, dtype=dtype, device=rows.device)
    return rows.contiguous().view(-1).view(dtype).view(shape)
