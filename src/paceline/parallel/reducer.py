"""The reducer: averages gradients over the ranks while backward still computes others.

One mode, always right. A *round* is one outermost backward:

    hook of p fires     p's bucket counts down; full buckets are launched, in the plan's order    } overlap
    outermost task ends the rest are launched: every rank launches every bucket exactly once      }
                        a control message says which parameters anybody used, what came late, who changed its model
                        late gradients are reduced once more; p.grad becomes the average

The invariant: on every rank the same collectives run in the same order, whatever the ranks' graphs look like. Order
depends only on the plan and on the control message, which are the same everywhere; a rank's own arrival times decide
only *when* it launches. So no pattern of use can hang, and what the prediction missed is put right by reducing again.

Averaging is idempotent and linear, which is why gradients that were accumulated before (under ``no_sync``, or by an
earlier round) are simply part of what is averaged.
"""

import functools
import itertools
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn import Parameter

from paceline.errors import ReductionError, ReplicaMismatchError
from paceline.parallel.agreement import all_gather_object
from paceline.parallel.bucket import Bucket, Member, SparseBucket, layout_of
from paceline.parallel.channels import Channels
from paceline.parallel.control import Control, PendingControl
from paceline.parallel.registry import Registry
from paceline.parallel.rounds import Round
from paceline.plan import ParamSpec, plan_buckets

_numbers = itertools.count()


