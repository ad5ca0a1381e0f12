"""``initialize``: models and optimizers made ready for an opt level.

The invariant: whatever is wrong with the arguments is found before anything is changed.
"""

import gc
import logging
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from paceline.amp.convert import HALF, cast_model, check_is_whole
from paceline.amp.masters import keep_in_checkpoints
from paceline.amp.optimizers import OptimizerState, state_of
from paceline.amp.options import Properties, choose, choose_bounds
from paceline.amp.ranks import wrappers_of
from paceline.amp.scaler import LossScaler
from paceline.amp.session import Session, begin, state
from paceline.amp.wrapping import Casts, wrap
from paceline.errors import AmpError
from paceline.parallel.apex import LARC
from paceline.parallel.ddp.wrapper import DistributedDataParallel

logger = logging.getLogger("paceline.amp")


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: Any = None,
    patch_torch_functions: bool | str | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | str | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    patch_torch_functions_type: torch.dtype | None = None,
) -> Any:
    """Make models and optimizers ready for mixed precision; Apex's call.

        model, optimizer = amp.initialize(model, optimizer, opt_level="O2")

    Call it when the models are on their device and the optimizers are made, and before a model is wrapped by a
    DistributedDataParallel or a DataParallel. A second call begins anew, for ``scale_loss`` with its own optimizers.

    Args:
        models: a module, or a list of modules. They are changed in place.
        optimizers: an optimizer, or a list; None for inference.
        enabled: False makes every call of amp do nothing.
        opt_level: "O0" to "O3"; see ``amp.levels.LEVELS``. All else that is not None overrides it.
        cast_model_type: the dtype of weights and inputs, under O2 and O3; False for no cast.
        patch_torch_functions: whether functions are cast, under O1.
        keep_batchnorm_fp32: whether batch normalisation stays float32, under O2 and O3.
        master_weights: whether optimizers step float32 copies of weights, under O2 and O3.
        loss_scale: a number, or "dynamic".
        cast_model_outputs: the dtype of outputs; by default those in half precision are returned in float32.
        num_losses: how many losses have a scale of their own; see ``loss_id`` of ``scale_loss``.
        verbosity: 0 logs nothing.
        min_loss_scale: the floor of a dynamic scale; by default 2**-16.
        max_loss_scale: its ceiling.
        patch_torch_functions_type: the dtype of functions under O1; float16 by default, or bfloat16.
    Returns:
        ``models``, or both; lists where lists came in.
    Raises:
        AmpError: an option does not fit the level; a model is wrapped already, sharded, or in half precision; an
            optimizer has been through here before, or cannot step master weights. The model within a wrapper may be
            given; torch's wrapper is refused where weights are cast.
        TypeError: these are no modules or no optimizers.
    """
    if not enabled:
        begin(Session(verbosity=verbosity))
        return models if optimizers is None else (models, optimizers)
    properties = choose(
        opt_level,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
        patch_torch_functions_type=patch_torch_functions_type,
    )
    least, most = choose_bounds(min_loss_scale, max_loss_scale)
    model_list = _models(models)
    optimizer_list = _optimizers(optimizers)
    if properties.cast_model_type is not None:
        _check_can_be_cast(model_list, properties.cast_model_type)
    if properties.master_weights:
        _check_takes_masters(optimizer_list)
    scalers = [LossScaler(properties.loss_scale, min_loss_scale=least, max_loss_scale=most) for _ in range(num_losses)]
    session = Session(properties, scalers, model_list, verbosity)
    wholes = _weights_of(model_list) if properties.master_weights else {}
    for model in model_list:
        _convert(model, properties, cast_model_outputs)
    for optimizer in optimizer_list:
        OptimizerState(optimizer, session, uses_masters=bool(properties.master_weights), wholes=wholes)
    begin(session)
    if verbosity:
        logger.info("%s", properties)
    return models if optimizers is None else (models, optimizers)


