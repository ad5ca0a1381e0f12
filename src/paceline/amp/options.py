"""What a call to ``initialize`` asks for: a level, and what the caller has overridden.

The invariant: options that contradict one another never get further than here.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from paceline.amp.levels import LEVELS, Level
from paceline.errors import AmpError

_LARGEST_SCALE = 2.0**24


@dataclass(frozen=True)
class Properties(Level):
    """A level with its overrides, as ``initialize`` carries it out; Apex's ``opt_properties``.

    Attributes:
        enabled: whether anything is carried out at all.
        opt_level: "O0" to "O3"; None where nothing is.
        patch_torch_functions_type: the dtype of functions that gain from fewer bits, under O1.
    """

    enabled: bool = True
    opt_level: str | None = None
    patch_torch_functions_type: torch.dtype = torch.float16


DISABLED = Properties(None, False, None, None, 1.0, enabled=False)


def choose(
    opt_level: str,
    *,
    cast_model_type: object = None,
    patch_torch_functions: object = None,
    keep_batchnorm_fp32: object = None,
    master_weights: object = None,
    loss_scale: object = None,
    patch_torch_functions_type: object = None,
) -> Properties:
    """The properties of ``opt_level``, with all that is not None in the place of its own.

    Raises:
        AmpError: there is no such level, or an override doesn't fit it. A RuntimeError and a ValueError, since Apex
            raises the one for some and the other for the rest.
    """
    if opt_level not in LEVELS:
        raise AmpError(f"opt_level={opt_level!r}: expected 'O0', 'O1', 'O2' or 'O3' (the letter O, not a zero).")
    changes: dict[str, Any] = {}
    if cast_model_type is not None:
        changes["cast_model_type"] = _dtype("cast_model_type", cast_model_type)
    if patch_torch_functions is not None:
        changes["patch_torch_functions"] = _boolean("patch_torch_functions", patch_torch_functions)
    if keep_batchnorm_fp32 is not None:
        changes["keep_batchnorm_fp32"] = _boolean("keep_batchnorm_fp32", keep_batchnorm_fp32)
    if master_weights is not None:
        changes["master_weights"] = _boolean("master_weights", master_weights)
    if loss_scale is not None:
        changes["loss_scale"] = "dynamic" if loss_scale == "dynamic" else _positive("loss_scale", loss_scale)
    if patch_torch_functions_type is not None:
        changes["patch_torch_functions_type"] = _dtype("patch_torch_functions_type", patch_torch_functions_type)
    _check(opt_level, changes)
    return dataclasses.replace(Properties(**vars(LEVELS[opt_level]), opt_level=opt_level), **changes)


def choose_bounds(min_loss_scale: object, max_loss_scale: object) -> tuple[float | None, float]:
    """Between what the dynamic loss scale may move.

    Raises:
        AmpError: they are no positive numbers, or the first is larger than the second.
    """
    least = None if min_loss_scale is None else _positive("min_loss_scale", min_loss_scale)
    most = _LARGEST_SCALE if max_loss_scale is None else _positive("max_loss_scale", max_loss_scale)
    if least is not None and least > most:
        raise AmpError(f"min_loss_scale={least} is larger than max_loss_scale={most}.")
    return least, most


def _check(opt_level: str, changes: dict[str, Any]) -> None:
    if opt_level != "O1":
        if changes.get("patch_torch_functions"):
            raise AmpError(
                f"opt_level={opt_level!r}, patch_torch_functions=True: only O1 chooses a dtype for each function. "
                "Use opt_level='O1'."
            )
        return
    dtype = changes.get("cast_model_type")
    if dtype not in (None, torch.float32):
        raise AmpError(
            f"opt_level='O1', cast_model_type={dtype}: under O1 weights stay float32 and functions are cast. Use "
            f"opt_level='O2' or 'O3' for weights in {dtype}, or patch_torch_functions_type={dtype} for functions in it."
        )
    for name in ("keep_batchnorm_fp32", "master_weights"):
        if name in changes:
            raise AmpError(
                f"opt_level='O1', {name}={changes[name]}: under O1 all weights stay float32, so there is nothing to "
                "choose. Leave it out."
            )


def _boolean(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("True", "False"):
        return value == "True"
    raise AmpError(f"{name}={value!r}: expected True, False, 'True', 'False' or None.")


def _positive(name: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = -1.0
    if not 0.0 < number < float("inf"):
        raise AmpError(f"{name}={value!r}: expected a positive number, or a string of one" + _OR_DYNAMIC.get(name, "."))
    return number


_OR_DYNAMIC = {"loss_scale": ", or 'dynamic'."}


def _dtype(name: str, value: object) -> torch.dtype | None:
    """None stands for no cast: Apex's scripts write False."""
    if value is False or value == "False":
        return None
    found = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if isinstance(found, torch.dtype) and found.is_floating_point:
        return found
    raise AmpError(f"{name}={value!r}: expected a floating-point dtype, such as torch.bfloat16, or False.")
