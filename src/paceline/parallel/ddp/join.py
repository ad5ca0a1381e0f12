"""Training on while some ranks have run out of data: torch's ``join``.

A rank that has no more batches keeps the others company: it takes part in what they exchange and brings nothing. Each
training forward begins with a roll call, from which all learn who is live and whether a backward will average:

    live rank      roll call -> buffers -> forward, backward: a round
    joined rank    roll call -> buffers ->                    a round without gradients

Several wrappers may join together, whose forwards all come before their backward. So a joined rank calls the roll of
all of them before it waits for any round.

The invariant: ranks leave only between rounds, and at the end all hold the weights of those that were live last.
"""

import contextlib
import itertools
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook, _JoinConfig

from paceline.parallel.live import declare_live, forget_live
from paceline.parallel.replicas.broadcast import broadcast_tensors

if TYPE_CHECKING:
    from paceline.parallel.ddp.wrapper import DistributedDataParallel


class Stateful(Protocol):
    """What an optimizer, a scheduler and a GradScaler have in common."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> object: ...


class Joining(Join):
    """torch's context manager, which leaves no trace in the wrapper when it is over."""

    def __exit__(
        self, type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            with contextlib.ExitStack() as afterwards:
                for joinable in self._joinables:
                    afterwards.callback(_leave, joinable)
                super().__exit__(type, value, traceback)
        finally:
            for joinable in self._joinables:
                joinable._join_config = _JoinConfig.construct_disabled_join_config()  # type: ignore[no-untyped-call]


_numbers = itertools.count()
# The hooks that joins under way have made, by their wrappers' group; those of one join come one after another.
_cohorts: "weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakSet[ShadowHook]]" = weakref.WeakKeyDictionary()


def _leave(joinable: Any) -> None:
    forget_live(joinable.join_process_group)


def call_roll(group: dist.ProcessGroup, *, is_live: bool, will_sync: bool) -> tuple[list[int], bool]:
    """Which ranks are live, in the group's own numbers, and whether any of them will average. A collective call."""
    mine = torch.tensor([is_live, is_live and will_sync], dtype=torch.uint8, device="cpu")
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, mine, group=group)
    told = torch.stack(everyones).tolist()
    return [rank for rank, (lives, _) in enumerate(told) if lives], any(syncs for _, syncs in told)


class ShadowHook(JoinHook):
    """What a wrapper does on a rank that has run out of data.

    Args:
        divides_by_initial: whether gradients are divided by the number of all ranks, rather than of the live ones.
        states: what else must be equal on all ranks in the end.
    """

    def __init__(
        self, wrapper: "DistributedDataParallel", *, divides_by_initial: bool, states: Iterable[Stateful]
    ) -> None:
        self._wrapper = wrapper
        self._states = list(states)
        self._own_gradients: list[torch.Tensor | None] | None = None
        self._has_begun = False
        wrapper._divides_by_initial = divides_by_initial
        self._cohort = _cohorts.setdefault(wrapper.process_group, weakref.WeakSet())
        self._cohort.add(self)
        self.number = next(_numbers)

    def main_hook(self) -> None:
        """Take part in one step of the others."""
        reducer = self._wrapper._reducer
        if reducer is None:
            return
        if self._own_gradients is None:
            self._own_gradients = [param.grad for param in self._wrapper.module.parameters()]
        source, will_sync = self._wrapper._attend(is_live=False)
        if will_sync:
            if self._wrapper.forward_sync_buffers:
                self._wrapper._sync_buffers(source)
            reducer.begin_shadow_round()
            self._has_begun = True
        if self.number == max(hook.number for hook in self._cohort):
            for hook in sorted(self._cohort, key=lambda hook: hook.number):
                hook.finish()
            reducer.raise_observer_error()

    def finish(self) -> None:
        """Wait for the round, if one has begun."""
        if self._has_begun:
            self._has_begun = False
            assert self._wrapper._reducer is not None
            self._wrapper._reducer.finish_round()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have run out: make the last ones' model everybody's."""
        wrapper = self._wrapper
        self._cohort.discard(self)
        replica = wrapper._replica
        if replica is None or replica.reducer is None:
            return
        group = wrapper.process_group
        mine = dist.get_group_rank(group, dist.get_rank()) if is_last_joiner else -1
        last = torch.tensor([mine], device=wrapper.device)
        dist.all_reduce(last, op=dist.ReduceOp.MAX, group=group)
        source = int(last)
        buffers = replica.registry.buffers() if wrapper.forward_sync_buffers else []
        broadcast_tensors([*replica.registry.params, *buffers], group, source)
        for state in self._states:
            told = [state.state_dict()]
            dist.broadcast_object_list(told, group=group, group_src=source)
            if mine != source:
                state.load_state_dict(told[0])
        if self._own_gradients is not None:
            for param, grad in zip(wrapper.module.parameters(), self._own_gradients, strict=True):
                param.grad = grad
        replica.reducer.averaging.num_live = dist.get_world_size(group)
        forget_live(group)


def note_live(wrapper: "DistributedDataParallel", live: list[int]) -> None:
    """Have gradients, and what asks ``live_group``, follow who is live."""
    assert wrapper._reducer is not None
    group = wrapper.process_group
    size = dist.get_world_size(group)
    wrapper._reducer.averaging.num_live = size if wrapper._divides_by_initial else len(live)
    ranks = dist.get_process_group_ranks(group)
    declare_live(group, [ranks[rank] for rank in live], divides_by_initial=wrapper._divides_by_initial)