class Reducer:
    """Keeps the gradients of ``registry``'s parameters equal on all ranks."""

    def __init__(self, registry: Registry, channels: Channels, *, cap_bytes: int, first_cap_bytes: int) -> None:
        self.sync = True  # False within no_sync: gradients then stay local
        self.number = next(_numbers)
        self._registry = registry
        self._channels = channels
        self._world_size = dist.get_world_size(channels.gradients)
        self._caps = {"cap_bytes": cap_bytes, "first_cap_bytes": first_cap_bytes}
        self._round: Round | None = None
        self._failure = ""
        self.has_run = False  # once it has, the order in which gradients arrive is known
        self._hooks: dict[Parameter, torch.utils.hooks.RemovableHandle] = {}
        self._order = list(range(len(registry.params)))[::-1]
        self._expected = [True] * len(registry.params)
        self._replan()
        self._hook_parameters()
        registry.on_change = _weakly(self, Reducer._hook_parameters)
        weakref.finalize(self, _remove_all, self._hooks)

    # -- before and during backward ------------------------------------------------------------------------------

    def watch(self, output: torch.Tensor) -> None:
        """Let the backward that starts from ``output`` own its round, so that tasks nested in it do not end it."""
        if output.grad_fn is not None:
            output.grad_fn.register_prehook(self._before_backward)

    def _before_backward(self, _: object) -> None:
        if self.sync:
            self.open_round()

    def open_round(self) -> Round:
        """The round in progress; opened by the first that asks within a backward.

        [Note: the outermost task] Autograd runs callbacks at the end of the graph task in which they were queued, and
        reentrant checkpointing nests tasks. The task that opens the round ends it. Where the model's forward was
        called, a hook on its output opens it, in the outermost task. Where it was bypassed, the first gradient does;
        then a nested task may be a round of its own, which is still right.
        """
        if self._round is not None and not self._round.is_abandoned():
            return self._round
        self._check_usable()
        for bucket in self._buckets:
            bucket.prepare(self._expected)
        preexisting = {index for index, param in enumerate(self._registry.params) if param.grad is not None}
        self._round = Round(preexisting, self)
        return self._round

    def _arrived(self, param: Parameter) -> None:
        """Runs whenever autograd has accumulated into ``param.grad``."""
        if not self.sync:
            return
        current = self._round
        if current is None or current.is_abandoned():
            current = self.open_round()
        place = self._place_of.get(id(param))
        if place is None:  # replaced or unfrozen since the last plan: dealt with when the round ends
            return
        index, bucket = place
        bucket.note_stream(param)
        if bucket.launched or index in current.arrived:
            return  # late, or once more: both are in param.grad, which is looked at later
        current.arrived[index] = None
        if self._expected[index]:
            bucket.missing -= 1
            if bucket.missing == 0:
                self._launch_ready(current)

    def _launch_ready(self, current: Round, everything: bool = False) -> None:
        """Launch buckets in the plan's order, up to the first that still waits for a gradient."""
        while current.num_launched < len(self._buckets):
            bucket = self._buckets[current.num_launched]
            if bucket.missing > 0 and not everything:
                return
            current.num_launched += 1  # first: if the launch fails, the round is known to have begun
            with torch.no_grad(), self._explained(bucket):
                bucket.launch(self._channels.gradients, current.preexisting)

    # -- at the end of backward ----------------------------------------------------------------------------------

    @torch.no_grad()
    def send_all(self) -> None:
        """All gradients are there: launch what has not been launched, and the control message."""
        assert self._round is not None
        self._launch_ready(self._round, everything=True)
        self._round.told = self._send_control(self._buckets)

    @torch.no_grad()
    def finish_round(self) -> None:
        """Wait for the averages, put right what came late, and make them the parameters' gradients."""
        current, self._round = self._round, None
        assert current is not None
        assert current.told is not None
        self._failure = "the backward before this one failed while gradients were being averaged"
        told = self._complete(self._buckets, current.told)
        self._settle(told, current)
        self._failure = ""

    def _send_control(self, buckets: Sequence[Bucket]) -> PendingControl:
        """Tell all ranks what this one has. A collective call."""
        changed = self._registry.notice_changes()
        trainable = [param.requires_grad for param in self._registry.params]
        # A frozen parameter may keep a gradient of earlier times: averaged as long as the plan has it, then left alone.
        used = [
            has and (trains or id(param) in self._place_of)
            for has, trains, param in zip(self._has_gradient(buckets), trainable, self._registry.params, strict=True)
        ]
        mine = Control(used, [bucket.is_late() for bucket in buckets], changed)
        with self._explained(None):
            return PendingControl(mine, trainable, self._channels.control)

    def _hear(self, pending: PendingControl) -> Control:
        with self._explained(None):
            told = pending.result()
        if not told.same_state and not told.changed:
            self._explain_frozen()
        return told

    def _has_gradient(self, buckets: Sequence[Bucket]) -> list[bool]:
        has = [param.grad is not None for param in self._registry.params]
        for bucket in buckets:
            for index in bucket.contributors:
                has[index] = True
        return has

    def _complete(self, buckets: Sequence[Bucket], pending: PendingControl) -> Control:
        for bucket in buckets:
            with self._explained(bucket):
                bucket.wait()
        told = self._hear(pending)
        for bucket, late in zip(buckets, told.late, strict=True):
            if late:
                with self._explained(bucket):
                    bucket.reduce_late(self._channels.gradients)
            bucket.give(told.used)
        return told

    def _settle(self, told: Control, current: Round) -> None:
        """Bring the plan up to date, and reduce what the old one did not have."""
        registry = self._registry
        planned = {registry.names[index] for bucket in self._buckets for index in bucket.indices}
        bases: dict[int, torch.Tensor] = {}
        if told.changed:
            before = dict(zip(registry.names, registry.params, strict=True))
            news = registry.agree_anew(self._channels.control)
            self._order = list(range(len(registry.params)))[::-1]
            self._hook_parameters()
            self._replan()
            told = self._hear(self._send_control([]))
            planned -= set(news)
            bases = self._set_aside(before, [name for name, ranks in news.items() if ranks < self._world_size])
        elif not self.has_run:
            self._learn_order(current)
            self._replan()
        elif self._planned_for != tuple(param.requires_grad for param in registry.params):
            self._replan()
        self._expected = list(told.used)
        unplanned = [index for index, used in enumerate(told.used) if used and registry.names[index] not in planned]
        if unplanned:
            buckets = self._make_buckets(unplanned)
            for bucket in buckets:
                with self._explained(bucket):
                    bucket.launch(self._channels.gradients, current.preexisting)
            for bucket in buckets:
                with self._explained(bucket):
                    bucket.wait()
                bucket.give(told.used)
        for index, base in bases.items():
            grad = registry.params[index].grad
            registry.params[index].grad = base if grad is None else grad + base

    def _set_aside(self, before: dict[str, Parameter], names: Sequence[str]) -> dict[int, torch.Tensor]:
        """For parameters replaced on some ranks only: what has been averaged of them, by index.

        Ranks that kept theirs have contributed already; the newcomers' gradients, averaged by themselves, are added.
        """
        bases: dict[int, torch.Tensor] = {}
        for name in names:
            index = self._registry.names.index(name)
            param = self._registry.params[index]
            averaged = before[name].grad if name in before else None
            if averaged is not None:
                bases[index] = averaged
            if before.get(name) is param:
                param.grad = None
        return bases

    # -- the plan ------------------------------------------------------------------------------------------------

    def _replan(self) -> None:
        """Plan buckets for the parameters that train now. The same on all ranks: so are order and flags."""
        params = self._registry.params
        self._planned_for = tuple(param.requires_grad for param in params)
        self._buckets = self._make_buckets([index for index in self._order if params[index].requires_grad])
        # By the parameter's id: a hook runs for each parameter in each step, and Python's hash of a tensor is slow.
        self._place_of = {id(m.param): (m.index, bucket) for bucket in self._buckets for m in bucket.members}

    def _make_buckets(self, indices: Sequence[int]) -> list[Bucket]:
        registry = self._registry
        specs = []
        for index in indices:
            param = registry.params[index]
            kind, sparse = f"{param.dtype} {param.device}", index in registry.sparse
            specs.append(ParamSpec(index, param.numel(), param.element_size(), kind, sparse))
        buckets: list[Bucket] = []
        for number, members_of in enumerate(plan_buckets(specs, **self._caps).buckets):
            members = [
                Member(index, registry.params[index], layout_of(registry.params[index], registry.strides[index]))
                for index in members_of
            ]
            make = SparseBucket if members[0].index in registry.sparse else Bucket
            buckets.append(make(number, members, self._world_size))
        return buckets

    def _learn_order(self, current: Round) -> None:
        """Once: order parameters as their gradients arrived on the first rank. A collective call."""
        arrived = list(current.arrived)
        rest = [index for index in self._order if index not in current.arrived]
        order = torch.tensor(arrived + rest, dtype=torch.int64)
        with self._explained(None):
            dist.broadcast(order, group=self._channels.control, group_src=0)
        self._order = order.tolist()
        self.has_run = True

    def _hook_parameters(self) -> None:
        """Hook each parameter once, frozen ones too: a hook outlives freezing, so no forward is needed to unfreeze."""
        present = list(self._registry.present())
        for param in self._hooks.keys() - set(present):
            self._hooks.pop(param).remove()
        for param in present:
            if param in self._hooks or not (param.is_floating_point() or param.is_complex()):
                continue
            frozen = not param.requires_grad
            if frozen:
                param.requires_grad_(True)  # torch refuses to hook a frozen tensor
            hook = _weakly(self, Reducer._arrived)
            self._hooks[param] = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            if frozen:
                param.requires_grad_(False)

    # -- errors --------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._round is not None and self._round.num_launched == 0:
            self._round = None  # a backward that failed before anything was sent: the other ranks wait for this one
        if self._round is not None:
            self._failure = "the backward before this one raised an error after part of its gradients had been sent"
        if self._failure:
            raise ReductionError(
                f"rank {dist.get_rank()}: {self._failure}. The ranks no longer agree on what comes next: end them all "
                "and start from a checkpoint. The first error names the cause."
            )

    def _explained(self, bucket: Bucket | None) -> "_Explained":
        return _Explained(self._registry, bucket, self._world_size)

    def _explain_frozen(self) -> None:
        """Raise on every rank, naming the first parameter that is frozen on some ranks only."""
        trainable = [param.requires_grad for param in self._registry.params]
        everyones = all_gather_object(trainable, self._channels.control)
        ranks = dist.get_process_group_ranks(self._channels.control)
        for name, flags in zip(self._registry.names, zip(*everyones, strict=True), strict=True):
            if len(set(flags)) > 1:
                trains, frozen = ranks[flags.index(True)], ranks[flags.index(False)]
                raise ReplicaMismatchError(
                    f"{name!r} has requires_grad=True on rank {trains} and False on rank {frozen}. Freeze and unfreeze "
                    "parameters on every rank alike."
                )


