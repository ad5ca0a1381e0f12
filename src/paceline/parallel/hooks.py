"""Hooks on parameters: told of each gradient, whether or not anybody's forward was called.

The invariant: hooks keep neither their owner nor a parameter alive, and go with their owner.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary


class GradientHooks:
    """Calls ``on_gradient(param)`` whenever autograd has accumulated into ``param.grad``.

    Args:
        on_gradient: a method of the owner, which is not kept alive.
    """

    def __init__(self, on_gradient: Callable[[Parameter], None]) -> None:
        self._on_gradient = weakly(on_gradient)
        self._handles: WeakIdKeyDictionary = WeakIdKeyDictionary()
        weakref.finalize(self, _remove_all, self._handles)

    def follow(self, params: Iterable[Parameter]) -> None:
        """Hook each of ``params`` once, and no others any more.

        Frozen ones too: a hook outlives freezing, so nobody need tell when a parameter is unfrozen.
        """
        params = [param for param in params if param.is_floating_point() or param.is_complex()]
        ids = {id(param) for param in params}
        for param in [param for param in self._handles if id(param) not in ids]:
            self._handles.pop(param).remove()  # type: ignore[no-untyped-call]
        for param in params:
            if param in self._handles:
                continue
            is_frozen = not param.requires_grad
            if is_frozen:
                param.requires_grad_(True)  # torch refuses to hook a frozen tensor
            handle = param.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            self._handles[param] = handle
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
    removable: list[RemovableHandle] = list(handles.values())  # type: ignore[no-untyped-call]
    for handle in removable:
        handle.remove()
