"""One process that ``spawn`` has started: how it comes to its function, says why it failed, and ends with its parent.

[Note: lifeline] Each of these processes holds the reading end of a pipe whose only writing end is the parent's. The
kernel kills the process when that closes, however the parent ends, and whether or not a fork server stands between
them. (PR_SET_PDEATHSIG would fire when the *thread* that called ``spawn`` ends, and watch the fork server instead.)
Parent and child both ask for that: the parent at once, so that it holds while the child still imports the script; the
child for the case that the parent was killed in the very moment between the start and its asking.

The invariant: neither the function nor an argument is unpickled before the lifeline holds and the environment is a
rank's. (The script is imported before, by multiprocessing.)
"""

import contextlib
import fcntl
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from paceline.environment import read_placement
from paceline.errors import EnvironmentVariableError, LaunchError
from paceline.launch.counts import usable_cores
from paceline.launch.layout import Layout, rank_environment, shared_environment
from paceline.launch.ranks.report import Reporter
from paceline.launch.spec.launch import LaunchSpec

# What `spawn` has set in this process's environment, which is not for the processes that this one spawns.
_given: dict[str, str] = {}
_THREADS = "OMP_NUM_THREADS"
# What is held for as long as the process lives, its last threads included.
_held: list[object] = []


@dataclass(frozen=True)
class Birth:
    """What a process is told besides its function.

    Attributes:
        variables: what a launcher would have set for this rank.
        environment: the parent's, where a fork server has an older one; else empty.
        report: where it says why it failed, read once it has ended: a file without a name, which takes any length.
        port: MASTER_PORT, bound but not listened on, so that the kernel gives it to nobody else; rank 0 may bind it.
    """

    index: int
    method: str
    variables: dict[str, str]
    environment: dict[str, str]
    lifeline: Connection
    report: Connection
    port: socket.socket


class Call:
    """A function and its arguments. The child unpickles them where it can report what goes wrong."""

    def __init__(self, fn: Callable[..., Any], args: Iterable[Any]) -> None:
        self._fn = fn
        self._args = tuple(args)

    def unpack(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._fn, self._args

    def __reduce__(self) -> tuple[type["_PickledCall"], tuple[bytes]]:
        try:
            return _PickledCall, (_pickle((self._fn, self._args)),)
        except Exception as error:
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> LaunchError:
        reason = f"cannot be sent to another process ({error})"
        if not _is_picklable(self._fn):
            return LaunchError(
                f"the function {_name(self._fn)} {reason}. Define it at the top level of a module; a lambda, or a "
                "function within a function, is not found by a fresh process."
            )
        at_fault = (f"args[{i}], a {type(arg).__name__}," for i, arg in enumerate(self._args) if not _is_picklable(arg))
        return LaunchError(
            f"{next(at_fault, 'args')} {reason}. Pass what it is made from, and make it within {_name(self._fn)}."
        )


class _PickledCall:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def unpack(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        fn, args = ForkingPickler.loads(self._data)
        return fn, args


def variables_of(nprocs: int, port: socket.socket) -> list[dict[str, str]]:
    """A launcher's variables for each rank, in the parent, as far as this environment does not speak of a job already.

    Those that mark torch's elastic agent are left out: it would host the store, even where a script names its own port.
    """
    told = {name: value for name, value in os.environ.items() if _given.get(name) != value}
    shared = shared_environment(os.environ, num_ranks=nprocs, num_cores=usable_cores(), is_alone=True)
    LaunchSpec("spawn", is_module=True, num_ranks=nprocs)  # raises where this host cannot hold as many
    layout = Layout.of_one_host("", 0, nprocs, port.getsockname()[1])
    ranks = [
        {
            name: value
            for name, value in rank_environment(layout, index, role="default", max_restarts=0).items()
            if not name.startswith("TORCHELASTIC")
        }
        for index in range(nprocs)
    ]
    is_taken = any(told.get(name, value) != value for rank in ranks for name, value in rank.items() if _is_place(name))
    with contextlib.suppress(EnvironmentVariableError):  # half of one, such as the number of processes alone
        is_taken = is_taken or read_placement(told).world_size > 1
    threads = {name: value for name, value in shared.items() if name == _THREADS}
    return [
        {name: value for name, value in rank.items() if name not in told and not (is_taken and _is_place(name))}
        | threads
        for rank in ranks
    ]


def _is_place(name: str) -> bool:
    return not name.startswith("MASTER")


def run(birth: Birth, call: Call | _PickledCall) -> None:
    """The process's whole life, as multiprocessing's target."""
    _become(birth)
    reporter = Reporter(birth.report.fileno(), birth.index)
    try:
        fn, args = call.unpack()
        fn(birth.index, *args)
        _leave_world(None)
    except KeyboardInterrupt as error:  # Ctrl-C went to all of the terminal's processes: the parent speaks for them
        reporter.raised(error, error.__traceback__)
        _leave_world(error)
        sys.exit(128 + signal.SIGINT)
    except SystemExit as error:
        reporter.exited(error)
        _leave_world(error)
        raise
    except BaseException as error:
        frames = error.__traceback__ and error.__traceback__.tb_next  # from the function on
        was_told = reporter.raised(error, frames)
        _leave_world(error)
        if not was_told:
            raise
        sys.exit(1)


def kill_at_hangup(lifeline: Connection, pid: int) -> None:
    """Have the kernel kill ``pid`` when the other end of ``lifeline`` has closed. [Note: lifeline]

    It counts from now on. Whoever else holds this end may ask for it.
    """
    fd = lifeline.fileno()
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        fcntl.fcntl(fd, fcntl.F_SETOWN, pid)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | fcntl.FASYNC)


def _become(birth: Birth) -> None:
    kill_at_hangup(birth.lifeline, os.getpid())
    if birth.lifeline.poll(0):  # it had closed before
        os.kill(os.getpid(), signal.SIGKILL)
    _held.extend((birth.lifeline, birth.port))
    for end in (birth.lifeline, birth.report, birth.port):
        os.set_inheritable(end.fileno(), False)
    if birth.environment:
        os.environ.clear()
    os.environ.update(birth.environment | birth.variables)
    _given.clear()
    _given.update(birth.variables)
    if birth.method == "fork":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        torch.set_num_threads(1)  # as in a loader's worker: the parent's pool of threads has not come along
    elif _THREADS in birth.variables:  # for what is started from here; torch, which reads it, is there already
        torch.set_num_threads(int(birth.variables[_THREADS]))
    if birth.method != "spawn" and "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # or all ranks would draw the same; python's generator sees to itself


def _leave_world(error: BaseException | None) -> None:
    """Leave a job that the function has joined: multiprocessing's forks end without python's exit functions."""
    leaving = sys.modules.get("paceline.world.leaving")
    world = leaving and leaving.current()
    if leaving and world:
        leaving.leave(world, error)


def _pickle(value: object) -> bytes:
    return bytes(ForkingPickler.dumps(value))


def _is_picklable(value: object) -> bool:
    try:
        _pickle(value)
    except Exception:
        return False
    return True


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))
