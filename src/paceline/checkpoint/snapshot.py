"""A copy of a state in host memory, which does not change while training goes on.

The invariant: there is memory for one copy, and a new one is taken only when the last has been written.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.storage import UntypedStorage

from paceline.checkpoint.packing import Packed, bytes_of, pack


@dataclass(frozen=True)
class Snapshot:
    """What a state was at some moment; copies from a device may still be under way."""

    packed: Packed
    arrivals: list[torch.Event]

    def unpack(self) -> Any:
        """The state, on the CPU, once all of it has arrived."""
        for arrival in self.arrivals:
            arrival.synchronize()
        return self.packed.unpack()


class HostMemory:
    """The memory of snapshots, kept from one to the next: fresh pages cost more than the copy."""

    def __init__(self) -> None:
        self._storages: list[UntypedStorage] = []

    def take(self, state: Any) -> Snapshot:
        """Copy a state; the copy is good until the next one is taken.

        What lies on an accelerator is copied in its stream, after what has been computed and before what comes next, so
        the caller need not wait for it.
        """
        packed = pack(state)
        devices = {storage.device for storage in packed.storages if storage.device.type != "cpu"}
        kept, self._storages = self._storages, []
        for number, storage in enumerate(packed.storages):
            is_fit = number < len(kept) and kept[number].nbytes() == storage.nbytes()
            copy = kept[number] if is_fit else _room_for(storage)
            bytes_of(copy).copy_(bytes_of(storage), non_blocking=True)
            self._storages.append(copy)
        arrivals = [torch.Event(device) for device in devices]
        for arrival, device in zip(arrivals, devices, strict=True):
            arrival.record(torch.accelerator.current_stream(device))
        return Snapshot(Packed(packed.skeleton, self._storages, packed.meshes), arrivals)


def _room_for(storage: UntypedStorage) -> UntypedStorage:
    pinned = storage.device.type == "cuda"
    return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned).untyped_storage()
