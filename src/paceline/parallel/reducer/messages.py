"""What a reducer tells the other ranks when its backward is over, and what it hears of them.

The invariant: every rank sends as many messages as every other, of equal sizes, whatever its backward has done.
"""

import itertools
from collections.abc import Container, Sequence

import torch.distributed as dist

from paceline.errors import ReplicaMismatchError
from paceline.parallel.buckets.bucket import Bucket
from paceline.parallel.fields import Kinds, have_grad, kinds_on_any_rank, trainable
from paceline.parallel.reducer.control import Control, PendingControl
from paceline.parallel.reducer.explain import (
    Explained,
    raise_first_difference,
    raise_if_hooks_differ,
    raise_if_some_failed,
)
from paceline.parallel.replicas.digests import digest_of
from paceline.parallel.replicas.registry import Registry


class Messages:
    """The control messages of one reducer.

    Attributes:
        trainable: by parameter, 1 where it trained when the last message was sent.
    """

    def __init__(self, registry: Registry, group: dist.ProcessGroup) -> None:
        self.trainable = b""
        self._registry = registry
        self._group = group
        self._state: object = None  # of which ``_digest`` was made
        self._digest = b""
        self._num_failed = 0
        self._hook: str | None = None

    def send(
        self,
        buckets: Sequence[Bucket],
        planned: Container[int],
        kinds: Kinds,
        weights: bytes | None,
        *,
        hook: str | None,
        is_recast: bool,
        num_failed: int,
    ) -> PendingControl:
        """Tell all ranks what this one has. A collective call.

        Args:
            planned: ids of the parameters in the plan.
            kinds: dtypes, shapes and devices for which the plan was made.
            weights: a digest of samples of them; None on a rank that only keeps the others company.
            hook: the name of the user's own way to average; None where there is none.
            is_recast: whether parameters are no longer of these kinds.
            num_failed: how many backwards have raised an error here.
        """
        is_late = bytes(bucket.is_late() for bucket in buckets)
        is_changed = is_recast or self._registry.has_changed()
        mine = Control(
            self._has_gradient(buckets, planned, any(is_late)),
            is_late,
            is_changed,
            is_hooked=weights is not None and hook is not None,
            is_unhooked=weights is not None and hook is None,
        )
        self.trainable = trainable(self._registry.params)
        state = self.trainable, kinds, num_failed, hook
        if state != self._state:
            content = self.trainable, kinds_on_any_rank(kinds), num_failed, hook
            self._state, self._digest = state, digest_of(repr(content).encode())
        self._num_failed, self._hook = num_failed, hook
        with self._explained():
            return PendingControl(mine, None if weights is None else (self._digest, weights), self._group)

    def hear(self, pending: PendingControl) -> Control:
        """What all have told."""
        with self._explained():
            return pending.result()

    def check_hooks(self, control: Control) -> None:
        """Raise if some ranks wait for buckets that others average in another way. No collective call: that would wait.

        Raises:
            ReplicaMismatchError: on every rank.
        """
        if control.is_hooked and control.is_unhooked:
            mine = "none" if self._hook is None else self._hook
            raise ReplicaMismatchError(
                f"some ranks have a communication hook, and others none: rank {dist.get_rank()} has {mine}. Call "
                "register_comm_hook alike on every rank, and start anew: gradients are under way that will not arrive."
            )

    def check(self, control: Control) -> None:
        """Raise if the ranks do not train alike. A collective call where they do not, with nothing else under way.

        Raises:
            ReplicaMismatchError: on every rank, naming what differs: their communication hooks, or the first parameter
                that is frozen, or cast, on some only.
            ReductionError: on every rank: a backward has failed on some ranks only, so they are one apart.
        """
        if not control.is_same_state and not control.is_changed:
            raise_if_some_failed(self._num_failed, self._group)
            raise_if_hooks_differ(self._hook, self._group)
            states = [(param.requires_grad, str(param.dtype)) for param in self._registry.params]
            raise_first_difference(self._registry.names, states, self._group)

    def _has_gradient(self, buckets: Sequence[Bucket], planned: Container[int], some_are_late: bool) -> bytes:
        """By parameter, 1 where this rank has a gradient of it that is to be averaged.

        A frozen parameter may keep one of earlier times: averaged as long as the plan has it, then left alone.
        """
        params = self._registry.params
        is_all_planned = sum(len(bucket.indices) for bucket in buckets) == len(params)
        if is_all_planned and not some_are_late:
            if all(len(bucket.contributors) == len(bucket.indices) for bucket in buckets):  # the common case
                return b"\1" * len(params)
            has = bytearray(len(params))
        else:
            has = bytearray(have_grad(params))
            for index in itertools.compress(range(len(has)), bytes(has)):
                has[index] = params[index].requires_grad or id(params[index]) in planned
        for bucket in buckets:
            for index in bucket.contributors:
                has[index] = 1
        return bytes(has)

    def _explained(self) -> Explained:
        return Explained(None, (), dist.get_world_size(self._group))
