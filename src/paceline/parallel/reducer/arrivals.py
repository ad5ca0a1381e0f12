"""Gradients as they arrive: which are expected, and what is to be done at once.

The invariant: no gradient that comes within a backward goes unseen; and none is taken twice.
"""

from collections.abc import Callable

import torch
from torch.nn import Parameter

from paceline.parallel.buckets.planning import Planner
from paceline.parallel.reducer.averaging import Averaging
from paceline.parallel.reducer.hooks import GradientHooks
from paceline.parallel.reducer.rounds import Round
from paceline.parallel.replicas.registry import Registry


class Arrivals:
    """Gradients of ``registry``'s parameters.

    Args:
        on_gradient: a method of the owner, which is not kept alive: called when one has come, for some of the
            parameters. [Note: the gate]

    Attributes:
        used: by parameter, 1 where some rank used it in the last round; these are expected in the next.
    """

    def __init__(
        self, registry: Registry, planner: Planner, averaging: Averaging, on_gradient: Callable[[Parameter], None]
    ) -> None:
        self._registry = registry
        self._planner = planner
        self._averaging = averaging
        self._hooks = GradientHooks(on_gradient)
        self.open_gate, self.close_gate = self._hooks.open_gate, self._hooks.close_gate
        self.expect_all()

    def expect_all(self) -> None:
        self.used = b"\1" * len(self._registry.params)

    def expect(self, used: bytes) -> None:
        """What was used in the last round."""
        if used != self.used:
            self.used = used
            self.follow()

    def follow(self) -> None:
        """Hook all parameters; be told at once of the last that is expected in each bucket, the huge, all on GPUs."""
        chosen = {id(param) for param in self._registry.params if not param.is_cpu}
        for bucket in self._planner.buckets:
            chosen.update(map(id, bucket.at_once()))
            expected = [member.param for member in bucket.members if self.used[member.index]]
            chosen.add(id((expected or [bucket.members[-1].param])[-1]))
        self._hooks.follow(self._registry.present(), chosen)

    def note(self, current: Round) -> None:
        """Those that came through the open gate."""
        current.arrived.update(self._hooks.take_noted())

    def take(self, param: Parameter, current: Round) -> None:
        """A gradient that has come, as ``on_gradient`` was told; launch its bucket if it was the last."""
        if current.is_ready:
            self._averaging.launch_complete(self._planner.buckets, current)
        self.note(current)
        is_again = id(param) in current.arrived
        current.arrived[id(param)] = None
        index, bucket = self._planner.place_of.get(id(param), (-1, None))
        if bucket is None:  # replaced or unfrozen since the last plan: that is dealt with at the end
            return
        bucket.note_stream(param)
        if is_again or bucket.is_launched or not self.used[index]:  # maybe late: so is that
            return
        # Where the user has hooks on this parameter too, they may come after ours and are to find its gradient: then
        # the bucket is launched when the next gradient arrives.
        is_ours = len(param._post_accumulate_grad_hooks) == 1
        if is_ours:
            with torch.no_grad():
                bucket.take(index, current.preexisting)
        if bucket.is_complete(current.arrived.keys()):
            current.is_ready = not is_ours
            if is_ours:
                self._averaging.launch_complete(self._planner.buckets, current)
