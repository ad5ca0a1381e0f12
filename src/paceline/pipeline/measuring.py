"""What each unit of a model costs: its time, and its memory.

Each unit is run by itself, as a copy, on what the unit before it made of the example; the model, its gradients and the
random state stay as they are.

The invariant: only this file measures; what follows from the costs is pure.
"""

import copy
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.pipeline.split import Model
from paceline.pipeline.stage import Parcel, Stage
from paceline.pipeline.values import moved

_ROUNDS = 5


@dataclass(frozen=True)
class Cost:
    """Of one unit, for the example.

    Attributes:
        forward_s, backward_s: the median of several rounds, in seconds.
        weight_bytes: parameters, and as many gradients.
        kept_bytes: what autograd keeps from forward to backward, weights apart.
    """

    forward_s: float
    backward_s: float
    weight_bytes: int
    kept_bytes: int


def weights_of(model: Model) -> list[int]:
    """Elements of the parameters of each unit."""
    return [
        sum(parameter.numel() for parameter in model.stage(range(unit, unit + 1)).parameters())
        for unit in range(len(model.units))
    ]


def measure(model: Model, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> list[Cost]:
    """Run each unit's forward and backward on ``device``.

    Args:
        args, kwargs: an example of the model's arguments, best of a microbatch's size.
    Raises:
        Exception: of a unit's own forward or backward, with its name.
    """
    costs: list[Cost] = []
    given: Any = (moved(args, device), moved(kwargs, device))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        for number in range(len(model.units)):
            part = copy.deepcopy(model.stage(range(number, number + 1))).to(device)
            stage = Stage(number, part, device)
            timed = [_run(stage, given) for _ in range(_ROUNDS)]
            kept_bytes, parcel = _weigh(stage, given)
            weight_bytes = sum(2 * parameter.nbytes for parameter in part.parameters())
            forward_s, backward_s = (statistics.median(column) for column in zip(*timed, strict=True))
            costs.append(Cost(forward_s, backward_s, weight_bytes, kept_bytes))
            given = parcel
    return costs


def _run(stage: Stage, given: Any) -> tuple[float, float]:
    """Seconds of forward and of backward."""
    start = _now(stage.device)
    parcel = _forward(stage, given)
    middle = _now(stage.device)
    grads: list[Tensor | None] = [
        torch.ones_like(tensor) if wanted else None
        for tensor, wanted in zip(parcel.tensors, parcel.wanted, strict=True)
    ]
    ready = _now(stage.device)
    stage.backward(0, grads)
    return middle - start, _now(stage.device) - ready


def _weigh(stage: Stage, given: Any) -> tuple[int, Parcel]:
    """Bytes that are kept for backward, each storage once."""
    own = {parameter.untyped_storage().data_ptr() for parameter in stage.part.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        parcel = _forward(stage, given)
    stage.forget()
    return sum(kept.values()), parcel


def _forward(stage: Stage, given: Any) -> Parcel:
    return stage.forward(0, given) if isinstance(given, Parcel) else stage.first(0, given)


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    return time.perf_counter()
