"""How many bytes each device holds at most: asked of the allocator, or on the CPU counted.

On the CPU all replicas share one memory. What is counted there is each storage that torch's operations make, booked as
if each replica had a device: to the replica for which the code works, and else, as in a backward that the caller runs,
to the one whose tensors the operation takes. What belongs to none is on the first device, replica 0's.

The invariant: a storage is booked once, and taken off the books when it is freed.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.parallel.data_parallel.mirror import Mirror
from paceline.parallel.data_parallel.place import current_replica


class Ledger:
    """Bytes that each replica holds now, and the most that it has held."""

    def __init__(self) -> None:
        self.held_bytes: dict[int, int] = {}
        self.peak_bytes: dict[int, int] = {}
        self._owners: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._lock = threading.RLock()  # a storage may be freed while another is booked

    def owner_of(self, tensor: Tensor) -> int | None:
        """The replica to which the tensor's storage is booked."""
        storage = tensor.untyped_storage()
        reference, index = self._owners.get(id(storage), (None, None))
        return index if reference is not None and reference() is storage else None

    def book(self, tensor: Tensor, index: int) -> None:
        """Book the tensor's storage to replica ``index``, unless it is booked."""
        storage = tensor.untyped_storage()
        with self._lock:
            if self.owner_of(tensor) is None:
                size = storage.nbytes()
                free = functools.partial(self._free, id(storage), index, size)
                self._owners[id(storage)] = weakref.ref(storage, free), index
                self._add(index, size)

    def _free(self, key: int, index: int, size: int, reference: "weakref.ref[torch.UntypedStorage]") -> None:
        with self._lock:
            if self._owners.get(key, (None,))[0] is reference:
                del self._owners[key]
            self._add(index, -size)

    def _add(self, index: int, size: int) -> None:
        held = self.held_bytes.get(index, 0) + size
        self.held_bytes[index] = held
        self.peak_bytes[index] = max(held, self.peak_bytes.get(index, 0))


_ledger: ContextVar[Ledger | None] = ContextVar("paceline_ledger", default=None)


class _Booking(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        index = current_replica()
        if index is None:
            index = max((self._ledger.owner_of(tensor) or 0 for tensor in _strided(args)), default=0)
        for tensor in _strided(result):
            self._ledger.book(tensor, index)
        return result


def _strided(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]


@contextlib.contextmanager
def metered() -> Iterator[None]:
    """Book what this thread makes, if somebody keeps a ledger."""
    ledger = _ledger.get()
    with _Booking(ledger) if ledger is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def keeping(ledger: Ledger) -> Iterator[None]:
    """Keep ``ledger`` in this block, and in the threads of replicas that begin in it."""
    token = _ledger.set(ledger)
    try:
        with metered():
            yield
    finally:
        _ledger.reset(token)


@contextlib.contextmanager
def measure_bytes(module: Module, mirror: Mirror, devices: Sequence[torch.device]) -> Iterator[dict[int, int]]:
    """The most that each device holds in this block, by the number of its replica; see ``DataParallel``."""
    peaks: dict[int, int] = {}
    if devices and devices[0].type != "cpu":
        for device in devices:
            torch.get_device_module(device).reset_peak_memory_stats(device)
        yield peaks
        for index, device in enumerate(devices):
            torch.get_device_module(device).synchronize(device)
            peaks[index] = torch.get_device_module(device).max_memory_allocated(device)
        return
    grads = (param.grad for param in module.parameters() if param.grad is not None)
    ledger = Ledger()
    for tensor in _strided([*module.parameters(), *module.buffers(), *grads]):
        ledger.book(tensor, 0)
    for index, tensor in mirror.tensors():
        ledger.book(tensor, index)
    with keeping(ledger):
        yield peaks
    peaks.update(ledger.peak_bytes)
