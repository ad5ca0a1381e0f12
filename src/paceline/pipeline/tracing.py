"""Following a model's forward with torch.fx, some of its modules left whole.

A forward branches on what it is called with: on arguments that are None, on flags, on names. So these are what they are
in the example, or by default, when it is followed, and must be the same in every call.

torch.fx runs forward once and writes down what is done with its arguments. What else forward does would be done then
and never again, so it is refused: random draws, attributes that it sets, modes of torch that it switches.

The invariant: a call that ``check`` accepts does what the graph does, no more and no less.
"""

import contextlib
import copy
import dis
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy
import torch
from torch import fx
from torch.nn import Module

from paceline.errors import DataError, PlanError


@dataclass(frozen=True)
class Example:
    """A model's arguments, as a user gives an example of them: a tensor, a tuple of arguments, or a dict."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, given: Any) -> "Example":
        if isinstance(given, dict):
            return cls((), dict(given))
        return cls(given if isinstance(given, tuple) else (given,), {})


class Tracing:
    """How a model is followed.

    Args:
        whole: names of modules that are called, not followed; those within others of them too.
        example: of its arguments; by default those that have no default.
    Raises:
        PlanError: the example does not fit its forward.
    """

    def __init__(self, module: Module, whole: Sequence[str], example: Example | None) -> None:
        self._module = module
        self._whole = whole
        self._signature = inspect.signature(module.forward)
        self._fixed = self._choose_fixed(example)

    def graph(self) -> fx.Graph:
        """Of its forward, in the mode in which it is now.

        Raises:
            PlanError: it branches on values, or does something else that torch.fx cannot follow.
        """
        followed = [part for name, part in self._module.named_modules() if not is_left_whole(name, self._whole)]
        try:
            with _without_effects(followed):
                return _Tracer(self._whole, self._fixed).trace(self._module)
        except Exception as error:
            raise PlanError(
                f"{self._name} cannot be followed, so the model cannot be cut: {error}. Give a list of stages, each a "
                "module that takes what the one before it returns."
            ) from error

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse what differs from what it was followed with.

        Raises:
            DataError: an argument does.
            TypeError: as Python's, for arguments that forward does not take.
        """
        for name, value in self._signature.bind(*args, **kwargs).arguments.items():
            if name in self._fixed and not _are_same(value, self._fixed[name]):
                given = type(value).__name__ if isinstance(value, torch.Tensor) else repr(value)
                raise DataError(
                    f"{self._name} is called with {name}={given}, but was followed with {name}={self._fixed[name]!r} "
                    "when the model was cut. Pass `example`: arguments like those of the calls."
                )

    @property
    def _name(self) -> str:
        return f"{type(self._module).__name__}.forward"

    def _choose_fixed(self, example: Example | None) -> dict[str, Any]:
        """The arguments on which forward may branch."""
        given: dict[str, Any] = {}
        if example is not None:
            try:
                given = self._signature.bind(*example.args, **example.kwargs).arguments
            except TypeError as error:
                raise PlanError(f"example does not fit {self._name}: {error}.") from error
        fixed = {
            name: parameter.default
            for name, parameter in self._signature.parameters.items()
            if name not in given and parameter.default is not parameter.empty
        }
        return fixed | {name: value for name, value in given.items() if value is None or isinstance(value, (bool, str))}


def is_left_whole(name: str, whole: Sequence[str]) -> bool:
    """Whether the module of that name holds none of ``whole``, or is one. The model itself, "", never is."""
    return name != "" and not any(other.startswith(f"{name}.") for other in whole)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # or what is computed of a buffer alone would be computed now, once

    def __init__(self, whole: Sequence[str], fixed: Mapping[str, Any]) -> None:
        super().__init__()
        self._whole = whole
        self._fixed = fixed
        self._modes = _modes()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Refuse what is done under another mode, which the graph would not switch to."""
        if _modes() != self._modes:
            raise PlanError("it computes under no_grad, another autocast, or checkpoint. Have a block do so")
        return super().create_node(*args, **kwargs)

    def create_args_for_root(
        self,
        root_fn: Callable[..., Any],
        is_module: bool,
        concrete_args: Any = None,
    ) -> tuple[Any, list[Any]]:
        """Call with what is fixed. ``concrete_args`` would flatten what is returned, and leave checks in the graph."""
        fn, args = super().create_args_for_root(root_fn, is_module, concrete_args)
        return fn, [self._fixed.get(str(arg.node.target), arg) if isinstance(arg, fx.Proxy) else arg for arg in args]

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:  # noqa: ARG002  # torch's signature
        return is_left_whole(module_qualified_name, self._whole)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Let assertions pass, to be checked when the stage runs; torch's own way knows but the simplest of them."""
        frame = sys._getframe(2)  # that of ``assert``, past ``Proxy.__bool__``
        if not _asserts(frame):
            return super().to_bool(obj)
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self.create_proxy("call_function", torch._assert, (obj, f"the assertion at {where} failed"), {})
        return True


def _asserts(frame: FrameType) -> bool:
    """Whether the frame is asking for a truth value in order to assert it."""
    coming = [step for step in dis.get_instructions(frame.f_code) if step.offset >= frame.f_lasti]
    names = [step.opname for step in coming if step.opname not in ("TO_BOOL", "CACHE", "NOP", "NOT_TAKEN")][:2]
    return (
        len(names) == 2
        and names[0].startswith("POP_JUMP")
        and names[0].endswith("IF_TRUE")
        and names[1] in ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT")
    )


def _modes() -> tuple[Any, ...]:
    """Of torch, which change what operations do."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), hooks, *autocast


@contextlib.contextmanager
def _without_effects(modules: Sequence[Module]) -> Iterator[None]:
    """Refuse what a forward in this block leaves behind, and undo it.

    Raises:
        PlanError: it has drawn random numbers, or set attributes.
    """
    attributes = [_attributes_of(module) for module in modules]
    contents = [
        {name: copy.copy(value) for name, value in held.items() if isinstance(value, list)} for held in attributes
    ]
    torchs, pythons, numpys = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    drawn = _fingerprint()
    changed: set[str] = set()
    try:
        yield
    finally:
        has_drawn = _fingerprint() != drawn
        torch.set_rng_state(torchs)
        random.setstate(pythons)
        numpy.random.set_state(numpys)
        for module, before, lists in zip(modules, attributes, contents, strict=True):
            now = _attributes_of(module)
            for name in now.keys() - before.keys():
                del vars(module)[name]
                changed.add(name)
            for name in [name for name, value in before.items() if now.get(name) is not value]:
                vars(module)[name] = before[name]
                changed.add(name)
            for name in [name for name, value in lists.items() if len(value) != len(before[name])]:
                before[name][:] = lists[name]
                changed.add(name)
    if has_drawn:
        raise PlanError("it draws random numbers that depend on no argument. Have a block do so")
    if changed:
        raise PlanError(f"it sets {', '.join(f'self.{name}' for name in sorted(changed))}. Have a block do so")


def _fingerprint() -> tuple[Any, ...]:
    """Of the random states."""
    _, numbers, *rest = numpy.random.get_state(legacy=True)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy.asarray(numbers).tobytes(), rest


def _attributes_of(module: Module) -> dict[str, Any]:
    """What it has, but for what torch.fx itself sets."""
    return {name: value for name, value in vars(module).items() if not name.startswith("_tensor_constant")}


def _are_same(one: object, other: object) -> bool:
    return one is other or (type(one) is type(other) and not isinstance(one, torch.Tensor) and bool(one == other))
