"""A user's own functions among those that O1 casts: as decorators, and by module and name.

Both cast where autocast is on, and are otherwise the function itself. What is registered by name is in its place from
``initialize`` with O1 until ``deactivate``, or until the next ``initialize``.

The invariant: ``restore`` puts back exactly what ``put_in_place`` found.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from paceline.amp.casts import autocast_dtype_of, to_float, to_half, to_widest
from paceline.errors import AmpError

_F = TypeVar("_F", bound=Callable[..., Any])


def half_function(fn: _F) -> _F:
    """Have ``fn`` called with its tensors in the dtype that autocast is on for; a decorator, as in Apex."""
    return _casting(fn, to_half)


def float_function(fn: _F) -> _F:
    """Have ``fn`` called with half-precision tensors in float32, where autocast is on; a decorator, as in Apex."""
    return _casting(fn, lambda item, _: to_float(item))


def promote_function(fn: _F) -> _F:
    """Have ``fn`` called with all tensors in the widest dtype among them, where autocast is on; as in Apex."""
    return _casting(fn, lambda item, _: to_widest(item))


def register_half_function(module: Any, name: str) -> None:
    """``half_function`` for ``module.name``, from the next ``initialize`` with O1 on.

    Args:
        module: a module or a class.
    Raises:
        AmpError: it has no such function. A ValueError, as in Apex.
    """
    _register(module, name, half_function)


def register_float_function(module: Any, name: str) -> None:
    """``float_function`` for ``module.name``, from the next ``initialize`` with O1 on.

    Raises:
        AmpError: it has no such function. A ValueError, as in Apex.
    """
    _register(module, name, float_function)


def register_promote_function(module: Any, name: str) -> None:
    """``promote_function`` for ``module.name``, from the next ``initialize`` with O1 on.

    Raises:
        AmpError: it has no such function. A ValueError, as in Apex.
    """
    _register(module, name, promote_function)


_NOTHING = object()
_registered: list[tuple[Any, str, Callable[[Any], Any]]] = []
_found: list[tuple[Any, str, object]] = []  # what stood in the place itself, if anything did


def put_in_place() -> None:
    """Let registered names be casting functions."""
    restore()
    for module, name, decorate in _registered:
        found = vars(module).get(name, _NOTHING)
        casting = decorate(getattr(module, name))
        _found.append((module, name, found))
        setattr(module, name, staticmethod(casting) if isinstance(found, staticmethod) else casting)


def restore() -> None:
    """Let registered names be what they were."""
    while _found:
        module, name, found = _found.pop()
        if found is _NOTHING:
            delattr(module, name)
        else:
            setattr(module, name, found)


def _register(module: Any, name: str, decorate: Callable[[Any], Any]) -> None:
    if not hasattr(module, name):
        raise AmpError(f"{getattr(module, '__name__', module)} has no function {name!r} to register.")
    _registered.append((module, name, decorate))


def _casting(fn: _F, cast_to: Callable[[Any, Any], Any]) -> _F:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        dtype = autocast_dtype_of((args, kwargs))
        if dtype is not None:
            args, kwargs = cast_to((args, kwargs), dtype)
        return fn(*args, **kwargs)

    return cast(_F, wrapper)
