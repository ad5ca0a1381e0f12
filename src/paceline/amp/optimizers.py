"""Optimizers under amp: what stands between a script's ``step`` and the optimizer's.

[Note: an optimizer's own] step and zero_grad are replaced on the instance, never on its class: step is skipped after an
overflow, and works on master weights.

The invariant: a step is taken with gradients that are finite, on all of an optimizer's parameters, or not at all.
"""

import functools
import logging
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from paceline.amp.gradients import divide, move_to_masters, multiply
from paceline.amp.holdings import Holdings
from paceline.amp.masters import copy_to_model
from paceline.amp.ranks import Company, share
from paceline.errors import AmpError

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
        state.holdings.lend()
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
        holdings: what it steps.
        is_in_block: whether a ``scale_loss`` of it is under way.
    """

    def __init__(self, optimizer: Any, session: Any, *, uses_masters: bool, wholes: Mapping[int, Tensor]) -> None:
        self.session = session
        self.num_skipped = 0
        self.is_in_block = False
        self.holdings = Holdings(optimizer, uses_masters=uses_masters, wholes=wholes)
        self._optimizer = weakref.ref(optimizer)
        self._scale = 1.0  # what the gradients of the model's weights are multiplied by
        self._reason: str | None = None  # to skip the next step
        self._company: Company | None = None
        self._company_key: tuple[object, ...] = ()
        self._shared: weakref.WeakSet[Any] = weakref.WeakSet()  # members of its company that know its masters
        self._num_shared = 0
        optimizer._amp_stash = self
        _replace(optimizer, "step", self._step)
        _replace(optimizer, "zero_grad", self._zero_grad)

    def company(self) -> Company:
        """Who averages its gradients."""
        params = self.holdings.of_model()
        key = (Company.key(), tuple(map(id, params)))
        if self._company is None or self._company_key != key:
            self._company, self._company_key = Company(params), key
        return self._company

    # -- around a backward --------------------------------------------------------------------------------------------

    def prepare(self, scale: float, seen: set[int]) -> None:
        """Bring what gradients there are to ``scale``, so that a backward can add to them.

        Args:
            seen: ids of weights that another optimizer has cared for, which is added to.
        """
        self.is_in_block = True
        masters, _ = self.holdings.look()
        company = self.company()
        if len(masters) != self._num_shared:
            self._num_shared = len(masters)
            self._shared.clear()
        if strangers := [member for member in company.members if member not in self._shared]:
            self._shared.update(strangers)
            for master in masters:
                master.take_over(looks=True)
            share([master.weight for master in masters], strangers)
        for master in masters:
            master.drop_spent()
        multiply(_unseen(self.holdings.of_model(), seen), scale / self._scale)
        self._scale = scale

    def keep(self, scale: float) -> None:
        """Leave gradients where they are, multiplied by ``scale``."""
        self._scale = scale
        self.is_in_block = False

    def unscale(self, scale: float, seen: set[int]) -> list[Tensor]:
        """Free gradients of ``scale``, and move those of weights that have masters to these.

        Args:
            seen: as for ``prepare``.
        Returns:
            One number a device, not 0 at an overflow. (1,)
        """
        masters, own = self.holdings.look()
        verdicts = [*move_to_masters(masters, scale), *divide(_unseen(own, seen), scale)]
        self._scale = 1.0
        self.is_in_block = False
        return verdicts

    def skip_next(self, reason: str) -> None:
        """Take no step the next time that ``step`` is called. Gradients become zeros, so that what another backward
        adds to them is judged by itself."""
        self._reason = reason
        for param in self.holdings.held():
            if param.grad is not None:
                param.grad.zero_()

    # -- in the place of the optimizer's methods ----------------------------------------------------------------------

    def _step(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        closure = args[0] if args else kwargs.get("closure")
        masters, _ = self.holdings.look()
        for master in masters:
            master.take_over()
        if closure is None:
            if self._reason is not None:
                return self._skip()
            self._check_unscaled()
            result = inner(*args, **kwargs)
        else:
            evaluate = self._evaluating(closure)
            try:
                result = inner(evaluate, *args[1:], **{k: v for k, v in kwargs.items() if k != "closure"})
            except _Overflow as overflow:
                self._skip()
                return overflow.loss
        copy_to_model(masters)
        self.holdings.note_step()
        return result

    def _check_unscaled(self) -> None:
        if self._scale != 1.0 and any(param.grad is not None for param in self.holdings.of_model()):
            raise AmpError(
                f"step() while gradients are still multiplied by {self._scale:g}: the last amp.scale_loss of this "
                "optimizer had delay_unscale=True, was within no_sync, or ended in an exception. Run one that is none "
                "of these before, or begin again with zero_grad()."
            )

    def _evaluating(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``closure`` on the masters' values. An overflow at first skips the step; later, the scale has been halved,
        and the optimizer, which is half way, gets the gradients of another try."""
        is_first = True

        def evaluate() -> Any:
            nonlocal is_first
            if not is_first:
                copy_to_model(self.holdings.look()[0])
            while True:
                loss = closure()
                if self._reason is None:
                    self._check_unscaled()
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
        for master in self.holdings.look()[0]:
            master.weight.grad = None

    def _zero_grad(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        masters, _ = self.holdings.look()
        inner(*args, **kwargs)
        for master in masters:
            master.param.grad = None
        self._scale = 1.0


class _Overflow(Exception):  # noqa: N818
    """A closure has come to gradients that are not finite."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


def _unseen(params: Iterable[Tensor], seen: set[int]) -> list[Tensor]:
    """Those that are not in ``seen``, which they are added to."""
    found = [param for param in params if id(param) not in seen]
    seen.update(map(id, found))
    return found


def _replace(optimizer: Any, name: str, method: Callable[..., Any]) -> None:
    """Have ``method`` called with the optimizer's own method in front. A bound method, as schedulers want it."""
    inner = getattr(optimizer, name)

    @functools.wraps(inner)
    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
        return method(inner, *args, **kwargs)

    setattr(optimizer, name, types.MethodType(replaced, optimizer))
