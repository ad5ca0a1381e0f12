"""Which communication hooks may be registered, and torch's own by name.

The invariant: what torch refuses is refused before any other rank is involved.
"""

import inspect

import torch
import torch.distributed as dist

from paceline.parallel.buckets.hooked import GradBucket, Hook, name_of


def check_hook(hook: Hook) -> None:
    """Raise as torch does if ``hook`` cannot be one."""
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    if bucket is None and len(signature.parameters) < 2:
        raise TypeError(f"communication hook {name_of(hook)}{signature}: expected two parameters, (state, bucket).")
    annotation = inspect.Parameter.empty if bucket is None else bucket.annotation
    if annotation not in (inspect.Parameter.empty, dist.GradBucket, GradBucket, "dist.GradBucket", "GradBucket"):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    future = torch.futures.Future[torch.Tensor]
    if signature.return_annotation not in (inspect.Signature.empty, future, "torch.futures.Future[torch.Tensor]"):
        raise ValueError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")


def builtin_hook(kind: dist.BuiltinCommHookType) -> Hook:
    """The hook that torch has in C++ under that name."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # it imports the optimizers

    if kind == dist.BuiltinCommHookType.FP16_COMPRESS:
        return default_hooks.fp16_compress_hook
    return default_hooks.allreduce_hook
