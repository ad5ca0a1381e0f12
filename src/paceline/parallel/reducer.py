"""The reducer: averages gradients over the ranks while backward still computes others.

One mode, always right. A *round* is one outermost backward:

    a gradient arrives    its bucket counts down; complete buckets are launched, in the plan's order   } overlap
    the backward ends     the rest are launched: every rank launches every bucket exactly once         }
                          a control message says which parameters anybody used, what came late, who changed its model
                          late gradients are reduced once more; param.grad becomes the average

The invariant: in every round all ranks run the same collectives in the same order, whatever their graphs look like.
Order depends only on the plan and on the control message, which are the same everywhere; a rank's own arrival times
decide only *when* it launches. So ranks that run equally many rounds cannot hang, and what the prediction missed is put
right by reducing again.

Why that is right: averaging is linear, so a gradient that came late can be averaged by itself and added. It is also
idempotent, so what is already the average (accumulated by an earlier round) stays what it is when averaged again.
"""

import gc
import itertools
import weakref
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.nn import Parameter

from paceline.errors import ReductionError, ReplicaMismatchError
from paceline.parallel.bucket import Bucket
from paceline.parallel.channels import Channels
from paceline.parallel.comm_hooks import Hook
from paceline.parallel.control import NO_DIGEST, Control, PendingControl
from paceline.parallel.drift import DriftWatch
from paceline.parallel.explain import Explained
from paceline.parallel.fields import have_grad, kinds
from paceline.parallel.hooks import GradientHooks, weakly
from paceline.parallel.in_backward import step_in_backward
from paceline.parallel.messages import Messages
from paceline.parallel.planning import Planner
from paceline.parallel.registry import Registry
from paceline.parallel.report import Report, report_of
from paceline.parallel.rounds import Round, opener
from paceline.parallel.witness import Counts, Witness
from paceline.timeline import Measured, Observer

_NOWHERE: tuple[int, Bucket | None] = (-1, None)

_numbers = itertools.count()
_living: "weakref.WeakSet[Reducer]" = weakref.WeakSet()


