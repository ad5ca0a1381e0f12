"""A bucket that a communication hook averages: the user's own way, as ``register_comm_hook`` of torch has it.

    hook(state, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]

The hook finds this rank's gradients in ``bucket.buffer()``, not divided by anything, and its future holds what they are
to become. torch's shipped hooks (torch.distributed.algorithms.ddp_comm_hooks) work as they are.

The invariant: a hook is called for each bucket once a round, in the plan's order, on all ranks; and then once more for
each that has gradients which came late on some rank, since only the hook knows what is made of gradients.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import ReductionError
from paceline.parallel.buckets.bucket import Member
from paceline.parallel.buckets.dense import DenseBucket

Hook: TypeAlias = "Callable[[Any, Any], torch.futures.Future[Any]]"


class GradBucket:
    """One bucket's gradients, as a hook sees them; torch's class of that name cannot be made from Python."""

    def __init__(
        self, index: int, is_last: bool, buffer: Tensor, views: Sequence[Tensor], params: list[Tensor]
    ) -> None:
        self._index = index
        self._is_last = is_last
        self._buffer = buffer
        self._views = views
        self._params = params

    def index(self) -> int:
        """The bucket's number in the order of launches."""
        return self._index

    def buffer(self) -> Tensor:
        """All gradients, flat: (elements,)."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Each parameter's part of ``buffer``, in its shape."""
        views, start = [], 0
        for view in self._views:
            views.append(self._buffer.as_strided(view.shape, view.stride(), self._buffer.storage_offset() + start))
            start += view.numel()
        return views

    def parameters(self) -> list[Tensor]:
        return list(self._params)

    def is_last(self) -> bool:
        """Whether it is the round's last."""
        return self._is_last

    def set_buffer(self, buffer: Tensor) -> None:
        """Put another tensor in the place of ``buffer``, of as many elements."""
        self._buffer = buffer


class HookedBucket(DenseBucket):
    """A bucket that a hook averages.

    Args:
        is_average: whether the hook gives the average over all ranks; else what it gives is the user's.
    """

    kind = "hooked"
    divides = False

    def __init__(
        self,
        number: int,
        members: Sequence[Member],
        world_size: int,
        state: object,
        hook: Hook,
        *,
        is_last: bool,
        is_average: bool,
    ) -> None:
        super().__init__(number, members, world_size)
        self._state, self._hook, self._is_last, self._is_average = state, hook, is_last, is_average
        self._future: torch.futures.Future[Any] | None = None

    def send(self, group: dist.ProcessGroup) -> None:  # noqa: ARG002
        self._future = self._call(self._memory.flat, self._memory.views, is_last=self._is_last)

    def _call(self, buffer: Tensor, views: Sequence[Tensor], *, is_last: bool) -> "torch.futures.Future[Any]":
        future = self._hook(self._state, GradBucket(self.number, is_last, buffer, views, list(self._params)))
        if not hasattr(future, "wait"):  # some futures of c10d's are of C++'s class
            raise TypeError(
                f"communication hook {name_of(self._hook)}: expected a torch.futures.Future of the averaged tensor, "
                f"but it returned {type(future).__name__}."
            )
        return future

    def wait(self) -> None:
        if self._future is None:
            return
        future, self._future = self._future, None
        averaged = self._result_of(future)
        if averaged.data_ptr() != self._memory.flat.data_ptr() or averaged.dtype != self._memory.flat.dtype:
            self._memory.flat.copy_(averaged.view(-1))

    def reduce_late(self, group: dist.ProcessGroup) -> None:
        if self._is_average:
            super().reduce_late(group)
            return
        late = self._take_late(1.0)
        self._memory.flat.add_(self._result_of(self._call(late, self._memory.carve(late), is_last=False)).view(-1))

    def _result_of(self, future: "torch.futures.Future[Any]") -> Tensor:
        """What it holds, if it can be the bucket's."""
        value = future.wait()
        averaged = value[0] if isinstance(value, (list, tuple)) else value
        if not isinstance(averaged, Tensor) or averaged.numel() != self._memory.flat.numel():
            found = f"one of shape {tuple(averaged.shape)}" if isinstance(averaged, Tensor) else type(averaged).__name__
            raise ReductionError(
                f"rank {dist.get_rank()}: communication hook {name_of(self._hook)} gave {found} for bucket "
                f"{self.number}; expected a tensor of {self._memory.flat.numel()} elements, as bucket.buffer() is."
            )
        return averaged

    def when_ended(self, tell: Callable[[object], None]) -> None:
        future: Any = self._future
        if hasattr(future, "add_done_callback"):  # of a hook's future no more is asked than that it can wait
            future.add_done_callback(tell)

    def rescale(self, factor: float) -> None:
        """What a user's hook makes of the gradients is left as it is."""
        if self._is_average:
            super().rescale(factor)


def name_of(hook: object) -> str:
    return str(getattr(hook, "__qualname__", None) or type(hook).__name__)
