"""What is to be measured: a function that makes a model and a batch, found, called and looked at.

[Note: what make returns] The function returns a model, a batch ``(inputs, target)``, and, if you like, a loss
``loss(output, target)`` and an optimizer of the model's parameters. ``inputs`` is a tensor, a tuple of positional
arguments or a dict of keyword arguments. Without a loss it is cross-entropy where the target holds integers, and the
mean squared error where it does not; without an optimizer it is SGD. The function is called on each rank for each way
of training, after the same seed, so that all start alike.

The invariant: a recipe can be sent to another process, and nothing of the user's runs before that process asks for it.
"""

import functools
import importlib
import importlib.util
import inspect
import os
import pathlib
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils._pytree import tree_leaves, tree_map

from paceline.bench.models import BUILT_IN
from paceline.errors import BenchError

_EXPECTED = "expected (model, (inputs, target)), and if you like a loss and an optimizer behind them"
_SEED = 0


@dataclass(frozen=True)
class Recipe:
    """How to make what is measured.

    Args:
        model: a built-in's name, ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``.
        batch_size: what the function is to be told; None for its own.
    Raises:
        BenchError: ``model`` is none of these, or there is no such file.
    """

    model: str
    batch_size: int | None = None

    def __post_init__(self) -> None:
        source, _, function = self.model.rpartition(":")
        if self.model in BUILT_IN:
            return
        if not source or not function.isidentifier():
            hint = f"; did you mean {self.model}:make?" if self.model.endswith(".py") else ""
            raise BenchError(
                f"--model {self.model}: expected {', '.join(BUILT_IN)}, FILE.py:FUNCTION or MODULE:FUNCTION{hint}"
            )
        if source.endswith(".py") and not os.path.isfile(source):
            raise BenchError(f"--model {self.model}: no such file: {source!r} (looked in {os.getcwd()})")

    @functools.cached_property
    def _make(self) -> Callable[..., Any]:
        """The function. Imports the user's code, once in a process."""
        if self.model in BUILT_IN:
            return BUILT_IN[self.model]
        source, _, name = self.model.rpartition(":")
        try:
            module = _import_file(source) if source.endswith(".py") else _import_module(source)
        except Exception as error:
            raise BenchError(f"--model {self.model}: {source} cannot be imported: {_spell(error)}") from error
        make = getattr(module, name, None)
        if not inspect.isroutine(make):
            own = [name for name, value in vars(module).items() if inspect.isfunction(value) and name[0] != "_"]
            there = f"it has {', '.join(own)}" if own else "it has none"
            raise BenchError(f"--model {self.model}: {source} has no function {name!r}; {there}")
        return make

    def load(self) -> None:
        """Import what there is to import.

        Raises:
            BenchError: that failed, or there is no such function.
        """
        _ = self._make

    def make(self, device: torch.device) -> "Training":
        """Call the function, and put what it returns on ``device``.

        Raises:
            BenchError: it cannot be called, it raised, or it returned something else. [Note: what make returns]
        """
        torch.manual_seed(_SEED)
        arguments = self._arguments()
        try:
            made = self._make(**arguments)
        except Exception as error:
            raise BenchError(f"--model {self.model}: it raised {_spell(error)}") from error
        try:
            return _training(made, device)
        except BenchError as error:
            raise BenchError(f"--model {self.model}: {error}") from None

    def _arguments(self) -> dict[str, int]:
        parameters = inspect.signature(self._make).parameters
        needed = [
            name
            for name, p in parameters.items()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        takes_size = "batch_size" in parameters
        if set(needed) - {"batch_size"} or (needed and self.batch_size is None):
            raise BenchError(
                f"--model {self.model}: it needs {', '.join(needed)}, which nobody gives it; expected a function "
                "without arguments, or with batch_size alone, which --batch-size sets"
            )
        if self.batch_size is not None and not takes_size:
            raise BenchError(
                f"--batch-size {self.batch_size}: {self.model} takes no argument batch_size. Give it one, or leave the "
                "option out"
            )
        return {} if self.batch_size is None else {"batch_size": self.batch_size}


@dataclass
class Training:
    """A model, and all that a step of it needs, on one device."""

    model: nn.Module
    inputs: Any
    target: Any
    loss: Callable[[Any, Any], Any]
    optimizer: torch.optim.Optimizer

    @property
    def batch_size(self) -> int:
        """Samples: what the first tensor of the inputs has along its first dimension."""
        return len(_first_tensor(self.inputs))

    def widen(self, times: int) -> None:
        """Let the batch be ``times`` as large, by repeating it."""
        size = self.batch_size

        def repeat(leaf: Any) -> Any:
            is_batched = isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == size
            return torch.cat([leaf] * times) if is_batched else leaf

        self.inputs, self.target = tree_map(repeat, self.inputs), tree_map(repeat, self.target)

    def call(self, model: nn.Module) -> Any:
        """The output of ``model``, which may be a wrapper around this one."""
        if isinstance(self.inputs, dict):
            return model(**self.inputs)
        return model(*self.inputs) if isinstance(self.inputs, tuple) else model(self.inputs)

    def loss_of(self, output: Any) -> Tensor:
        """One number.

        Raises:
            BenchError: the loss is no tensor of one element, or depends on no parameter.
        """
        loss = self.loss(output, self.target)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            got = (
                f"a tensor of shape {tuple(loss.shape)}"
                if isinstance(loss, Tensor)
                else f"of type {type(loss).__name__}"
            )
            raise BenchError(f"the loss is {got}; expected a tensor of one element that depends on the parameters")
        return loss


def _training(made: Any, device: torch.device) -> Training:
    if not isinstance(made, (tuple, list)) or not 2 <= len(made) <= 4:
        got = f"{len(made)} values" if isinstance(made, (tuple, list)) else f"a value of type {type(made).__name__}"
        raise BenchError(f"it returned {got}; {_EXPECTED}")
    model, batch, loss, optimizer = [*made, None, None][:4]
    if not isinstance(model, nn.Module):
        raise BenchError(f"its first value, of type {type(model).__name__}, is no torch.nn.Module; {_EXPECTED}")
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise BenchError(f"its second value, of type {_describe(batch)}, is no pair (inputs, target); {_EXPECTED}")
    if not any(param.requires_grad for param in model.parameters()):
        raise BenchError("its model has no parameter to train")
    model.to(device).train()
    inputs, target = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tuple(batch))
    if not isinstance(_first_tensor(inputs), Tensor):
        raise BenchError(f"its inputs, of type {_describe(inputs)}, hold no tensor whose first dimension is the batch")
    if loss is None:
        if not isinstance(target, Tensor):
            raise BenchError(
                f"for its target, of type {_describe(target)}, there is no loss; return one as the third value"
            )
        loss = mse_loss if target.is_floating_point() else cross_entropy
    if not callable(loss):
        raise BenchError(f"its third value, of type {type(loss).__name__}, is no loss(output, target); {_EXPECTED}")
    if isinstance(loss, nn.Module):
        loss.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3) if optimizer is None else optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BenchError(
            f"its fourth value, of type {type(optimizer).__name__}, is no torch.optim.Optimizer; {_EXPECTED}"
        )
    return Training(model, inputs, target, loss, optimizer)


def _first_tensor(tree: Any) -> Any:
    return next((leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dim() > 0), None)


def _describe(value: Any) -> str:
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (tuple, list, dict)) else type(value).__name__


def _import_file(path: str) -> ModuleType:
    """As ``python FILE`` finds what lies beside it, but not as ``__main__``."""
    file = pathlib.Path(path).resolve()
    _look_in(str(file.parent))
    name = f"bench_{file.stem}" if file.stem in sys.modules else file.stem
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    """As ``python -m`` finds it."""
    _look_in(os.getcwd())
    return importlib.import_module(name)


def _look_in(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _spell(error: Exception) -> str:
    """The error, and the last line of its own that led to it."""
    if isinstance(error, SyntaxError):  # says its own place; the line that led to it is of Python's import
        return f"{type(error).__name__}: {error}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