class Reducer:
    """Keeps the gradients of ``registry``'s parameters equal on all ranks.

    Args:
        caps_bytes: of the buckets, in turn; see ``plan_buckets``.
        detects_drift: whether weights are compared; alike on all ranks.

    Attributes:
        sync: whether backwards average; False within ``no_sync``.
        steps_in_backward: whether parameters have optimizers that step when their gradient is there.
        num_live: how many ranks the gradients are divided by, where some have run out of data.
        counts: what has happened so far.
        witness: tells observers, if there are any.
        number: in the order in which reducers were made, which is the same on all ranks.
        planner: has the plan that is in force.
    """

    def __init__(
        self, registry: Registry, channels: Channels, caps_bytes: Sequence[int], *, detects_drift: bool
    ) -> None:
        self.sync = True
        self.counts = Counts()
        self.witness: Witness | None = None
        self.number = next(_numbers)
        self._registry = registry
        self._channels = channels
        self._world_size = dist.get_world_size(channels.gradients)
        self.steps_in_backward = False
        self.num_live = self._world_size
        self._drift = DriftWatch() if detects_drift else None
        self._round: Round | None = None
        self._failure = ""
        self._num_failed = 0  # backwards that raised an error after gradients had come
        self._is_recast = False  # whether parameters are not what the plan in force was made for
        self._messages = Messages(registry, channels.control)
        self._hooks = GradientHooks(self._arrived)
        self._expected = [True] * len(registry.params)
        self.planner = Planner(registry, self._world_size, caps_bytes, channels.averages)
        self._follow_parameters()
        registry.on_newcomer = weakly(self._follow_parameters)
        _living.add(self)

    def use_hook(self, state: object, hook: Hook, *, keeps_replicas_equal: bool) -> None:
        """Have ``hook(state, bucket)`` average all planned gradients that are not sparse. Once."""
        if self.planner.hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self.planner.hook = state, hook
        if not keeps_replicas_equal:
            self._drift = None
        self._replan()

    def observe(self, observers: Sequence[Observer]) -> None:
        """Tell these of what happens, and no others any more; at no cost where there are none."""
        before = self.witness
        self.witness = Witness(observers, self._registry.params[0].device, dist.get_rank()) if observers else None
        if before is not None:
            before.flush()
            before.raise_error()

    def report(self, measured: Measured | None) -> Report:
        """What is known here."""
        names, counts = self._registry.names, self.counts
        return Report(
            dist.get_rank(),
            self._world_size,
            dist.get_backend(self._channels.gradients),
            caps_bytes=self.planner.caps_bytes,
            buckets=report_of(self.planner.buckets, names),
            num_rounds=counts.rounds,
            num_replans=counts.replans,
            num_late=counts.late,
            num_unplanned=counts.unplanned,
            unused=tuple(names[i] for bucket in self.planner.buckets for i in bucket.indices if not self._expected[i]),
            detects_drift=self._drift is not None,
            measured=measured,
        )

    @property
    def has_run(self) -> bool:
        """Whether a round has ended."""
        return self.counts.rounds > 0

    # -- before and during backward ------------------------------------------------------------------------------

    def watch(self, output: torch.Tensor) -> None:
        """Let the backward that starts from ``output`` own its round, so that tasks nested in it do not end it."""
        if output.grad_fn is not None:
            # Weakly: the graph may be held by the model, in a cycle that the garbage collector cannot see.
            output.grad_fn.register_prehook(opener(self))

    def open_round(self) -> Round:
        """The round in progress; opened by the first that asks within a backward.

        [Note: the outermost task] Autograd runs callbacks at the end of the graph task in which they were queued, and
        reentrant checkpointing nests tasks. The task that opens the round ends it. Where the model's forward was
        called, a hook on its output opens it, in the outermost task. Where it was bypassed, the first gradient does;
        then a nested task may be a round of its own, which is right as long as tasks nest alike on all ranks.
        """
        if self._round is not None and not self._round.is_abandoned():
            return self._round
        self._check_usable()
        self._prepare()
        preexisting = set(itertools.compress(itertools.count(), have_grad(self._registry.params)))
        if self._drift is not None:
            self._drift.look(self._registry.params, self.counts.rounds)
        if self.witness is not None:
            self.witness.begin(self.counts.rounds, self.planner.buckets, self._registry.names)
        self._round = Round(preexisting, self, self._task_is_over)
        self._hooks.open_gate()
        return self._round

    def _prepare(self) -> None:
        """Begin a round on all buckets.

        Where the model was cast, moved or resized, the others may not know: the plan is that of before, without the
        parameters concerned, and the end of the round makes a new one.
        """
        self._is_recast = kinds(self._registry.params) != self.planner.kinds
        for bucket in self.planner.buckets:
            if self._is_recast:
                bucket.note_misfits()
            bucket.prepare(self._expected)

    def _task_is_over(self) -> None:
        """The backward has ended; where it raised an error, what was taken is this rank's gradient again."""
        self._hooks.close_gate()
        for bucket in self.planner.buckets:
            bucket.give_back()

    def has_gradients(self) -> bool:
        """Whether any gradient came in the round; autograd.grad passes through a model and leaves none."""
        assert self._round is not None
        self._take_noted(self._round)
        return self._round.is_touched

    def _arrived(self, param: Parameter) -> None:
        """Runs whenever autograd has accumulated into ``param.grad``."""
        if not self.sync:
            return
        current = self._round
        if current is None or current.is_abandoned():
            current = self.open_round()
        if current.is_ready:
            self._launch_complete(current)
        self._take_noted(current)
        if not param.is_cpu and (place := self.planner.place_of.get(id(param))) is not None:
            place[1].note_stream(param)
        bucket = self._count([param], current)
        if bucket is None:
            return
        # Where the user has hooks on this parameter too, they may come after ours and are to find its gradient: then
        # the bucket is launched when the next gradient arrives.
        is_ours = len(param._post_accumulate_grad_hooks) == 1
        if is_ours:
            with torch.no_grad():
                bucket.take(self._place(param)[0], current.preexisting)
        if bucket.num_missing == 0:
            current.is_ready = not is_ours
            if is_ours:
                self._launch_complete(current)

    def _take_noted(self, current: Round) -> None:
        """Count the gradients that came through the gate. [Note: the gate]"""
        noted = self._hooks.noted
        if noted:
            self._count(noted, current)
            if current.has_strays:
                self._warn_of_departed(noted)
            noted.clear()

    def _warn_of_departed(self, params: Iterable[Parameter]) -> None:
        for param in params:
            if id(param) not in self.planner.place_of:
                self._registry.warn_of_departed(param)

    def _count(self, params: Iterable[Parameter], current: Round) -> Bucket | None:
        """Count gradients that have arrived; the bucket of the last, if that may be complete with it."""
        current.is_touched = True
        arrived, expected, bucket = current.arrived, self._expected, None
        for index, bucket_of_it in map(self._place, params):
            bucket = None
            if bucket_of_it is None or bucket_of_it.is_launched or index in arrived:
                # Replaced or unfrozen since the last plan; or late, or once more: all that is dealt with later.
                current.has_strays = current.has_strays or bucket_of_it is None
                continue
            arrived[index] = None
            if expected[index]:
                bucket = bucket_of_it
                bucket.num_missing -= 1
        return bucket

    def _place(self, param: Parameter) -> tuple[int, Bucket | None]:
        return self.planner.place_of.get(id(param), _NOWHERE)

    def _follow_parameters(self) -> None:
        """Hook all parameters; be told at once of the last that is expected in each bucket, the huge, all on GPUs."""
        chosen = {id(param) for param in self._registry.params if not param.is_cpu}
        for bucket in self.planner.buckets:
            chosen.update(map(id, bucket.at_once()))
            expected = [member.param for member in bucket.members if self._expected[member.index]]
            chosen.add(id((expected or [bucket.members[-1].param])[-1]))
        self._hooks.follow(self._registry.present(), chosen)

    def _launch_complete(self, current: Round, everything: bool = False) -> None:
        """Launch buckets in the plan's order, up to the first that still waits for a gradient."""
        current.is_ready = False
        if self.witness is not None:
            self.witness.look()
        while current.num_launched < len(self.planner.buckets):
            bucket = self.planner.buckets[current.num_launched]
            if bucket.num_missing > 0 and not everything:
                return
            self._launch(bucket, current, self.witness)
            current.num_launched += 1

    def _launch(self, bucket: Bucket, current: Round, witness: Witness | None = None) -> None:
        with torch.no_grad():
            bucket.pack(current.preexisting)
            self._channels.is_idle = False
            before = None if witness is None else witness.now()
            with self._explained(bucket):
                bucket.send(self._channels.gradients)
            if witness is not None and before is not None:
                witness.sent(bucket, before)

    # -- at the end of backward ----------------------------------------------------------------------------------

    @torch.no_grad()
    def send_rest(self) -> None:
        """All gradients are there: launch what has not been launched, and the control message."""
        assert self._round is not None
        if self.witness is not None:
            self.witness.begin_wait()
        self._launch_complete(self._round, everything=True)
        self._round.pending = self._send_control(self.planner.buckets, is_shadow=self._round.is_shadow)

    @torch.no_grad()
    def finish_round(self) -> None:
        """Wait for the averages, put right what came late, and make them the parameters' gradients."""
        current, self._round = self._round, None
        assert current is not None
        assert current.pending is not None
        self._hooks.close_gate()
        self._failure = "the backward before this one failed while gradients were being averaged"
        try:
            control = self._collect(self.planner.buckets, current.pending)
            planned = set(
                map(self._registry.names.__getitem__, itertools.chain(*(b.indices for b in self.planner.buckets)))
            )
            bases: dict[int, torch.Tensor] = {}
            was_changed = control.is_changed
            if was_changed:
                control, bases = self._agree_anew(planned)
            else:
                self._update_plan(current)
            if self._expected != control.used:
                self._expected = list(control.used)
                self._follow_parameters()
            self._reduce_unplanned(control, planned, current)
            for index, base in bases.items():
                grad = self._registry.params[index].grad
                self._registry.params[index].grad = base if grad is None else grad + base
            if not control.is_same_weights and self._drift is not None and not was_changed:
                self._drift.explain(self._registry.names, self._registry.params, self._channels.control)
        except ReplicaMismatchError:
            self._failure = ""  # all ranks raise it, with nothing under way
            self._channels.is_idle = True
            raise
        self._failure = ""
        self._channels.is_idle = True
        self.counts.rounds += 1
        if self.steps_in_backward:
            step_in_backward(self._registry.params)
        if self.witness is not None:
            self.witness.end()

    def raise_observer_error(self) -> None:
        """Raise what an observer has raised; when all reducers' rounds have ended, since it ends only this rank's."""
        if self.witness is not None:
            self.witness.raise_error()

    @torch.no_grad()
    def begin_shadow_round(self) -> None:
        """Take part in a round of the others without a gradient of this rank's own; ``finish_round`` ends it.

        The parameters' gradients become the others' average, whatever was there before.
        """
        self._check_usable()
        for param in self._registry.params:
            param.grad = None
        self._prepare()
        if self._drift is not None:
            self._drift.look_away()
        if self.witness is not None:
            self.witness.begin(self.counts.rounds, self.planner.buckets, self._registry.names)
        self._round = Round(set(), self, self._task_is_over, is_shadow=True)
        self.send_rest()

    def _send_control(self, buckets: Sequence[Bucket], *, is_shadow: bool) -> PendingControl:
        """Tell all ranks what this one has. A collective call."""
        if self.witness is not None:
            self.witness.sent_control()
        weights = None if is_shadow else NO_DIGEST if self._drift is None else self._drift.digest()
        return self._messages.send(
            buckets,
            self.planner.place_of,
            self.planner.kinds,
            weights,
            is_recast=self._is_recast,
            num_failed=self._num_failed,
        )

    def _collect(self, buckets: Sequence[Bucket], pending: PendingControl) -> Control:
        """Wait for the control message and ``buckets``; average what came late; hand out the averages.

        The message comes first: it is what tells best who does not come, and once it is there all ranks have launched
        all buckets.
        """
        witness = self.witness
        control = self._hear(pending)
        for bucket in buckets:
            with self._explained(bucket):
                bucket.wait()
            if witness is not None:
                witness.waited_for(bucket)
        if witness is not None:
            witness.end_wait()
        self._messages.check(control)  # only now that nothing is under way any more: they may go on after its error
        for bucket, is_late in zip(buckets, control.late, strict=True):
            if is_late:
                self._reduce_late(bucket)
            self._give(bucket, control)
        return control

    def _reduce_late(self, bucket: Bucket) -> None:
        self.counts.late += 1
        witness = self.witness
        if witness is not None:
            witness.begin_late(bucket, self._registry.names)
        with self._explained(bucket):
            bucket.reduce_late(self._channels.gradients)
        if witness is not None:
            witness.end_late(bucket)

    def _hear(self, pending: PendingControl) -> Control:
        control = self._messages.hear(pending)
        if self.witness is not None:
            self.witness.heard(pending.size_bytes)
        return control

    def _update_plan(self, current: Round) -> None:
        if not self.planner.is_learnt:
            with self._explained(None):
                self.planner.learn_order(current.arrived, self._channels.control)
            self._replan()
        elif self._messages.trainable != self.planner.trainable:
            self._replan()

    def _agree_anew(self, planned: set[str]) -> tuple[Control, dict[int, torch.Tensor]]:
        """Some rank has other parameters than those agreed on: compare all, and plan anew. A collective call.

        A parameter that was replaced on some ranks only is half reduced: the ranks that kept theirs have contributed to
        the old plan's average. That is the base, by index, to which the average of the newcomers' gradients is added.
        Say rank 0 kept w and has gradient 1, and rank 1 replaced it and has 2: the old plan gave 1/2, the newcomer's
        average is 2/2, and the sum is 1.5, as it should be.

        Args:
            planned: names in the old plan; those of newcomers, and of what is not what it was, are taken out.
        """
        registry = self._registry
        before = dict(zip(registry.names, registry.params, strict=True))
        recast = [registry.names[b.members[at].index] for b in self.planner.buckets for at in b.misfits]
        num_new = registry.agree_anew(self._channels.control)
        self.planner.forget_order()
        self._expected = [True] * len(registry.params)
        self._replan()
        self._is_recast = False
        control = self._hear(self._send_control([], is_shadow=False))
        self._messages.check(control)
        planned.difference_update(num_new, recast)
        bases: dict[int, torch.Tensor] = {}
        for index, name in enumerate(registry.names):
            if 0 < num_new.get(name, 0) < self._world_size and name in before:
                averaged, param = before[name].grad, registry.params[index]
                if averaged is not None:
                    bases[index] = averaged
                if param is before[name]:
                    param.grad = None
        return control, bases

    def _reduce_unplanned(self, control: Control, planned: set[str], current: Round) -> None:
        """Average what somebody used and the plan of this round did not have: newcomers, and the unfrozen."""
        names = self._registry.names
        unplanned = [i for i, used in enumerate(control.used) if used and names[i] not in planned]
        if not unplanned:
            return
        self.counts.unplanned += 1
        before = None if self.witness is None else self.witness.now()
        buckets = self.planner.buckets_of(unplanned)
        for bucket in buckets:
            self._launch(bucket, current)
        for bucket in buckets:
            with self._explained(bucket):
                bucket.wait()
            self._give(bucket, control)
        if self.witness is not None and before is not None:
            self.witness.unplanned(buckets, names, before)

    def _give(self, bucket: Bucket, control: Control) -> None:
        if self.num_live != self._world_size:
            bucket.rescale(self._world_size / self.num_live)
        bucket.give(control.used)

    def _replan(self) -> None:
        """Plan for the parameters that train now. The same on all ranks: so are order, flags and kinds."""
        self.planner.plan()
        self._follow_parameters()
        self.counts.replans += 1
        if self.witness is not None:
            self.witness.replanned(self.counts.rounds, self.planner.buckets, self._registry.names)

    # -- errors --------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        """Raise if an earlier backward left the ranks out of step; forget one that failed before it sent anything."""
        if self._round is not None and self.has_gradients():
            self._num_failed += 1
            if self._round.num_launched > 0:
                self._failure = "the backward before this one raised an error after part of its gradients had been sent"
        self._round = None
        if self._failure:
            raise ReductionError(
                f"rank {dist.get_rank()}: {self._failure}. The ranks no longer agree on what comes next: end them all "
                "and start from a checkpoint. The first error names the cause."
            )

    def _explained(self, bucket: Bucket | None) -> Explained:
        """Let errors of c10d in this block say what was being averaged."""
        names = None if bucket is None else [self._registry.names[index] for index in bucket.indices]
        return Explained(None if bucket is None else bucket.number, names, self._world_size)


def collect_abandoned(params: Iterable[Parameter]) -> None:
    """Before a model is wrapped again: let go of earlier wrappers that are garbage.

    One that hides in a reference cycle would go on reducing until each rank's garbage collector finds it, on each at
    another time.
    """
    ids = {id(param) for param in params}
    if any(not ids.isdisjoint(reducer.planner.place_of) for reducer in _living):
        gc.collect()
