"""Splitting a batch into shares, one for each replica.

The invariant: no sample is lost, and what belongs together stays together. torch cuts off what one argument has more
shares of than another, and pairs a share of two with a share of one, silently; here that is an error that names both.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.nn.parallel._functions import Scatter

from paceline.errors import DataError
from paceline.parallel.data_parallel.containers import parts_of, path_to, with_parts
from paceline.parallel.data_parallel.devices import DeviceLike, as_devices
from paceline.parallel.data_parallel.place import working_for

_C = TypeVar("_C", dict[Any, Any], list[Any], tuple[Any, ...])


@overload
def scatter(inputs: Tensor, target_gpus: Sequence[DeviceLike], dim: int = ...) -> tuple[Tensor, ...]: ...


@overload
def scatter(inputs: _C, target_gpus: Sequence[DeviceLike], dim: int = ...) -> list[_C]: ...


def scatter(inputs: Any, target_gpus: Sequence[DeviceLike], dim: int = 0) -> Any:
    """Slice tensors into nearly equal shares, one for each device; torch's function of that name.

    Containers, dataclasses too, are taken apart and made anew for each share. Tensors without dimensions go to every
    device whole; other objects are the same in all shares. Shares are copies, so a replica may write into its own.

    Args:
        inputs: tensors of size N along ``dim``, in containers however nested.
        target_gpus: devices, of one type; CPUs too.
        dim: the dimension of the batch.
    Returns:
        At most as many shares as there are devices, and fewer where N is smaller: a tuple for a tensor, else a list.
    Raises:
        DataError: tensors that make different numbers of shares, or shares of other proportions; devices of several
            types.
    """
    splitter = _Splitter(as_devices(target_gpus), dim)
    share = splitter.split(inputs, "inputs")
    count = len(splitter.devices) if splitter.count is None else splitter.count
    shares = [share(index) for index in range(count)]
    return tuple(shares) if isinstance(inputs, Tensor) else shares


def scatter_kwargs(
    inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, target_gpus: Sequence[DeviceLike], dim: int = 0
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """Scatter positional and keyword arguments together, so that each share is a whole call.

    Where there is no tensor to split there is one share: a module that is given no batch is called once.
    """
    splitter = _Splitter(as_devices(target_gpus), dim)
    positional = splitter.split(tuple(inputs), "inputs")
    named = splitter.split(dict(kwargs or {}), "kwargs")
    count = 1 if splitter.count is None else splitter.count
    return tuple(positional(index) for index in range(count)), tuple(named(index) for index in range(count))


class _Splitter:
    def __init__(self, devices: list[torch.device], dim: int) -> None:
        self.devices = devices
        self._dim = dim
        self.count: int | None = None  # of shares, once a tensor has been split
        self._first = ""
        self._sizes: list[int] = []  # of its shares

    def split(self, item: Any, path: str) -> Callable[[int], Any]:
        """What gives the share of each number."""
        if isinstance(item, Tensor):
            if item.dim() == 0:
                return lambda index: item.to(self.devices[index], non_blocking=True)
            shares = _split_tensor(item, self.devices, self._dim)
            self._agree([share.size(self._dim) for share in shares], path)
            return shares.__getitem__
        parts = parts_of(item)
        if parts is None:
            return lambda _index: item
        makers = [self.split(value, path_to(path, item, key)) for key, value in parts]
        return lambda index: with_parts(item, [make(index) for make in makers])

    def _agree(self, sizes: list[int], path: str) -> None:
        if self.count is None:
            self.count, self._first, self._sizes = len(sizes), path, sizes
        elif not _are_in_proportion(sizes, self._sizes):
            raise DataError(
                f"arguments that split alike over {len(self.devices)} devices are expected, but along dimension "
                f"{self._dim} {self._first} has {_sum_text(self._sizes)} and {path} has {_sum_text(sizes)}. A tensor "
                "that all replicas need whole must have no dimension, or be a buffer of the module."
            )


def _are_in_proportion(ones: list[int], others: list[int]) -> bool:
    """Whether each share is the same part of its tensor: one sample of one may be several of the other."""
    if len(ones) != len(others):
        return False
    return all(one * sum(others) == other * sum(ones) for one, other in zip(ones, others, strict=True))


def _sum_text(sizes: list[int]) -> str:
    return f"{sum(sizes)} ({' + '.join(map(str, sizes))})"


def _split_tensor(tensor: Tensor, devices: list[torch.device], dim: int) -> Sequence[Tensor]:
    if tensor.size(dim) == 0 or len(devices) == 1:
        return [tensor.to(devices[0], non_blocking=True)]
    if devices[0].type != "cpu" and len(set(devices)) == len(devices):
        shares: tuple[Tensor, ...] = Scatter.apply([device.index for device in devices], None, dim, tensor)  # type: ignore[no-untyped-call]
        return shares
    chunks = tensor.chunk(len(devices), dim)
    if len(chunks) == 1:
        return [tensor.to(devices[0], non_blocking=True)]
    return [_copy_to(index, device, chunk) for index, (device, chunk) in enumerate(zip(devices, chunks, strict=False))]


def _copy_to(index: int, device: torch.device, chunk: Tensor) -> Tensor:
    """A copy even on the same device: replicas that wrote into views of one batch would race."""
    with working_for(index):
        return chunk.to(device, non_blocking=True, copy=True)
