"""How the ranks of a measurement come together, and tell one another what they have seen.

The invariant: what they tell one another goes over a group of its own, in which a rank that waits sleeps.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paceline.bench.ways import PATIENCE, Setting
from paceline.world import init

_T = TypeVar("_T")


@contextlib.contextmanager
def joined(setting: Setting) -> Iterator[dist.ProcessGroup]:
    """The group in which ranks wait for one another, and gather."""
    torch.set_num_threads(setting.threads)
    backend = "cpu:gloo,cuda:nccl" if setting.device_type == "cuda" else "gloo"
    with init(backend, device=setting.device_type, timeout=PATIENCE):
        control = dist.new_group(backend="gloo", timeout=PATIENCE)
        try:
            yield control
        except BaseException:
            silence(2)  # torch would print the stacks of connections that break now
            raise


def silence(fd: int) -> None:
    """Whatever this process prints there from now on is lost."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)


def gather(value: _T, control: dist.ProcessGroup) -> list[_T]:
    """By rank, on rank 0; empty on the others."""
    values: list[Any] = [None] * dist.get_world_size(control)
    is_main = dist.get_rank() == 0
    dist.gather_object(value, values if is_main else None, dst=0, group=control)
    return values if is_main else []
