"""From a fork of the server to a process that looks as if python had just started it."""

import ctypes
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

from paceline import waits
from paceline.errors import LaunchError
from paceline.launch.dispositions import Dispositions
from paceline.launch.prctl import die_with_parent
from paceline.launch.ranks.program import Command, Program
from paceline.launch.ranks.report import Reporter
from paceline.launch.wire import Message


def become(birth: Message, *, server_pid: int, dispositions: Dispositions) -> None:
    """Give this fork its own group, output, environment, random state and, last, signals: held back until it runs."""
    os.setpgid(0, 0)
    die_with_parent(server_pid)
    os.dup2(birth["stdout"], 1)
    os.dup2(birth["stderr"], 2)
    for fd in {birth["stdout"], birth["stderr"]}:
        os.close(fd)
    os.set_inheritable(birth["report"], False)
    os.environ.update(birth["environment"])
    if birth["numa_binding"]:
        _bind_to_cores_near_gpu(birth["rank"], birth["numa_binding"])
    for stream in (sys.stdout, sys.stderr):
        _follow_terminal(stream)
    _reseed_numpy()
    _renew_thread_id()
    _skip_shared_destructors()
    _answer_launcher(birth["page"])
    dispositions.restore_handlers()
    _survive_sigusr2()


def give_up(birth: Message, error: Exception) -> NoReturn:
    """End this fork, which could not become a rank; the supervisor tells why."""
    if not Reporter(birth["report"], birth["rank"]).raised(error, None):
        sys.stderr.write(f"paceline: a rank could not be started: {error}\n")
        sys.stderr.flush()
    os._exit(1)


def runner(birth: Message, job: Message, dispositions: Dispositions) -> Callable[[], None]:
    """What runs the script in this rank."""
    if job["is_command"]:
        return Command(job["target"], tuple(birth["args"]), dispositions).run
    reporter = Reporter(birth["report"], birth["rank"])
    program = Program(job["target"], tuple(birth["args"]), job["is_module"], reporter, dispositions)
    return program.run


def _bind_to_cores_near_gpu(gpu: int, mode: str) -> None:
    import torch
    from torch.numa import binding

    if not torch.cuda.is_available():
        raise LaunchError(
            f"--numa-binding {mode} binds each rank to the cores near its GPU, but torch finds no CUDA device here; "
            "leave it out"
        )

    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    binding._maybe_apply_numa_binding_to_current_process(gpu_index=gpu, numa_options=options)


def _follow_terminal(stream: TextIO) -> None:
    """Buffer by line where python would: the server's own streams led elsewhere when they were made."""
    if not stream.write_through:  # type: ignore[attr-defined]
        stream.reconfigure(line_buffering=stream is sys.stderr or stream.isatty())  # type: ignore[attr-defined]


def _reseed_numpy() -> None:
    """numpy's global generator was seeded in the server; python's and torch's take care of themselves."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _renew_thread_id() -> None:
    """``threading`` remembers the kernel's number of the thread that the server ran in."""
    main_thread: Any = threading.main_thread()
    if hasattr(main_thread, "_set_native_id"):
        main_thread._set_native_id()


def _answer_launcher(page: int) -> None:
    """Write the stacks of all threads behind ``page`` when the launcher asks: from C, whatever Python is doing."""
    os.set_inheritable(page, False)
    faulthandler.register(waits.ASKING_SIGNAL, file=page, all_threads=True, chain=False)
    waits.tell(waits.Page(page))


def _survive_sigusr2() -> None:
    """SIGUSR2 asks a launcher for stacks, and ``scancel`` or ``pkill`` send it to ranks and their workers as well.

    Python does not know of this handler: to the script the signal is at its default until it sets one itself. What the
    rank runs by exec does not inherit it.
    """
    if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        libc.signal(signal.SIGUSR2, ctypes.cast(libc.abs, ctypes.c_void_p))  # a function of C's that does nothing


def _skip_shared_destructors() -> None:
    """End the process once python has been finalised and C's streams are flushed.

    What is skipped are the static destructors of the libraries that the server loaded: a tenth of a second and 70 MB of
    copied pages a rank, to tidy memory that the kernel takes back anyway. Libraries that the script loads end as ever,
    since C runs such functions in reverse order of registration.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit") and hasattr(libc, "fcloseall"):  # glibc
        libc.on_exit(libc._exit, None)
        libc.__cxa_atexit(libc.fcloseall, None, None)
