"""``scale_loss``: a backward on a scaled loss, after which gradients are the loss's own.

The invariant: after the block, gradients are unscaled, or known to be scaled and by what; and if they are not finite,
no optimizer that holds one of them takes its next step.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from paceline.amp.casts import CpuCasts, device_type_of
from paceline.amp.gradients import is_finite
from paceline.amp.optimizers import OptimizerState, state_of
from paceline.amp.ranks import Company
from paceline.amp.scaler import LossScaler
from paceline.amp.session import Session, state
from paceline.errors import AmpError, LossScaleError


@contextlib.contextmanager
def scale_loss(
    loss: Any,
    optimizers: Any,
    loss_id: int = 0,
    model: Module | None = None,  # noqa: ARG001
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Any]:
    """Run backward on the loss times its scale; Apex's call.

        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    After the block gradients are unscaled, in ``amp.master_params(optimizer)``. Where they are not finite, on any rank
    that trains the model, the scale is halved, gradients become zeros, and the next step of these optimizers is
    skipped, on all ranks.

    Several backwards may accumulate, of one loss or of several. Within ``no_sync`` of a DistributedDataParallel,
    gradients stay scaled, in the model, until a backward outside of it.

    Args:
        loss: a tensor; multiplied in float32.
        optimizers: the one, or the list, whose parameters this backward reaches.
        loss_id: which of ``num_losses`` scales it has.
        model: accepted as in Apex, without effect.
        delay_unscale: leave gradients scaled, for a later block without it to unscale. Never needed.
        delay_overflow_check: leave the scale alone, for a later block of this loss to lower it. A step is skipped all
            the same.
    Raises:
        AmpError: ``initialize`` has not been called, or not with one of the optimizers; there is no such loss; or this
            is within another block of one of the optimizers.
        TypeError: the loss is no tensor.
        LossScaleError: gradients have overflowed twice in a row, and the scale is at its floor. The message names the
            parameters.
    """
    session = state.session
    if session is None:
        raise AmpError(
            "amp.scale_loss before amp.initialize. Call model, optimizer = amp.initialize(model, optimizer, "
            "opt_level=...) first; with enabled=False, if amp is to do nothing."
        )
    if not session.properties.enabled:
        yield loss
        return
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss: expected a tensor, got {type(loss).__name__}. Add several losses up before.")
    states = _states_of(optimizers if isinstance(optimizers, (list, tuple)) else [optimizers])
    session = states[0].session
    scaler = _scaler_of(session, loss_id)
    scale = scaler.loss_scale()
    if scale == 1.0 and not scaler.dynamic and not session.properties.master_weights:
        with _casts_in_backward(session):
            yield loss.float()
        return
    seen: set[int] = set()
    for each in states:
        each.prepare(scale, seen)
    try:
        with _casts_in_backward(session):
            yield loss.float() * scale
    except BaseException:
        for each in states:
            each.keep(scale)
        raise
    if delay_unscale or any(each.company().is_local for each in states):
        for each in states:
            each.keep(scale)
        return
    _finish(session, scaler, loss_id, states, is_last=not delay_overflow_check)


def _finish(
    session: Session, scaler: LossScaler, loss_id: int, states: Sequence[OptimizerState], *, is_last: bool
) -> None:
    """Unscale, judge, and let the scale and the optimizers follow the verdict."""
    scale = scaler.loss_scale()
    seen: set[int] = set()
    writes = [found for each in states for found in each.holdings.find_writes()]  # while gradients are small still
    verdicts = [verdict for each in states for verdict in each.unscale(scale, seen)]
    is_overflow, is_written = _judge(verdicts, writes, [each.company() for each in states])
    if is_written:
        for each in states:
            each.holdings.follow_writes()
    is_stuck = is_last and scaler.update(is_overflow=is_overflow or scaler.is_overflow_pending)
    scaler.is_overflow_pending = not is_last and (is_overflow or scaler.is_overflow_pending)
    explanation = _explain(session, scaler, loss_id, states) if is_stuck else ""
    if is_overflow:
        for each in states:
            each.skip_next(f"the gradients of loss {loss_id}, scaled by {scale:g}, have overflowed")
    if is_stuck:
        raise LossScaleError(explanation)


def _judge(verdicts: Sequence[Tensor], writes: Sequence[Tensor], companies: Sequence[Company]) -> tuple[bool, bool]:
    """Whether there is an overflow, on any rank, and a write, on this one. The host waits for the device here, once."""
    device = verdicts[0].device if verdicts else torch.get_default_device()
    overflow, written = torch.zeros(1, device=device), torch.zeros(1, device=device)
    for verdict in verdicts:
        overflow += verdict.to(device)
    for each in writes:
        written += each.to(device)  # what is no number stays none
    for company in companies:
        overflow = company.agree(overflow)
    is_overflow, is_written = torch.cat([overflow, written]).tolist()
    return bool(is_overflow), bool(is_written)


def _explain(session: Session, scaler: LossScaler, loss_id: int, states: Sequence[OptimizerState]) -> str:
    held = [param for each in states for param in each.holdings.held()]
    broken = list(dict.fromkeys(session.names_of([param for param in held if not is_finite(param)])))
    shown = ", ".join(broken[:8]) + (f" and {len(broken) - 8} more" if len(broken) > 8 else "")
    where = f"On this rank, gradients of {shown} are not finite" if broken else "This rank's gradients are finite"
    kind = "its floor" if scaler.dynamic else "a number that was chosen"
    return (
        f"loss {loss_id}: gradients have overflowed twice in a row, and the scale, {scaler.loss_scale():g}, is {kind}: "
        f"a smaller one would not help. {where}. Look for an infinite loss, a division by zero, a learning rate that "
        "is too large; torch.autograd.set_detect_anomaly(True) finds the operation."
    )


@contextlib.contextmanager
def _casts_in_backward(session: Session) -> Iterator[None]:
    """What layers that compute once more in backward need on CPUs. [Note: backward] in ``casts``."""
    needs_mode = session.properties.patch_torch_functions and any(device_type_of(m) == "cpu" for m in session.models)
    with CpuCasts() if needs_mode else contextlib.nullcontext():
        yield


def _states_of(optimizers: Sequence[Any]) -> list[OptimizerState]:
    """Each once."""
    found = list({id(each): each for each in map(_known, optimizers)}.values())
    if not found:
        raise AmpError("amp.scale_loss without an optimizer: pass those whose parameters this backward reaches.")
    if any(each.is_in_block for each in found):
        raise AmpError(
            "amp.scale_loss within another one of the same optimizer, which would divide its gradients twice. End the "
            "first block before; or add the losses up."
        )
    return found


def _known(optimizer: Any) -> OptimizerState:
    found = state_of(optimizer)
    if found is None:
        raise AmpError(
            f"amp.scale_loss with a {type(optimizer).__name__} that has not been through amp.initialize. Pass it "
            "there, and use what is returned."
        )
    return found


def _scaler_of(session: Session, loss_id: int) -> LossScaler:
    if not 0 <= loss_id < len(session.scalers):
        raise AmpError(f"loss_id={loss_id}, but amp.initialize was told num_losses={len(session.scalers)}.")
    return session.scalers[loss_id]
