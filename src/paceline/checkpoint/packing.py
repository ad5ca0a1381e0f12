"""An object taken apart into its tensors' memory and a skeleton of all else.

The invariant: what is put together again is equal to what was taken apart, and tensors that shared memory share it.

The skeleton is pickled, so it is a copy: it does not change with the object. Both ends are this job's own. What came
from a file was made under torch.load's rules before it is packed here.
"""

import io
import pickle
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.storage import TypedStorage, UntypedStorage


@dataclass(frozen=True)
class Packed:
    """All of an object.

    Attributes:
        storages: in the order in which the skeleton numbers them.
        meshes: of sharded tensors, likewise; they are never copied.
    """

    skeleton: bytes
    storages: list[UntypedStorage]
    meshes: list[Any] = field(default_factory=list)

    def unpack(self) -> Any:
        """Put the object together, over these very storages."""
        return _Unpickler(io.BytesIO(self.skeleton), self).load()


def pack(obj: Any) -> Packed:
    """Take an object apart; the storages are its own, not copies.

    Raises:
        Exception: whatever pickling an object raises.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(obj)
    return Packed(buffer.getvalue(), pickler.storages, pickler.meshes)


def bytes_of(storage: UntypedStorage) -> Tensor:
    """A storage as a tensor of bytes, (n,), over the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def moved(obj: Any, device: torch.device) -> Any:
    """The object with all of its tensors on ``device``; itself, where that is the CPU, where files are read to."""
    if device.type == "cpu":
        return obj
    packed = pack(obj)
    storages = [bytes_of(storage).to(device).untyped_storage() for storage in packed.storages]
    return Packed(packed.skeleton, storages, packed.meshes).unpack()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.storages: list[UntypedStorage] = []
        self.meshes: list[Any] = []
        self._number_of: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> tuple[int, torch.dtype | None] | None:
        if isinstance(obj, TypedStorage):
            return self._number(obj._untyped_storage), obj.dtype
        if isinstance(obj, UntypedStorage):
            return self._number(obj), torch.uint8  # as torch.load makes it: what rebuilds tensors expects this
        if type(obj).__name__ == "DeviceMesh":
            self.meshes.append(obj)
            return len(self.meshes) - 1, None
        return None

    def _number(self, storage: UntypedStorage) -> int:
        number = self._number_of.setdefault(storage._cdata, len(self.storages))
        if number == len(self.storages):
            self.storages.append(storage)
        return number


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, packed: Packed) -> None:
        super().__init__(file)
        self._packed = packed

    def persistent_load(self, pid: tuple[int, torch.dtype | None]) -> Any:
        number, dtype = pid
        if dtype is None:
            return self._packed.meshes[number]
        return TypedStorage(wrap_storage=self._packed.storages[number], dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]
