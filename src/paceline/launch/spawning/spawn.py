"""``spawn``: torch.multiprocessing.spawn's call, with ranks that find each other, and that end with their parent.

The processes are multiprocessing's, the exceptions torch's. What happens in such a process stands in ``spawned``, what
becomes of them in ``spawn_context``.

The invariant: when ``spawn`` or ``join`` has raised, no process that it started is left.
"""

import contextlib
import functools
import inspect
import multiprocessing
import multiprocessing.forkserver
import operator
import os
import socket
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from paceline.errors import LaunchError
from paceline.launch.spawning import spawned
from paceline.launch.spawning.context import INTERRUPTED_S, Ranks

_METHODS = ("spawn", "forkserver", "fork")


def spawn(
    fn: Callable[..., Any],
    args: Iterable[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> Ranks | None:
    """Start ``nprocs`` processes on this host, each of which runs ``fn(i, *args)``, and end all when one fails.

    Each finds torchrun's variables in its environment, so that ``paceline.init()``, or torch's with ``env://``, joins a
    world of the ``nprocs``. What the parent's environment says already stays.

    Args:
        fn: importable from its module. Where it was typed into an interactive session the processes are forked.
        args: picklable; tensors are shared as torch.multiprocessing shares them.
        nprocs: how many.
        join: wait for the processes.
        daemon: as in ``multiprocessing``: they end when the parent exits, and cannot start such processes themselves.
        start_method: ``spawn``; ``fork``; or ``forkserver``, where torch is imported once for all and stays so for
            later calls. That server must not touch CUDA: what ``fn``'s module does at its top level is run there in
            later versions of Python.
    Returns:
        None, or with ``join=False`` torch's ``ProcessContext``: ``join(timeout, grace_period)``, ``pids()``,
        ``processes``.
    Raises:
        ProcessRaisedException: torch's. The first failure was an exception, whose traceback is in the message.
        ProcessExitedException: torch's. The first failure was an exit code or a signal.
        LaunchError: the arguments are of no use, or cannot be sent to another process.
    """
    nprocs, args = _check(fn, args, nprocs, start_method)
    method = _method_for(fn, args, start_method)
    if method == "forkserver":
        _warm_server(fn)
    ranks = Ranks()
    try:
        with _reserve_port() as port:
            for index, variables in enumerate(spawned.variables_of(nprocs, port)):
                ranks.start(method, spawned.Call(fn, args), index, variables, port, daemon=daemon)
        while join and not ranks.join():
            pass
    except BaseException:
        ranks.end(*INTERRUPTED_S)
        raise
    return None if join else ranks


def _check(fn: Callable[..., Any], args: Iterable[Any], nprocs: int, start_method: str) -> tuple[int, tuple[Any, ...]]:
    """What can be wrong with the arguments by themselves."""
    if not callable(fn):
        raise LaunchError(f"expected a function to run, but got {fn!r}; pass the function itself, without calling it")
    if start_method not in _METHODS:
        raise LaunchError(f"start_method={start_method!r}: expected one of {', '.join(_METHODS)}")
    if not isinstance(args, Iterable):
        raise LaunchError(f"args={args!r}: expected a tuple of arguments; for a single one write args=({args!r},)")
    try:
        number = operator.index(nprocs)
    except TypeError:
        number = 0
    if number < 1:
        raise LaunchError(
            f"nprocs={nprocs!r}: expected a number of at least 1; where it is torch.cuda.device_count(), there is no "
            "GPU here"
        )
    return number, tuple(args)


def _method_for(fn: Callable[..., Any], args: tuple[Any, ...], start_method: str) -> str:
    """``start_method``, or ``fork`` where a fresh process could not find what was typed into this session."""
    typed = [owner.__qualname__ for owner in map(_in_module, (fn, *args)) if _is_of_session(owner)]
    if _is_main_lost():
        typed.append("__main__")
    if start_method == "fork" or not typed:
        return start_method
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise LaunchError(
            f"{typed[0]} exists in this session only, where a fresh process cannot find it, and this process cannot be "
            "forked any more since it has used CUDA. Put it into a .py file and import it from there, or restart the "
            "session and call spawn before anything touches CUDA."
        )
    return "fork"


def _in_module(value: Any) -> Any:
    """What a fresh process looks for in a module: ``value`` itself if it is a function or a class, else its class."""
    while isinstance(value, functools.partial):
        value = value.func
    return value if hasattr(value, "__qualname__") else type(value)


def _is_of_session(owner: Any) -> bool:
    """Whether this function or class was typed into this session and is in no file."""
    if getattr(owner, "__module__", None) != "__main__":
        return False
    main = sys.modules["__main__"]
    if main.__spec__ is None and not os.path.exists(getattr(main, "__file__", None) or ""):
        return True
    code = getattr(inspect.unwrap(owner), "__code__", None)  # python -i script.py
    return hasattr(sys, "ps1") and code is not None and not os.path.exists(code.co_filename)


def _is_main_lost() -> bool:
    """Whether a fresh process would look for ``__main__`` in a file that is none, such as ``<stdin>``."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    return main.__spec__ is None and file is not None and not os.path.exists(file)


def _warm_server(fn: Callable[..., Any]) -> None:
    """Tell the standard library's fork server what to import, unless it runs already."""
    server: Any = multiprocessing.forkserver._forkserver
    names = ["paceline.launch.spawning.warm"]
    with contextlib.suppress(OSError, TypeError):  # it has no source
        if "optim" in inspect.getsource(inspect.getmodule(fn)):  # type: ignore[arg-type]
            names.append("torch._dynamo")  # which torch imports when the first optimizer is made: a second in each rank
    multiprocessing.set_forkserver_preload(list(dict.fromkeys([*server._preload_modules, *names])))


def _reserve_port() -> socket.socket:
    """A port that the kernel gives to nobody while this socket, or a child's copy of it, is open.

    Whoever names it may still listen on it, since nobody does yet and all ask for SO_REUSEADDR: rank 0's store, with
    the address that the script chooses.
    """
    port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.bind(("", 0))
    return port