def _convert(model: Module, properties: Properties, outputs: torch.dtype | None) -> None:
    dtype = properties.cast_model_type
    if dtype is not None:
        cast_model(model, dtype, keeps_batchnorm=bool(properties.keep_batchnorm_fp32))
    if any(tensor.dtype in HALF for tensor in (*model.parameters(), *model.buffers())):
        keep_in_checkpoints(model)
    functions = properties.patch_torch_functions_type if properties.patch_torch_functions else None
    if dtype is not None or functions is not None or outputs is not None:
        wrap(model, Casts(dtype, functions, outputs))


def _weights_of(models: list[Module]) -> dict[int, Tensor]:
    """What the weights hold before they are cast, by their ids: the masters' memory, so nothing is copied."""
    return {id(param): param.data for model in models for param in model.parameters() if param.dtype == torch.float32}


def _models(models: Any) -> list[Module]:
    found = list(models) if isinstance(models, list) else [models]
    for model in found:
        if not isinstance(model, Module):
            raise TypeError(f"models: expected a module or a list of modules, got {type(model).__name__}.")
        if isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            raise AmpError(
                f"models: {type(model).__name__} is a parallel wrapper. Wrap models after amp.initialize, around what "
                "it returns."
            )
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
            raise AmpError(
                f"models: within {type(model).__name__} there is a FullyShardedDataParallel, of whose gradients each "
                "rank has a part, so ranks would not find the same overflows. Use its mixed_precision= and "
                "ShardedGradScaler."
            )
        if not state.allow_incoming_model_not_fp32:
            check_is_whole(model)
    return found


def _check_can_be_cast(models: list[Module], dtype: torch.dtype) -> None:
    """Raise an AmpError if torch's wrapper listens to weights that get another dtype: it would hear no more of them."""
    if not any(_would_go_deaf(wrapper, dtype) for wrapper in wrappers_of(models)):
        return
    gc.collect()  # the wrapper may be no longer in use
    for wrapper in wrappers_of(models):
        if _would_go_deaf(wrapper, dtype):
            raise AmpError(
                f"models: torch's DistributedDataParallel is around a {type(wrapper.module).__name__} already, and "
                f"would not average gradients of weights that become {dtype}. Make it after amp.initialize."
            )


def _would_go_deaf(wrapper: Module, dtype: torch.dtype) -> bool:
    is_cast = any(param.is_floating_point() and param.dtype != dtype for param in wrapper.parameters())
    return is_cast and not isinstance(wrapper, DistributedDataParallel)


def _check_takes_masters(optimizers: list[Any]) -> None:
    """Raise an AmpError if an optimizer steps sharded weights, or has another one step weights of its own groups."""
    for optimizer in optimizers:
        if any(hasattr(param, "placements") for group in optimizer.param_groups for param in group["params"]):
            raise AmpError(
                f"{type(optimizer).__name__} steps sharded weights (DTensor), which have no master weights here. Use "
                "opt_level='O1'; or fully_shard's mp_policy in place of amp."
            )
        for inner in vars(optimizer).values():
            if isinstance(inner, Optimizer) and not all(
                any(own is group for own in optimizer.param_groups) for group in inner.param_groups
            ):
                raise AmpError(
                    f"{type(optimizer).__name__} has a {type(inner).__name__} step the weights, which master weights "
                    "would not reach. Use opt_level='O1', or master_weights=False."
                )


def _optimizers(optimizers: Any) -> list[Any]:
    found = [] if optimizers is None else list(optimizers) if isinstance(optimizers, list) else [optimizers]
    for optimizer in found:
        if not isinstance(optimizer, (Optimizer, LARC)):
            raise TypeError(f"optimizers: expected an optimizer or a list of them, got {type(optimizer).__name__}.")
        if state_of(optimizer) is not None:
            raise AmpError(
                f"this {type(optimizer).__name__} has been through amp.initialize already. Pass each optimizer once; "
                "to begin anew, build a new one."
            )
    return found
