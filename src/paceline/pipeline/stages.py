"""Which part of a model each stage is.

The invariant: every parameter of the model is in a stage, and the names of the model's parameters stay what they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Literal, TypeAlias

import torch
from torch.nn import Module, Sequential

from paceline.errors import PlanError
from paceline.pipeline.balance import partition, partition_by
from paceline.pipeline.clock import peak_by_stage
from paceline.pipeline.measuring import measure, weights_of
from paceline.pipeline.schedule import Schedule
from paceline.pipeline.split import Model, Row, Traced, has_hooks
from paceline.pipeline.tracing import Example

Balance: TypeAlias = Literal["parameters", "time", "memory"] | Sequence[str]


@dataclass(frozen=True)
class Cut:
    """A model, and where it is cut.

    Attributes:
        root: the undivided model.
        units: the names of each stage's units.
    """

    root: Module
    model: Model
    ranges: tuple[range, ...]

    @property
    def units(self) -> list[list[str]]:
        return [[self.model.units[unit] for unit in stage] for stage in self.ranges]

    def part(self, stage: int) -> Module:
        return self.model.stage(self.ranges[stage])


class _Given:
    """Stages that the user has made."""

    def __init__(self, root: Sequential) -> None:
        self._root = root
        self.units = [str(number) for number in range(len(root))]

    def stage(self, units: range) -> Module:
        return self._root[units.start]

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The first stage takes what it takes."""


def open_model(module: Module | Sequence[Module], balance: Balance, example: Example | None) -> tuple[Module, Model]:
    """What can be cut, and the undivided model.

    Raises:
        PlanError: it cannot be cut.
    """
    if not isinstance(module, Module):
        root = Sequential(*module)
        root.training = any(stage.training for stage in root)
        return root, _Given(root)
    if has_hooks(module):
        raise PlanError(
            f"{type(module).__name__} has hooks of its own, which no stage would call. Register them on its parts, or "
            "remove them before it is cut."
        )
    if "forward" in vars(module):
        raise PlanError(
            f"the forward of this {type(module).__name__} has been replaced, as amp.initialize and torch.compile do, "
            "and no stage would call it. Compile its blocks; torch.autocast around a step holds in all stages."
        )
    if type(module).forward is Sequential.forward:
        assert isinstance(module, Sequential)
        return module, Row(module)
    return module, Traced(module, None if isinstance(balance, str) else balance, example)


def choose_ranges(
    model: Model, num_stages: int, balance: Balance, example: Example | None, schedule: Schedule, device: torch.device
) -> tuple[range, ...]:
    """The units of each stage.

    Args:
        balance: "parameters", "time" or "memory": the dearest stage is to be as cheap as can be; or the names of the
            units with which the stages after the first begin.
        schedule: says how many microbatches each stage keeps.
        device: on which units are measured.
    Raises:
        PlanError: too few units, unknown names, or no example where one is needed.
    """
    if isinstance(model, _Given):
        if len(model.units) != num_stages:
            raise PlanError(
                f"{len(model.units)} stages are given, but {num_stages} are needed, one for each lane's turn."
            )
        return tuple(range(number, number + 1) for number in range(num_stages))
    if not isinstance(balance, str):
        return _by_names(model, num_stages, balance)
    if balance == "parameters":
        return tuple(partition(weights_of(model), num_stages))
    if balance not in ("time", "memory"):
        raise PlanError(f"balance={balance!r}: expected 'parameters', 'time', 'memory', or names of units.")
    if example is None:
        raise PlanError(f"balance={balance!r} needs an `example` of the model's input, of a microbatch's size.")
    costs = measure(model, example.args, example.kwargs, device)
    if balance == "time":
        return tuple(partition([cost.forward_s + cost.backward_s for cost in costs], num_stages))
    kept = peak_by_stage(schedule)

    def bytes_of(stage: int, begin: int, end: int) -> float:
        units = costs[begin:end]
        return sum(cost.weight_bytes + kept[stage] * cost.kept_bytes for cost in units)

    return tuple(partition_by(bytes_of, len(costs), num_stages))


def users_of(root: Module, parts: Sequence[Module]) -> dict[int, list[int]]:
    """By the ``id`` of a parameter or buffer, the stages that use it, in order; what none uses is with the first."""
    users: dict[int, list[int]] = {}
    for number, part in enumerate(parts):
        for tensor in chain(part.parameters(), part.buffers()):
            users.setdefault(id(tensor), []).append(number)
    for tensor in chain(root.parameters(), root.buffers()):
        users.setdefault(id(tensor), [0])
    return users


def homes_of(root: Module, parts: Sequence[Module], lanes_of: dict[int, list[int]], num_lanes: int) -> dict[str, int]:
    """The lane from which each entry of the model's state is taken: where the tensor is, or else its module.

    Args:
        lanes_of: by the ``id`` of a parameter or buffer.
    """
    lane_of_module: dict[int, int] = {}
    for number, part in enumerate(parts):
        for module in part.modules():
            lane_of_module.setdefault(id(module), number % num_lanes)
    modules = dict(root.named_modules())
    homes: dict[str, int] = {}
    for name, value in root.state_dict(keep_vars=True).items():
        owner = modules.get(name.rpartition(".")[0], root)
        homes[name] = lanes_of[id(value)][0] if id(value) in lanes_of else lane_of_module.get(id(owner), 0)
    return homes


def move(part: Module, device: torch.device, placed: set[int]) -> None:
    """Move what is not in ``placed`` (by ``id``) yet, and note it there.

    Each tensor stays the same object, since the undivided model and its optimizers know it. A buffer that has its place
    elsewhere is copied.
    """
    for module in part.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in placed:
                    placed.add(id(tensor))
                    tensor.data = tensor.data.to(device)
                elif tensors is module._buffers and tensor.device != device:
                    module._buffers[name] = tensor.to(device)


def release(root: Module, own: set[int]) -> None:
    """Let go of the parameters and buffers that are not in ``own`` (by ``id``); their names stay, without values."""
    for part in root.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in own:
                    tensors[name] = None


def _by_names(model: Model, num_stages: int, names: Sequence[str]) -> tuple[range, ...]:
    if len(names) != num_stages - 1:
        raise PlanError(f"balance names {len(names)} units, but {num_stages} stages have {num_stages - 1} borders.")
    unknown = [name for name in names if name not in model.units]
    if unknown:
        raise PlanError(f"balance names {unknown[0]!r}, but the units are {', '.join(model.units)}.")
    starts = [0, *(model.units.index(name) for name in names), len(model.units)]
    if any(begin >= end for begin, end in pairwise(starts)):
        raise PlanError(f"balance names {', '.join(names)}, which are not in the order of the model, or begin it.")
    return tuple(range(begin, end) for begin, end in pairwise(starts))
