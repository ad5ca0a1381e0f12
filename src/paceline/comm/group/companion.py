"""The backends beside ours in a group such as ``cpu:shm,cuda:nccl``.

c10d lets a Python process group stand only for all devices. So ours makes the others itself, the first time that a
tensor of theirs comes by; c10d has by then noted what the caller asked for.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import CommunicationError

c10d = dist.distributed_c10d


def make_companion(options: Any) -> Callable[[Any], dist.ProcessGroup]:
    """A function that makes the group for a given group's other devices."""
    store, rank, size = options.store, options.group_rank, options.group_size
    timeout, ranks = options.timeout, list(options.global_ranks_in_group)

    def make(owner: Any) -> dist.ProcessGroup:
        config = c10d._world.pg_backend_config.get(owner, "")
        others = dict(pair.split(":") for pair in config.split(",") if ":" in pair)
        others = {device: backend for device, backend in others.items() if backend in _MAKERS}
        if not others:
            raise CommunicationError(
                f"the backend {owner.getBackendName()!r} moves CPU tensors only, and the group has no other. Move the "
                "tensor to the CPU, or make the group with backend='cpu:shm,cuda:nccl'."
            )
        group = dist.ProcessGroup(dist.PrefixStore("others/", store), rank, size)
        group._set_default_backend(_MAKERS[next(iter(others.values()))][0])
        for device, backend in others.items():
            kind, maker = _MAKERS[backend]
            prefixed = dist.PrefixStore(f"{device}/", store)
            group._register_backend(torch.device(device), kind, maker(prefixed, rank, size, timeout, ranks))
        group._set_group_name(owner.getGroupName())
        group._set_group_desc(owner.getGroupDesc())
        return group

    return make


def _make_nccl(store: dist.Store, rank: int, size: int, timeout: Any, ranks: list[int]) -> Any:
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.global_ranks_in_group = ranks
    return c10d.ProcessGroupNCCL(store, rank, size, options)


def _make_gloo(store: dist.Store, rank: int, size: int, timeout: Any, _: list[int]) -> Any:
    backend = c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
    backend._set_sequence_number_for_group()
    return backend


_MAKERS = {
    "nccl": (dist.ProcessGroup.BackendType.NCCL, _make_nccl),
    "gloo": (dist.ProcessGroup.BackendType.GLOO, _make_gloo),
}
