"""Running one job for each replica, in threads.

A thread begins with torch's defaults, so each is given what the caller had switched: gradients, inference mode,
autocast, the default device, and on accelerators the device and its stream. Replicas on the CPU share its cores.

The invariant: when ``run`` returns or raises, all its threads have ended.
"""

import contextlib
import contextvars
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from paceline.errors import ReplicaError
from paceline.parallel.data_parallel.containers import parts_of
from paceline.parallel.data_parallel.devices import CPU, DeviceLike, as_device
from paceline.parallel.data_parallel.meter import metered
from paceline.parallel.data_parallel.place import working_for

_T = TypeVar("_T")
_has_pool = os.getpid()  # the process in which torch's pool of threads may be used from several threads
_BIRTH_S = 1.0  # at most, until a thread that has been started is seen to run


def parallel_apply(
    modules: Sequence[Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[DeviceLike | None] | None = None,
) -> list[Any]:
    """Call each module with its inputs, all at the same time; torch's function of that name.

    Args:
        modules: R of them.
        inputs: for each, its positional arguments, or a single one.
        kwargs_tup: for each, its keyword arguments.
        devices: for each, where it runs; None is where its first tensor lies.
    Returns:
        What each returned.
    Raises:
        ReplicaError: a replica raised what cannot be raised anew. All other exceptions keep their type, and their
            message says which replica, on which device; the original is their cause.
    """
    count = len(modules)
    kwargs = [{}] * count if kwargs_tup is None else kwargs_tup
    places = [None] * count if devices is None else devices
    for name, given in (("inputs", inputs), ("kwargs_tup", kwargs), ("devices", places)):
        if len(given) != count:
            raise AssertionError(f"The number of modules {count} is not equal to the number of {name} {len(given)}")

    def job(index: int) -> Callable[[], Any]:
        given = inputs[index]
        arguments = given if isinstance(given, (list, tuple)) else (given,)
        return lambda: modules[index](*arguments, **kwargs[index])

    where = [_find_device(inputs[n]) if place is None else as_device(place) for n, place in enumerate(places)]
    return run([job(index) for index in range(count)], where)


def run(
    jobs: Sequence[Callable[[], _T]],
    devices: Sequence[torch.device],
    stop: Callable[[BaseException], None] = lambda _interruption: None,
) -> list[_T]:
    """Run all jobs at once, each in a thread of its own; a single one in the caller's.

    Args:
        stop: has jobs that wait for one another end soon, when the caller is interrupted, or not all could be started.
    Raises:
        Exception: of the first replica that failed, once all have ended. The message tells of the others.
    """
    state = _CallersState.now(devices)
    results: dict[int, _T] = {}
    failures: dict[int, BaseException] = {}

    def work(index: int) -> None:
        try:
            with working_for(index), state.entered(index):
                results[index] = jobs[index]()
        except BaseException as failure:  # raised anew when all have ended
            failures[index] = failure

    def work_in_thread(index: int) -> None:
        with metered():
            work(index)

    if len(jobs) == 1:
        work(0)
    else:
        _renew_pool_after_fork()
        _join_all(_start(work_in_thread, devices, stop), stop)
    if failures:
        try:
            raise _first_of(failures, devices)
        finally:
            failures.clear()  # which their tracebacks hold, and with it all that the replicas held
    return [results[index] for index in range(len(jobs))]


def _renew_pool_after_fork() -> None:
    """Have a forked process make torch's pool of threads anew, which has not come along.

    torch would do so where it first asks for the pool, and not safely so from several threads at once: "Invalid thread
    pool!", or a segmentation fault.
    """
    global _has_pool
    if _has_pool != os.getpid():
        torch.set_num_threads(torch.get_num_threads())
        _has_pool = os.getpid()


def _start(
    work: Callable[[int], None], devices: Sequence[torch.device], stop: Callable[[BaseException], None]
) -> list[threading.Thread]:
    started: list[threading.Thread] = []
    try:
        for index, device in enumerate(devices):
            context = contextvars.copy_context()
            thread = threading.Thread(target=context.run, args=(work, index), name=f"replica {index} on {device}")
            started.append(thread)  # before: its start may be interrupted when it runs already
            thread.start()
    except BaseException as error:  # no thread can be started, or Ctrl-C
        stop(error)
        _join_all(started, stop)
        raise
    return started


def _join_all(threads: Sequence[threading.Thread], stop: Callable[[BaseException], None]) -> None:
    """Wait for all, also if that is interrupted, and for those that are about to run."""
    interruption: BaseException | None = None
    latest = time.monotonic() + _BIRTH_S
    for thread in threads:
        while thread.is_alive() or (thread in threading.enumerate() and time.monotonic() < latest):
            try:
                if thread.is_alive():
                    thread.join()
                else:
                    time.sleep(0.001)
            except BaseException as error:  # Ctrl-C: a thread cannot be ended from outside
                interruption = error
                stop(error)
    if interruption is not None:
        raise interruption


def _first_of(failures: dict[int, BaseException], devices: Sequence[torch.device]) -> BaseException:
    """The first replica's exception, of its own type, with the number of the replica; what ends a process, as it is."""
    first, *others = sorted(failures)
    failure = failures[first]
    if not isinstance(failure, Exception):
        return failure
    message = f"replica {first} on {devices[first]}: {failure}"
    for index in others:
        message += f"\nalso replica {index} on {devices[index]}: {type(failures[index]).__name__}: {failures[index]}"
    try:
        error: Exception = type(failure)(message)
    except Exception:  # it wants other arguments
        error = ReplicaError(f"{message}\n({type(failure).__name__})")
    error.__cause__ = failure
    return error


@dataclass(frozen=True)
class _CallersState:
    """What torch keeps for each thread, as the caller had it."""

    devices: tuple[torch.device, ...]
    streams: tuple[Any, ...]
    has_grad: bool
    is_inference: bool
    autocasts: tuple[tuple[str, torch.dtype], ...]
    caches_casts: bool
    default_device: torch.device
    num_threads: int

    @classmethod
    def now(cls, devices: Sequence[torch.device]) -> "_CallersState":
        kinds = sorted({"cpu", *(device.type for device in devices)})
        return cls(
            devices=tuple(devices),
            streams=tuple(
                None if device.type == "cpu" else torch.get_device_module(device).current_stream(device)
                for device in devices
            ),
            has_grad=torch.is_grad_enabled(),
            is_inference=torch.is_inference_mode_enabled(),
            autocasts=tuple(
                (kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)
            ),
            caches_casts=torch.is_autocast_cache_enabled(),
            default_device=torch.get_default_device(),
            num_threads=torch.get_num_threads(),
        )

    @contextlib.contextmanager
    def entered(self, index: int) -> Iterator[None]:
        device = self.devices[index]
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._a_share_of_the_cores())
            stack.enter_context(torch.inference_mode(self.is_inference))
            stack.enter_context(torch.set_grad_enabled(self.has_grad))
            if self.default_device.type != "cpu":
                follows = self.default_device.type == device.type
                stack.enter_context(device if follows else self.default_device)
            if device.type != "cpu":
                module = torch.get_device_module(device)
                stack.enter_context(module.device(device))
                stack.enter_context(module.stream(self.streams[index]))
            for kind, dtype in self.autocasts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.caches_casts))
            yield

    @contextlib.contextmanager
    def _a_share_of_the_cores(self) -> Iterator[None]:
        """Replicas on the CPU divide the caller's threads among them.

        torch takes this for the default of threads that begin later, which is put back.
        """
        num_sharing = sum(device.type == "cpu" for device in self.devices)
        share = max(1, self.num_threads // max(1, num_sharing))
        if share == self.num_threads:
            yield
            return
        torch.set_num_threads(share)
        try:
            yield
        finally:
            torch.set_num_threads(self.num_threads)


def _find_device(item: object) -> torch.device:
    """Where the first tensor in ``item`` lies; the CPU if there is none."""
    if isinstance(item, Tensor):
        return item.device
    for _, part in parts_of(item) or ():
        if (device := _find_device(part)) != CPU or isinstance(part, Tensor):
            return device
    return CPU
