"""Which devices a user means: numbers, names and ``torch.device``s, brought to one.

The invariant: all devices of a wrapper are of one type, and each accelerator has its number.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch

from paceline.errors import DataError

DeviceLike: TypeAlias = int | str | torch.device
CPU = torch.device("cpu")


def as_device(device: DeviceLike) -> torch.device:
    """The device of that number or name; -1 is the CPU, as in torch.

    Raises:
        DataError: a number where there is no accelerator, or a device without memory of its own.
    """
    if isinstance(device, int):
        if device == -1:
            return CPU
        accelerator = _accelerator()
        if accelerator is None:
            raise DataError(
                f"device {device}: a number is an accelerator's, and there is none here. For replicas on the CPU say "
                'device_ids=["cpu", "cpu"].'
            )
        return torch.device(accelerator.type, device)
    device = torch.device(device)
    if device.type == "meta":
        raise DataError("device 'meta' holds no data: name devices that do.")
    if device.type == "cpu":
        return CPU
    if getattr(device, "index", None) is not None:  # torch's stubs know of no device without one
        return device
    return torch.device(device.type, torch.get_device_module(device.type).current_device())


def as_devices(devices: Sequence[DeviceLike]) -> list[torch.device]:
    """All of them; one may appear several times.

    Raises:
        DataError: they are of several types.
    """
    found = [as_device(device) for device in devices]
    if len({device.type for device in found}) > 1:
        raise DataError(f"devices of one type are expected, not {', '.join(map(str, found))}.")
    return found


def all_devices() -> list[torch.device]:
    """What torch's DataParallel takes by default: every accelerator; none on the CPU alone, nor on mps."""
    accelerator = _accelerator()
    if accelerator is None or accelerator.type == "mps":
        return []
    return [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())]


def as_id(device: torch.device) -> int | torch.device:
    """As it stands in ``DataParallel.device_ids``: torch's number of an accelerator, else the device."""
    return device if device.type == "cpu" else device.index


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
