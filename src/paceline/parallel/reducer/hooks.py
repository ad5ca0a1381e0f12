"""Hooks on parameters: told of each gradient, whether or not anybody's forward was called.

The invariant: hooks keep neither their owner nor a parameter alive, and go with their owner.
"""

import functools
import weakref
from collections.abc import Callable, Container, Iterable
from typing import Any

from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary


class GradientHooks:
    """Calls ``on_gradient(param)`` when autograd has accumulated into ``param.grad``, or notes it for later.

    [Note: the gate] A call from autograd into Python costs more than a small gradient is worth. So most parameters
    share one hook, a *gate*, a ``functools.partial`` that can be turned. Closed, as between backwards, it leads to
    ``on_gradient``. When somebody has taken charge of a backward he opens it; then it leads straight to
    ``list.append``, which runs no Python code, and ``on_gradient`` is called for a few chosen parameters alone. So no
    gradient comes unseen, whoever starts a backward.

    Args:
        on_gradient: a method of the owner, which is not kept alive.
    """

    def __init__(self, on_gradient: Callable[[Parameter], None]) -> None:
        self._noted: list[Parameter] = []
        self._on_gradient = weakly(on_gradient)
        self._gate = functools.partial(self._on_gradient)
        self._handles: WeakIdKeyDictionary = WeakIdKeyDictionary()  # (whether it is told at once, the hook's handle)
        weakref.finalize(self, _remove_all, self._handles)

    def open_gate(self) -> None:
        self._noted.clear()
        self._turn(self._noted.append)

    def close_gate(self) -> None:
        self._turn(self._on_gradient)

    def take_noted(self) -> dict[int, None]:
        """The ids, in order, of the parameters whose gradients have come through the open gate since the last call."""
        ids = dict.fromkeys(map(id, self._noted))
        self._noted.clear()
        return ids

    def _turn(self, target: Callable[..., object]) -> None:
        self._gate.__setstate__((target, (), {}, None))  # type: ignore[attr-defined]

    def follow(self, params: Iterable[Parameter], chosen: Container[int]) -> None:
        """Hook each of ``params`` once, and no others any more.

        Frozen ones too: a hook outlives freezing, so nobody need tell when a parameter is unfrozen.

        Args:
            chosen: the ids of those of which ``on_gradient`` is told at once, always.
        """
        params = [param for param in params if param.is_floating_point() or param.is_complex()]
        ids = {id(param) for param in params}
        for param in [param for param in self._handles if id(param) not in ids]:
            self._handles.pop(param)[1].remove()  # type: ignore[no-untyped-call]
        for param in params:
            is_chosen = id(param) in chosen
            known = self._handles.get(param)  # type: ignore[no-untyped-call]
            if known is not None:
                if known[0] == is_chosen:
                    continue
                known[1].remove()
            is_frozen = not param.requires_grad
            if is_frozen:
                param.requires_grad_(True)  # torch refuses to hook a frozen tensor
            hook = self._on_gradient if is_chosen else self._gate
            self._handles[param] = is_chosen, param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            if is_frozen:
                param.requires_grad_(False)


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A bound method that does not keep its owner alive, and does nothing once that is gone."""
    return functools.partial(_call_if_alive, weakref.WeakMethod(method))


def _call_if_alive(reference: "weakref.WeakMethod[Callable[..., None]]", *args: Any) -> None:
    method = reference()
    if method is not None:
        method(*args)


def _remove_all(handles: WeakIdKeyDictionary) -> None:
    removable: list[tuple[bool, RemovableHandle]] = list(handles.values())  # type: ignore[no-untyped-call]
    for _, handle in removable:
        handle.remove()
