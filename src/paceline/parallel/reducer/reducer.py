"""The reducer: averages gradients over the ranks while backward still computes others.

One mode, always right. A *round* is one outermost backward:

    gradients arrive      complete buckets are launched, in the plan's order                           } overlap
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
import operator
import weakref
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.nn import Parameter

from paceline.errors import ReductionError, ReplicaMismatchError
from paceline.parallel.buckets.bucket import Bucket
from paceline.parallel.buckets.hooked import Hook, name_of
from paceline.parallel.buckets.planning import Planner
from paceline.parallel.fields import have_grad, kinds
from paceline.parallel.reducer.arrivals import Arrivals
from paceline.parallel.reducer.averaging import Averaging
from paceline.parallel.reducer.change import Change
from paceline.parallel.reducer.channels import Channels
from paceline.parallel.reducer.control import Control, PendingControl
from paceline.parallel.reducer.hooks import weakly
from paceline.parallel.reducer.in_backward import step_in_backward
from paceline.parallel.reducer.messages import Messages
from paceline.parallel.reducer.rounds import Round, opener
from paceline.parallel.reducer.witness import Counts, Witness
from paceline.parallel.replicas.digests import NO_DIGEST
from paceline.parallel.replicas.drift import DriftWatch
from paceline.parallel.replicas.registry import Registry

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
        number: in the order in which reducers were made, which is the same on all ranks.
        counts: what has happened so far.
        witness: tells observers, if there are any.
        averaging: carries the buckets.
        arrivals: knows which gradients are expected.
        planner: has the plan that is in force.
    """

    def __init__(
        self, registry: Registry, channels: Channels, caps_bytes: Sequence[int], *, detects_drift: bool
    ) -> None:
        self.sync = True
        self.steps_in_backward = False
        self.number = next(_numbers)
        self.counts = Counts()
        self.witness = Witness(registry.params[0].device, dist.get_rank())
        self.averaging = Averaging(registry, channels, self.witness, self.counts)
        self.planner = Planner(registry, self.averaging.world_size, caps_bytes, channels.averages)
        self.arrivals = Arrivals(registry, self.planner, self.averaging, self._arrived)
        self._registry = registry
        self._channels = channels
        self._messages = Messages(registry, channels.control)
        self._drift = DriftWatch() if detects_drift else None
        self._round: Round | None = None
        self._failure = ""
        self._num_failed = 0  # backwards that raised an error after gradients had come
        self._is_recast = False  # whether parameters are not what the plan in force was made for
        self.arrivals.follow()
        registry.on_newcomer = weakly(self.arrivals.follow)
        _living.add(self)

    @property
    def detects_drift(self) -> bool:
        return self._drift is not None

    @property
    def has_run(self) -> bool:
        """Whether a round has ended."""
        return self.counts.rounds > 0

    def use_hook(self, state: object, hook: Hook, *, keeps_replicas_equal: bool) -> None:
        """Have ``hook(state, bucket)`` average all planned gradients that are not sparse. Once.

        Args:
            keeps_replicas_equal: it gives the average over all ranks; else they may come to hold different weights.
        """
        if self.planner.hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self.planner.hook, self.planner.hook_gives_average = (state, hook), keeps_replicas_equal
        if not keeps_replicas_equal:
            self._drift = None
        self._replan()

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
        preexisting = set(itertools.compress(itertools.count(), have_grad(self._registry.params)))
        if self._drift is not None:
            self._drift.look(self._registry.params, self.counts.rounds)
        self._prepare()
        self._round = Round(preexisting, self, self._task_is_over)
        self.arrivals.open_gate()
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
            bucket.prepare(self.arrivals.used)
        self.witness.begin(self.counts.rounds, self.planner.buckets, self._registry.names)

    def _task_is_over(self) -> None:
        """The backward has ended; where it raised an error, what was taken is this rank's gradient again."""
        self.arrivals.close_gate()
        for bucket in self.planner.buckets:
            bucket.give_back()

    def _arrived(self, param: Parameter) -> None:
        """Runs when autograd has accumulated into ``param.grad``, for some of the parameters."""
        if self.sync:
            self.arrivals.take(param, self.open_round())

    # -- at the end of backward ----------------------------------------------------------------------------------

    def has_gradients(self) -> bool:
        """Whether any gradient came in the round; autograd.grad passes through a model and leaves none."""
        assert self._round is not None
        self.arrivals.note(self._round)
        return bool(self._round.arrived)

    @torch.no_grad()
    def send_rest(self) -> None:
        """All gradients are there: launch what has not been launched, and the control message."""
        assert self._round is not None
        self._registry.warn_of_departed(self._round.arrived)
        self.witness.begin_wait()
        self.averaging.launch_complete(self.planner.buckets, self._round, everything=True)
        self._round.pending = self._send_control(self.planner.buckets, is_shadow=self._round.is_shadow)

    @torch.no_grad()
    def finish_round(self) -> None:
        """Wait for the averages, put right what came late, and make them the parameters' gradients."""
        current, self._round = self._round, None
        assert current is not None
        assert current.pending is not None
        self.arrivals.close_gate()
        self._failure = "the backward before this one failed while gradients were being averaged"
        try:
            self._average(current, current.pending)
        except ReplicaMismatchError:
            self._failure = ""  # all ranks raise it, with nothing under way
            self._channels.is_idle = True
            raise
        self._failure = ""
        self._channels.is_idle = True
        self.counts.rounds += 1
        if self.steps_in_backward:
            step_in_backward(self._registry.params)
        self.witness.end()

    def raise_observer_error(self) -> None:
        """Raise what an observer has raised; when all reducers' rounds have ended, since it ends only this rank's."""
        self.witness.raise_error()

    @torch.no_grad()
    def begin_shadow_round(self) -> None:
        """Take part in a round of the others without a gradient of this rank's own; ``finish_round`` ends it.

        The parameters' gradients become the others' average, whatever was there before.
        """
        self._check_usable()
        for param in self._registry.params:
            param.grad = None
        if self._drift is not None:
            self._drift.look_away()
        self._prepare()
        self._round = Round(set(), self, self._task_is_over, is_shadow=True)
        self.send_rest()

    def _average(self, current: Round, pending: PendingControl) -> None:
        """The rest of a round, whose collectives follow from the control message, which all ranks have alike.

        The message comes first: it is what tells best who does not come, and once it is there all ranks have launched
        all buckets.
        """
        plan, planned = self.planner.buckets, self.planner.trainable
        control = self._hear(pending)
        self._messages.check_hooks(control)
        self.averaging.wait(plan)
        self._messages.check(control)  # only now that nothing is under way any more: they may go on after its error
        self.averaging.give(plan, control)
        bases: dict[int, torch.Tensor] = {}
        was_changed = control.is_changed
        if was_changed:
            change = Change(self._registry, plan, planned, self._channels.control)
            control = self._begin_anew()
            planned, bases = change.still_planned(), change.take_bases()
        elif not self.planner.is_learnt:
            with self.averaging.explained(None):
                self.planner.learn_order(current.arrived, self._channels.control)
            self._replan()
        elif self._messages.trainable != self.planner.trainable:
            self._replan()
        self.arrivals.expect(control.used)
        # The newcomers, and the unfrozen.
        unplanned = list(itertools.compress(itertools.count(), map(operator.gt, control.used, planned)))
        if unplanned:
            self.averaging.average_unplanned(self.planner.buckets_of(unplanned), current, control)
        for index, base in bases.items():
            grad = self._registry.params[index].grad
            self._registry.params[index].grad = base if grad is None else grad + base
        if not control.is_same_weights and self._drift is not None and not was_changed:
            self._drift.explain(self._registry.names, self._registry.params, self._channels.control)

    def _begin_anew(self) -> Control:
        """Plan for the parameters that the ranks have just agreed on, and tell what each has. A collective call."""
        self.planner.forget_order()
        self.arrivals.expect_all()
        self._replan()
        self._is_recast = False
        if self._drift is not None:
            self._drift.forget()
        control = self._hear(self._send_control([], is_shadow=False))
        self._messages.check(control)
        return control

    def _send_control(self, buckets: Sequence[Bucket], *, is_shadow: bool) -> PendingControl:
        """Tell all ranks what this one has. A collective call."""
        self.witness.sent_control()
        weights = None if is_shadow else NO_DIGEST if self._drift is None else self._drift.digest()
        return self._messages.send(
            buckets,
            self.planner.place_of,
            self.planner.kinds,
            weights,
            hook=None if self.planner.hook is None else name_of(self.planner.hook[1]),
            is_recast=self._is_recast,
            num_failed=self._num_failed,
        )

    def _hear(self, pending: PendingControl) -> Control:
        control = self._messages.hear(pending)
        self.witness.heard(pending.size_bytes)
        return control

    def _replan(self) -> None:
        """Plan for the parameters that train now. The same on all ranks: so are order, flags and kinds."""
        self.planner.plan()
        self.arrivals.follow()
        self.counts.replans += 1
        self.witness.replanned(self.counts.rounds, self.planner.buckets, self._registry.names)

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


def collect_abandoned(params: Iterable[Parameter]) -> None:
    """Before a model is wrapped again: let go of earlier wrappers that are garbage.

    One that hides in a reference cycle would go on reducing until each rank's garbage collector finds it, on each at
    another time.
    """
    ids = {id(param) for param in params}
    if any(not ids.isdisjoint(reducer.planner.place_of) for reducer in _living):
        gc.collect()
