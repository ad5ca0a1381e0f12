"""Which ranks of a group are still training, under ``join``.

The invariant: all live ranks declare the same ranks at the same point, so they ask for the same groups.
"""

import weakref
from collections.abc import Sequence

import torch.distributed as dist

_live: "weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[tuple[int, ...], bool]]" = weakref.WeakKeyDictionary()


def declare_live(group: dist.ProcessGroup, ranks: Sequence[int], *, divides_by_initial: bool) -> None:
    _live[group] = tuple(ranks), divides_by_initial


def forget_live(group: dist.ProcessGroup) -> None:
    _live.pop(group, None)