class _Explained:
    """Turns an error of c10d into one that says what was being averaged, and on which rank."""

    def __init__(self, registry: Registry, bucket: Bucket | None, world_size: int) -> None:
        self._registry, self._bucket, self._world_size = registry, bucket, world_size

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, (ReductionError, ReplicaMismatchError)):
            return
        if self._bucket is None:
            what = "the control message"
        else:
            names = [self._registry.names[index] for index in self._bucket.indices]
            span = repr(names[0]) if len(names) == 1 else f"{names[0]!r} to {names[-1]!r}"
            what = f"bucket {self._bucket.number} ({span}, {len(names)} parameters)"
        raise ReductionError(
            f"rank {dist.get_rank()}: {what} could not be reduced over {self._world_size} ranks. Most often another "
            f"rank has ended or is stuck; its output says why. The backend reports: {error}"
        ) from error


def _weakly(owner: Reducer, method: "object") -> "functools.partial[None]":
    """A bound method that does not keep ``owner`` alive, and does nothing once it is gone."""
    return functools.partial(_call_if_alive, weakref.ref(owner), method)


def _call_if_alive(owner: "weakref.ref[Reducer]", method: object, *args: object) -> None:
    reducer = owner()
    if reducer is not None:
        method(reducer, *args)  # type: ignore[operator]


def _remove_all(hooks: "dict[Parameter, torch.utils.hooks.RemovableHandle]") -> None:
    for handle in hooks.values():
        handle.remove()
    hooks.clear()
