"""The parameters and buffers that the ranks have agreed on, and the watch for other ones.

The invariant: ``names``, ``params``, ``strides``, ``sparse`` and ``buffer_names`` change only in ``agree`` and
``agree_anew``, collective calls, and then alike on all ranks. What the module holds may run ahead of that: a parameter
registered since is a *newcomer*.

Changes are seen twice. torch's registration hooks tell of a newcomer at once, so that its gradient is noticed even if
no forward of the wrapper follows. And at the end of each backward ``has_changed`` looks at every place where something
was found, since a script may also write into ``module._parameters``, or remove a layer, which no hook tells.
"""

import itertools
import operator
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Set
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module, Parameter
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from paceline.parallel.replicas.agreement import agree, specs_of
from paceline.parallel.replicas.broadcast import broadcast_tensors

# Who wants to know of parameters registered in a module.
_watchers: "weakref.WeakKeyDictionary[Module, weakref.WeakSet[Registry]]" = weakref.WeakKeyDictionary()


class Registry:
    """The trainable and frozen parameters of ``module``, in an order that all ranks share.

    Args:
        ignored: names of parameters and buffers to leave alone.
        with_buffers: whether buffers are copied between ranks, and so must agree.
        is_fixed: whether the parameters are those of the beginning, whatever becomes of the module.
    """

    def __init__(
        self,
        module: Module,
        ignored: Set[str] = frozenset(),
        *,
        with_buffers: bool = True,
        is_fixed: bool = False,
    ) -> None:
        self.on_newcomer: Callable[[], None] = lambda: None
        self.names: list[str] = []
        self.params: list[Parameter] = []
        self.strides: list[tuple[int, ...]] = []
        self.sparse: set[int] = set()  # indices of parameters whose gradients are sparse
        self.buffer_names: list[str] = []
        self._buffer_kinds: list[tuple[torch.Size, torch.dtype]] = []
        self._module = module
        self._ignored = ignored
        self._with_buffers = with_buffers
        self._is_fixed = is_fixed
        self._newcomers = WeakIdKeyDictionary()
        self._departed = WeakIdKeyDictionary()  # names of parameters that the module has no longer
        self._watched: weakref.WeakSet[Module] = weakref.WeakSet()
        _watch()

    def agree(self, group: dist.ProcessGroup, extra: Any = None) -> list[Any]:
        """Compare parameters and buffers by name across the ranks, and take the first rank's order. A collective call.

        Returns:
            Every rank's ``extra``.
        Raises:
            ReplicaMismatchError: on every rank, naming the first difference.
        """
        here, buffers = dict(self._named_params()), dict(self._named_buffers())
        specs, extras = agree(specs_of({**here, **buffers}), group, extra)
        agreed = [spec for spec in specs if spec.name in here]
        before = dict(zip(self.names, self.params, strict=True))
        self.names = [spec.name for spec in agreed]
        self.params = [here[spec.name] for spec in agreed]
        self._note_departed(before)
        self.strides = [spec.stride for spec in agreed]
        sparse = {id(param) for param in _sparse_params(self._module)}
        self.sparse = {index for index, param in enumerate(self.params) if id(param) in sparse}
        self.buffer_names = [spec.name for spec in specs if spec.name in buffers]
        self._buffer_kinds = [(buffers[name].shape, buffers[name].dtype) for name in self.buffer_names]
        self._newcomers.clear()
        self._note_places()
        return extras

    def agree_anew(self, group: dist.ProcessGroup) -> dict[str, int]:
        """``agree`` after a change; newcomers get the first rank's values. A collective call.

        Returns:
            For each name that is new on some rank, on how many it is.
        """
        known = {id(param) for param in self.params}
        mine = [name for name, param in self._named_params() if id(param) not in known]
        everyones = self.agree(group, extra=mine)
        news = Counter(name for names in everyones for name in names)
        broadcast_tensors([param for name, param in zip(self.names, self.params, strict=True) if name in news], group)
        return dict(news)

    def has_changed(self) -> bool:
        """Whether the module holds other parameters, or other kinds of buffers, than those agreed on."""
        if self._is_fixed:
            return False
        if self._newcomers:
            return True
        if any(self._empty_tables):
            return True
        entries = list(itertools.chain.from_iterable(map(dict.values, self._tables)))
        if len(entries) != len(self._entries) or not all(map(operator.is_, entries, self._entries)):
            return True
        if self._num_buffers != sum(map(len, self._buffer_tables)):
            return True
        return not all(_kind(table.get(name)) == kind for table, name, kind in self._buffer_places)

    def present(self) -> Iterator[Parameter]:
        """The parameters agreed on, the newcomers, and those that the module has no longer."""
        yield from self.params
        yield from self._newcomers
        yield from self._departed

    def warn_of_departed(self, arrived: Container[int]) -> None:
        """Warn of parameters that the module had, and has no longer: nobody averages their gradients. Once for each.

        Args:
            arrived: the ids of those whose gradients have come.
        """
        for param in [param for param in self._departed if id(param) in arrived] if self._departed else ():
            name = self._departed.pop(param)  # type: ignore[no-untyped-call]
            warnings.warn(
                f"{name!r} is no parameter of the model any more, and yet backward computes a gradient of it, which is "
                "not averaged between ranks. Keep it in the model, or wrap what it belongs to on its own.",
                stacklevel=2,
            )

    def buffers(self) -> list[torch.Tensor]:
        """The module's buffers as they are now, in an order that all ranks share.

        In place of one that is gone, or of another shape or dtype than agreed on, stands a tensor that nobody looks at,
        so that messages have one size on all ranks; the end of the next backward brings the change to light.
        """
        here = dict(self._named_buffers())
        found = [here.get(name) for name in self.buffer_names]
        device = self.params[0].device
        return [
            buffer
            if buffer is not None and _kind(buffer) == kind
            else torch.zeros(kind[0], dtype=kind[1], device=device)
            for buffer, kind in zip(found, self._buffer_kinds, strict=True)
        ]

    def _named_params(self) -> Iterator[tuple[str, Parameter]]:
        return ((name, p) for name, p in self._module.named_parameters() if name not in self._ignored)

    def _named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._with_buffers:
            yield from ((name, b) for name, b in self._module.named_buffers() if name not in self._ignored)

    def _note_departed(self, before: dict[str, Parameter]) -> None:
        ids = {id(param) for param in self.params}
        for name, param in before.items():
            if id(param) not in ids:
                self._departed[param] = name
        for param in [param for param in self._departed if id(param) in ids]:
            del self._departed[param]

    def _note_places(self) -> None:
        """Note where parameters, buffers and modules lie, so that a later look is cheap; watch the modules."""
        modules = list(self._module.modules())
        for module in set(self._watched) - set(modules):
            _watchers[module].discard(self)
        for module in modules:
            self._watch(module)
        tables = [table for module in modules for table in (module._parameters, module._modules)]
        self._tables: list[dict[str, Any]] = [table for table in tables if table]
        self._empty_tables = [table for table in tables if not table]  # half of them, in most models
        self._entries = list(itertools.chain.from_iterable(map(dict.values, self._tables)))
        self._buffer_tables = [module._buffers for module in modules] if self._with_buffers else []
        self._num_buffers = sum(map(len, self._buffer_tables))
        # A buffer is replaced in the ordinary course of things; what must stay is its shape and dtype.
        self._buffer_places = [(table, name, _kind(b)) for table in self._buffer_tables for name, b in table.items()]

    def _watch(self, module: Module) -> None:
        _watchers.setdefault(module, weakref.WeakSet()).add(self)
        self._watched.add(module)

    def _welcome(self, params: Iterable[Parameter]) -> None:
        known = {id(param) for param in self.params}
        news = [param for param in params if id(param) not in known]
        for param in news:
            self._newcomers[param] = None
        if news:
            self.on_newcomer()


def _kind(buffer: torch.Tensor | None) -> tuple[torch.Size, torch.dtype] | None:
    return None if buffer is None else (buffer.shape, buffer.dtype)


def _sparse_params(module: Module) -> Iterator[torch.Tensor]:
    """Parameters whose gradients are sparse tensors."""
    for part in module.modules():
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse:
            yield part.weight


def _on_parameter(module: Module, _name: str, param: Parameter | None) -> None:
    if param is not None:
        for registry in tuple(_watchers.get(module, ())):
            registry._welcome([param])


def _on_module(parent: Module, _name: str, child: Module | None) -> None:
    if child is not None:
        for registry in tuple(_watchers.get(parent, ())):
            for module in child.modules():
                registry._watch(module)
            registry._welcome(child.parameters())


_is_watching = False


def _watch() -> None:
    """Ask torch to tell of registered parameters; once, and only when the first model is wrapped."""
    global _is_watching
    if not _is_watching:
        register_module_parameter_registration_hook(_on_parameter)
        register_module_module_registration_hook(_on_module)
        _is_watching = True
