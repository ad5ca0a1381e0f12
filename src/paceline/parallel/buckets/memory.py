"""The memory of a bucket: flat, with a view for each member, laid out like its parameter.

The invariant: memory in which somebody else holds a gradient, or a view of one, is theirs, and is not written any more.
"""

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.parallel.buckets.bucket import Member

# What sys.getrefcount(views[i]) gives when nobody else has the view: the list, and the argument.
_OWN_REFERENCES = 2


class Memory:
    """Room for the gradients of ``members``; none before ``make_room``.

    Attributes:
        views: one a member. Nobody else may keep references to them beyond a call.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.views: list[Tensor] = []
        self._members = members
        self._flat: Tensor | None = None

    @property
    def flat(self) -> Tensor:
        """All of it, in the order of members. (elements,)"""
        assert self._flat is not None
        return self._flat

    def make_room(self, allocate: Callable[[int], Tensor]) -> None:
        """See to memory for a round's gradients.

        Args:
            allocate: makes a flat tensor of so many elements, where the last one cannot serve again.
        """
        if self._flat is None or self._is_held(self._flat):
            self._flat = allocate(sum(member.numel for member in self._members))
            self.views = self.carve(self._flat)

    def carve(self, flat: Tensor) -> list[Tensor]:
        """One view a member, of this or other memory."""
        views, start = [], 0
        for member in self._members:
            views.append(flat.as_strided(member.shape, member.stride, start))
            start += member.numel
        return views

    def _is_held(self, flat: Tensor) -> bool:
        """Whether somebody has kept a gradient of the last round, or a view of one."""
        if num_storage_references(flat) > 1 + len(self.views):
            return True
        views = self.views
        if sum(map(sys.getrefcount, views)) == _OWN_REFERENCES * len(views):  # the common case, in one go
            return False
        return any(
            sys.getrefcount(views[position]) > _OWN_REFERENCES and member.param.grad is not views[position]
            for position, member in enumerate(self._members)
        )


def num_storage_references(tensor: Tensor) -> int:
    """How many tensors lie in ``tensor``'s memory."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1
