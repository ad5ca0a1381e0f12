"""Optimizers under amp: what stands between a script's ``step`` and the optimizer's.

[Note: an optimizer's own] step and zero_grad are replaced on the instance, never on its class: step is skipped after an
overflow, and works on master weights. Parameter groups may be added, or changed by hand, at any time: what an optimizer
holds is looked up anew in each backward.

The invariant: a step is taken with gradients that are finite, on all of an optimizer's parameters, or not at all.
"""

import functools
import logging
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from paceline.amp.convert import HALF
from paceline.amp.gradients import divide, move_to_masters, multiply
from paceline.amp.masters import Master, adopt, copy_to_model, master_with
from paceline.amp.ranks import Company, share

logger = logging.getLogger("paceline.amp")


def state_of(optimizer: Any) -> "OptimizerState | None":
    """What amp keeps of ``optimizer``; None if it has not been through ``initialize``."""
    state = getattr(optimizer, "_amp_stash", None)
    return state if isinstance(state, OptimizerState) else None


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters that ``optimizer`` steps: master weights where there are any; Apex's call.

    Their gradients are free of the loss scale after ``scale_loss``. Clip these:

        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)
    """
    state = state_of(optimizer)
    if state is not None:
        state.look()
    for group in optimizer.param_groups:
        yield from group["params"]


class OptimizerState:
    """What amp keeps of one optimizer.

    Args:
        optimizer: torch's, or what looks like it, such as LARC.
        session: what the ``initialize`` that it came through has settled.
        uses_masters: whether its weights of half precision have masters.
        wholes: the float32 values that weights had before the model was cast, by the weights' ids.
    Attributes:
        num_skipped: steps that were not taken, because of an overflow.
    """

    def __init__(self, optimizer: Any, session: Any, *, uses_masters: bool, wholes: Mapping[int, Tensor]) -> None:
        self.session = session
        self.num_skipped = 0
        self._optimizer = weakref.ref(optimizer)
        self._uses_masters = uses_masters
        self._held: tuple[int, ...] | None = None  # the ids of the parameters that these two lists are of
        self._masters: list[Master] = []
        self._own: list[Tensor] = []
        self._scale = 1.0  # what the gradients of the model's weights are multiplied by
        self._reason: str | None = None  # to skip the next step
        self._company: Company | None = None
        self._company_key: tuple[object, ...] = ()
        self._shared: weakref.WeakSet[Any] = weakref.WeakSet()  # members of its company that know its masters
        self._num_shared = 0
        self._take_over(optimizer, wholes)
        optimizer._amp_stash = self
        _replace(optimizer, "step", self._step)
        _replace(optimizer, "zero_grad", self._zero_grad)

    # -- what it holds ------------------------------------------------------------------------------------------------

    def look(self) -> tuple[list[Master], list[Tensor]]:
        """The masters, and the parameters that have none. Weights that are new to it are given masters."""
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        held = tuple(id(param) for group in groups for param in group["params"])
        if held != self._held:
            self._masters, self._own = [], []
            for group in groups:
                group["params"][:] = [self._look_at(param, None) for param in group["params"]]
            self._held = tuple(id(param) for group in groups for param in group["params"])
        return self._masters, self._own

    def held(self) -> list[Tensor]:
        """All parameters that it steps, masters among them."""
        masters, own = self.look()
        return [*(master.weight for master in masters), *own]

    def _look_at(self, param: Tensor, whole: Tensor | None) -> Tensor:
        """What the optimizer is to hold for ``param``."""
        master = master_with(param)
        if master is None and self._uses_masters and param.dtype in HALF:
            master = adopt(param, whole)
        if master is None:
            self._own.append(param)
            return param
        self._masters.append(master)
        return master.weight

    def _take_over(self, optimizer: Any, wholes: Mapping[int, Tensor]) -> None:
        """Let the optimizer step masters, and its state be of their dtype."""
        for group in optimizer.param_groups:
            for index, param in enumerate(group["params"]):
                held = group["params"][index] = self._look_at(param, wholes.get(id(param)))
                if held is not param:
                    param.grad = None  # from before there was amp
                    if param in optimizer.state:
                        optimizer.state[held] = optimizer.state.pop(param)
        if optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())

    def company(self) -> Company:
        """Who averages its gradients."""
        masters, own = self.look()
        key = (Company.key(), self._held)
        if self._company is None or self._company_key != key:
            self._company, self._company_key = Company([*(master.param for master in masters), *own]), key
        return self._company

    # -- around a backward --------------------------------------------------------------------------------------------

    def prepare(self, scale: float) -> None:
        """Bring what gradients there are to ``scale``, so that a backward can add to them."""
        masters, own = self.look()
        company = self.company()
        if len(masters) != self._num_shared:
            self._num_shared = len(masters)
            self._shared.clear()
        if strangers := [member for member in company.members if member not in self._shared]:
            self._shared.update(strangers)
            for master in masters:
                master.take_over(looks=True)
            share([master.weight for master in masters], strangers)
        multiply([*(master.param for master in masters), *own], scale / self._scale)
        self._scale = scale

    def keep(self, scale: float) -> None:
        """Leave gradients where they are, multiplied by ``scale``."""
        self._scale = scale

    def unscale(self, scale: float) -> list[Tensor]:
        """Free gradients of ``scale``, and move those of weights that have masters to these.

        Returns:
            One number a device, not 0 at an overflow. (1,)
        """
        masters, own = self.look()
        verdicts = [*move_to_masters(masters, scale), *divide(own, scale)]
        self._scale = 1.0
        return verdicts

    def skip_next(self, reason: str) -> None:
        """Take no step the next time that ``step`` is called. Gradients become zeros, so that what another backward
        adds to them is judged by itself."""
        self._reason = reason
        for param in self.held():
            if param.grad is not None:
                param.grad.zero_()

    # -- in the place of the optimizer's methods ----------------------------------------------------------------------

    def _step(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        closure = args[0] if args else kwargs.get("closure")
        masters, _ = self.look()
        for master in masters:
            master.take_over()
        if closure is None:
            if self._reason is not None:
                return self._skip()
            result = inner(*args, **kwargs)
        else:
            evaluate = self._evaluating(closure)
            try:
                result = inner(evaluate, *args[1:], **{k: v for k, v in kwargs.items() if k != "closure"})
            except _Overflow as overflow:
                self._skip()
                return overflow.loss
        copy_to_model(masters)
        for master in masters:
            master.weight.grad = None  # which model.zero_grad() would not find
        return result

    def _evaluating(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``closure`` on the masters' values. An overflow at first skips the step; later, the scale has been halved,
        and the optimizer, which is half way, gets the gradients of another try."""
        is_first = True

        def evaluate() -> Any:
            nonlocal is_first
            if not is_first:
                copy_to_model(self.look()[0])
            while True:
                loss = closure()
                if self._reason is None:
                    is_first = False
                    return loss
                if is_first:
                    raise _Overflow(loss)
                self._reason = None
                optimizer: Any = self._optimizer()
                optimizer.zero_grad()

        return evaluate

    def _skip(self) -> None:
        optimizer: Any = self._optimizer()
        optimizer._opt_called = True  # for schedulers: the script has called step
        self.num_skipped += 1
        if self.session.verbosity and (not dist.is_initialized() or dist.get_rank() == 0):
            logger.warning("%s: step skipped, %d so far.", self._reason, self.num_skipped)
        self._reason = None
        for master in self.look()[0]:
            master.weight.grad = None

    def _zero_grad(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        masters, _ = self.look()
        inner(*args, **kwargs)
        for master in masters:
            master.param.grad = None
        self._scale = 1.0


class _Overflow(Exception):  # noqa: N818
    """A closure has come to gradients that are not finite."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


def _replace(optimizer: Any, name: str, method: Callable[..., Any]) -> None:
    """Have ``method`` called with the optimizer's own method in front. A bound method, as schedulers want it."""
    inner = getattr(optimizer, name)

    @functools.wraps(inner)
    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
        return method(inner, *args, **kwargs)

    setattr(optimizer, name, types.MethodType(replaced, optimizer))
