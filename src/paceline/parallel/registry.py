"""The parameters that the ranks have agreed on, and the watch for new ones.

The invariant: ``names``, ``params``, ``strides`` and ``sparse`` change only in ``agree_anew``, a collective call, and
then alike on all ranks. What the module holds may run ahead of that: a parameter registered since is a *newcomer*.

Newcomers are seen at once through torch's registration hooks, even if no forward of the wrapper follows, and once more
by a look at every place where a parameter was found, at the end of each backward.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Set
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module, Parameter
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from paceline.parallel.agreement import Spec, agree
from paceline.parallel.broadcast import broadcast_tensors

# Who wants to know of parameters registered in a module.
_watchers: "weakref.WeakKeyDictionary[Module, weakref.WeakSet[Registry]]" = weakref.WeakKeyDictionary()


class Registry:
    """The trainable and frozen parameters of ``module``, in an order that all ranks share."""

    def __init__(self, module: Module, ignored: Set[str] = frozenset()) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.names: list[str] = []
        self.params: list[Parameter] = []
        self.strides: list[tuple[int, ...]] = []
        self.sparse: set[int] = set()
        self.index_of: dict[Parameter, int] = {}
        self._module = module
        self._ignored = ignored
        self._newcomers: list[Parameter] = []
        _watch()

    def agree(self, group: dist.ProcessGroup, extra: Any = None) -> list[Any]:
        """Compare parameters and buffers by name across the ranks, and take the first rank's order. A collective call.

        Returns:
            Every rank's ``extra``.
        Raises:
            ReplicaMismatchError: on every rank, naming the first difference.
        """
        here = dict(self._named_params())
        buffers = dict(self._named_buffers())
        specs, extras = agree([Spec.of(name, tensor) for name, tensor in {**here, **buffers}.items()], group, extra)
        agreed = [spec for spec in specs if spec.name in here]
        self.names = [spec.name for spec in agreed]
        self.params = [here[spec.name] for spec in agreed]
        self.strides = [spec.stride for spec in agreed]
        self.index_of = {param: index for index, param in enumerate(self.params)}
        sparse = {id(param) for param in _sparse_params(self._module)}
        self.sparse = {index for index, param in enumerate(self.params) if id(param) in sparse}
        self.buffer_names = [spec.name for spec in specs if spec.name in buffers]
        self._newcomers = []
        self._look_around()
        return extras

    def agree_anew(self, group: dist.ProcessGroup) -> dict[str, int]:
        """``agree`` after a change; newcomers get the first rank's values. A collective call.

        Returns:
            For each name that is new on some rank, on how many it is.
        """
        known = set(self.params)
        mine = [name for name, param in self._named_params() if param not in known]
        everyones = self.agree(group, extra=mine)
        news = Counter(name for names in everyones for name in names)
        broadcast_tensors([param for name, param in zip(self.names, self.params, strict=True) if name in news], group)
        return dict(news)

    def notice_changes(self) -> bool:
        """Whether the module holds other parameters than those agreed on."""
        if self._newcomers:
            return True
        in_place = all(table.get(name) is param for table, name, param in self._places)
        return not in_place or self._num_entries != sum(map(len, self._tables))

    def present(self) -> Iterator[Parameter]:
        """The parameters agreed on, and the newcomers."""
        yield from self.params
        yield from self._newcomers

    def buffers(self) -> list[torch.Tensor]:
        """The module's buffers as they are now, in an order that all ranks share."""
        here = dict(self._named_buffers())
        return [here[name] for name in self.buffer_names if name in here]

    def _named_params(self) -> Iterator[tuple[str, Parameter]]:
        return ((name, p) for name, p in self._module.named_parameters() if name not in self._ignored)

    def _named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, b) for name, b in self._module.named_buffers() if name not in self._ignored)

    def _look_around(self) -> None:
        """Note where parameters and modules lie, so that a later look is cheap."""
        modules = list(self._module.modules())
        for module in modules:
            _watchers.setdefault(module, weakref.WeakSet()).add(self)
        self._tables: list[dict[str, Any]] = [
            *(module._parameters for module in modules),
            *(module._modules for module in modules),
        ]
        self._places = [(table, name, entry) for table in self._tables for name, entry in table.items()]
        self._num_entries = len(self._places)

    def _meet(self, params: Iterator[Parameter]) -> None:
        news = [param for param in params if param not in self.index_of]
        if news:
            self._newcomers.extend(news)
            self.on_change()


def _sparse_params(module: Module) -> Iterator[torch.Tensor]:
    """Parameters whose gradients are sparse tensors."""
    for part in module.modules():
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse:
            yield part.weight


def _on_parameter(module: Module, _name: str, param: Parameter | None) -> None:
    if param is not None:
        for registry in tuple(_watchers.get(module, ())):
            registry._meet(iter([param]))


def _on_module(parent: Module, _name: str, child: Module | None) -> None:
    if child is not None:
        for registry in tuple(_watchers.get(parent, ())):
            for module in child.modules():
                _watchers.setdefault(module, weakref.WeakSet()).add(registry)
            registry._meet(child.parameters())


_watching = False


def _watch() -> None:
    """Ask torch to tell of registered parameters; once, and only when the first model is wrapped."""
    global _watching
    if not _watching:
        register_module_parameter_registration_hook(_on_parameter)
        register_module_module_registration_hook(_on_module)
        _watching = True
