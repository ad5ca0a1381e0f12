"""What the arguments of ``DistributedDataParallel`` come to. What torch refuses is refused, with its kind of error.

The invariant: a wrapper is made of arguments that have been checked, all of them, before any other rank is involved.
"""

import warnings
from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module, Parameter
from torch.nn.parameter import UninitializedParameter

from paceline.errors import PlanError, WorldError
from paceline.plan.buckets import CAP_BYTES, CPU_CAP_BYTES, FIRST_CAP_BYTES, SHARED_CAP_BYTES

_MIB = 1 << 20


def choose_group(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> dist.ProcessGroup:
    """The ranks that take part."""
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        return device_mesh.get_group(mesh_dim=0)
    if process_group is not None:
        return process_group
    if not dist.is_initialized():
        raise WorldError("there is no process group yet: call paceline.init() before wrapping a model.")
    return dist.distributed_c10d._get_default_group()


def prepare_for_mesh(module: Module, device_mesh: DeviceMesh | None) -> bool:
    """Whether the mesh is a slice of a larger one, whose other dimensions may have split the module's parameters.

    torch replaces such parameters by their local parts, which are what is averaged, and takes them out in forward.
    """
    if device_mesh is None or device_mesh._get_root_mesh() == device_mesh:
        return False
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform  # takes a while to import

    _pre_dp_module_transform(module)
    return True


def check_params(params: Sequence[Parameter]) -> str:
    """The device type of ``params``, if they can be trained."""
    if not any(param.requires_grad for param in params):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    if any(isinstance(param, UninitializedParameter) for param in params):
        raise RuntimeError(
            "the module has uninitialised parameters, of unknown shapes. Run one forward pass before wrapping it."
        )
    types = {param.device.type for param in params}
    if len(types) > 1:
        raise ValueError(f"parameters must be on devices of one type, but they are on {sorted(types)}.")
    return types.pop()


def check_delayed(named_params: Iterable[tuple[str, Parameter]] | None, hooked: Parameter | None) -> None:
    """Of parameters whose reduction is to be delayed, and the one whose gradient is to start it."""
    if (named_params is None) != (hooked is None):
        raise ValueError("delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.")


def choose_device(
    params: Sequence[Parameter],
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> tuple[list[int] | None, int | None]:
    """``device_ids`` and ``output_device`` as indices; None where the module stays where it is."""
    devices = sorted({str(param.device) for param in params})

    def refuse(reason: str) -> NoReturn:
        raise ValueError(f"device_ids={device_ids}, output_device={output_device}: {reason}.")

    if device_ids is not None and len(device_ids) > 1:
        refuse("expected None or one device: each rank trains on its own")
    if not device_ids and output_device is None:
        return None, None
    if len(devices) > 1 or params[0].device.type != "cuda":
        refuse(f"they are for a module on one GPU, but its parameters are on {', '.join(devices)}. Leave them out")
    if not device_ids:
        return None, None
    index = torch.cuda._utils._get_device_index(device_ids[0], True)
    return [index], index if output_device is None else torch.cuda._utils._get_device_index(output_device, True)


class Caps:
    """How many bytes of gradients travel together.

    Args:
        mb: MiB in each bucket; None for what is best where they travel.
        mb_list: MiB in each bucket in turn, in the order in which gradients arrive; the last counts for the rest.
    """

    def __init__(self, mb: float | None, mb_list: Sequence[float] | None) -> None:
        if mb is not None and mb < 0:
            raise PlanError(f"bucket_cap_mb={mb}: expected MiB, not less than 0.")
        if mb_list and min(mb_list) < 0:
            raise PlanError(f"bucket_cap_mb_list={list(mb_list)}: expected MiB, none less than 0.")
        self._mib = list(mb_list) if mb_list else None if mb is None else [mb]

    def in_bytes(self, device_type: str, *, is_shared: bool) -> list[int]:
        """Args:
        device_type: where the gradients are.
        is_shared: whether they lie in memory that the ranks share.
        """
        if self._mib is None:
            best = SHARED_CAP_BYTES if is_shared else CPU_CAP_BYTES if device_type == "cpu" else CAP_BYTES
            return [FIRST_CAP_BYTES, best]
        return [int(cap * _MIB) for cap in self._mib]


def choose_buffer_syncs(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Whether buffers are copied before each training forward, and whether at construction. As torch 2.13 does."""
    if broadcast_buffers is not None:
        ignored = (
            " It is ignored here, since `forward_sync_buffers` is given." if forward_sync_buffers is not None else ""
        )
        warnings.warn(
            f"`broadcast_buffers` is deprecated; use `forward_sync_buffers`, which also copies buffers once at "
            f"construction.{ignored}",
            FutureWarning,
            stacklevel=3,
        )
    if forward_sync_buffers is not None:
        return forward_sync_buffers, True
    in_forward = True if broadcast_buffers is None else broadcast_buffers
    return in_forward, in_forward
