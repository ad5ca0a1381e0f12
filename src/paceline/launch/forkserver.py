"""The fork server: imports torch once, forks the store's host and the ranks, and tells the supervisor how they end.

It starts no thread and touches no device, since a fork would carry neither over. It reaps no rank before the
supervisor hangs up: a dead but unreaped rank keeps its process id, so a signal to its group cannot hit a stranger.
"""

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from typing import NoReturn

from paceline.launch import rank as ranks
from paceline.launch.dispositions import Dispositions, only_wake
from paceline.launch.prctl import die_with_parent, outlive_parent
from paceline.launch.wire import Decoder, Message, encode

# What a training script imports anyway. What is not installed is the script's own affair.
PRELOADED = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.multiprocessing",
    "torch.optim",
    "torch.utils.data",
    "paceline.world",
    "paceline.parallel",
    "paceline.data",
)
# What torch imports when the first optimizer is made: a second in each rank, on a core that all of them want. Only for
# scripts that make one, since the others would wait for it.
_OF_OPTIMIZERS = ("torch._dynamo",)
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# When the supervisor is gone: for ranks to end on SIGTERM, then for what they left behind to end by itself.
_ORPHAN_GRACE_S = 1.0
_LINGER_S = 0.5


def main() -> Callable[[], None]:
    """Serve one launch; returns only in a rank, and returns what runs the script there."""
    os.setpgid(0, 0)
    die_with_parent(os.getppid())
    dispositions = Dispositions.capture([*_IGNORED, signal.SIGCHLD])
    for signum in _IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    job = _receive_job(control)
    preload(job["target"])
    outlive_parent()  # from here on its end is seen on the control socket, and the ranks are ended in order
    return _Server(control, job, dispositions).serve()


def preload(target: str) -> None:
    """Import what scripts will want, and what ``target`` mentions.

    The garbage collector rests meanwhile: it would find nothing to free, in a quarter of the whole time. Afterwards
    what is there is frozen, so that no collection in a rank touches, and thereby copies, the shared pages.
    """
    gc.disable()
    for name in (*PRELOADED, *(_OF_OPTIMIZERS if _mentions(target, b"optim") else ())):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    gc.freeze()
    gc.enable()


def _mentions(script: str, word: bytes) -> bool:
    try:
        with open(script, "rb") as file:
            return word in file.read()
    except OSError:  # a module's name, or a folder
        return False


def _receive_job(control: socket.socket) -> Message:
    decoder = Decoder()
    while data := control.recv(65536):
        for message in decoder.feed(data):
            return message
    os._exit(1)


class _Server:
    def __init__(self, control: socket.socket, job: Message, dispositions: Dispositions) -> None:
        self._control = control
        self._job = job
        self._dispositions = dispositions
        self._rank_of: dict[int, int] = {}  # by pid; those that have not ended
        self._groups: list[int] = []
        self._store_pid = 0
        self._wake_reader, self._wake_writer = socket.socketpair()

    def serve(self) -> Callable[[], None]:
        for end in (self._wake_reader, self._wake_writer):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, only_wake)
        server_pid = os.getpid()
        self._store_pid = self._fork()
        if not self._store_pid:
            self._host_store(server_pid)
        os.close(self._job["listener"])
        for birth in self._job["ranks"]:
            gate = os.pipe()
            pid = self._fork()
            if not pid:
                self._leave_server(birth)
                _pass(gate)
                ranks.become(birth, server_pid=server_pid, dispositions=self._dispositions)
                return ranks.runner(birth, self._job)
            self._register(pid, birth)
            _open(gate)
        self._watch()
        return self._end()

    def _fork(self) -> int:
        """Fork with signals held back, until the child has its own handlers for them; the parent goes on at once."""
        signal.pthread_sigmask(signal.SIG_BLOCK, self._dispositions.handlers)
        with warnings.catch_warnings():
            # The pool of numpy's BLAS stops for a fork and starts again by itself, but python counts its threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                pid = os.fork()
            except OSError as error:
                text = (
                    f"no further process could be started ({error.strerror}); start fewer ranks, or raise `ulimit -u`"
                )
                self._send({"event": "error", "text": text})
                self._end()
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._dispositions.mask)
        return pid

    def _host_store(self, server_pid: int) -> NoReturn:
        """Host the store where the ranks meet, in a process of its own: it needs threads, which a fork would lose."""
        try:
            die_with_parent(server_pid)
            for birth in self._job["ranks"]:
                _close_outputs(birth)
            self._control.close()
            from torch.distributed import TCPStore

            store = TCPStore(
                self._job["address"],
                self._job["port"],
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=self._job["listener"],
                use_libuv=True,
            )
            while store:
                signal.pause()
        finally:
            os._exit(1)

    def _leave_server(self, birth: Message) -> None:
        """Close what a rank must not hold."""
        signal.set_wakeup_fd(-1)
        for end in (self._control, self._wake_reader, self._wake_writer):
            end.close()
        for later in self._job["ranks"][birth["rank"] + 1 :]:
            _close_outputs(later)

    def _register(self, pid: int, birth: Message) -> None:
        with contextlib.suppress(OSError):  # the rank does it too: the group exists, whichever of us comes first
            os.setpgid(pid, pid)
        _close_outputs(birth)
        self._rank_of[pid] = birth["rank"]
        self._groups.append(pid)
        self._send({"event": "born", "rank": birth["rank"], "pid": pid})

    def _watch(self) -> None:
        """Report ends until the supervisor hangs up."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._wake_reader, selectors.EVENT_READ)
            while True:
                self._report_ends()
                for key, _ in selector.select():
                    if key.fileobj is self._control:
                        return
                    self._wake_reader.recv(4096)

    def _report_ends(self) -> None:
        for pid, rank in list(self._rank_of.items()):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended:
                del self._rank_of[pid]
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                self._send({"event": "ended", "rank": rank, "code": code, "at_s": time.monotonic()})
        if self._store_pid and os.waitid(os.P_PID, self._store_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            self._store_pid = 0
            self._send({"event": "error", "text": "the process that hosts the ranks' store died"})

    def _send(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # the supervisor is gone, which is seen and acted upon elsewhere
            self._control.sendall(encode(message))

    def _end(self) -> NoReturn:
        """Leave nothing: ranks that still run, then whatever is left in any rank's group."""
        if self._rank_of:
            self._signal_groups(signal.SIGTERM)
            deadline = time.monotonic() + _ORPHAN_GRACE_S
            while self._rank_of and time.monotonic() < deadline:
                self._report_ends()
                time.sleep(0.01)
            self._signal_groups(signal.SIGKILL)
        if self._store_pid:
            os.kill(self._store_pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        deadline = time.monotonic() + _LINGER_S
        while self._signal_groups(0) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._signal_groups(signal.SIGKILL)
        os._exit(0)

    def _signal_groups(self, signum: int) -> bool:
        """Signal every group that still has a member; whether there was one."""
        self._groups = [group for group in self._groups if _signal_group(group, signum)]
        return bool(self._groups)


def _signal_group(group: int, signum: int) -> bool:
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):  # empty; or it changed its user, and is no longer ours to end
        return False
    return True


def _pass(gate: tuple[int, int]) -> None:
    """Wait until the supervisor has been told of this rank, so that no signal to the launcher misses it any more."""
    os.close(gate[1])
    os.read(gate[0], 1)
    os.close(gate[0])


def _open(gate: tuple[int, int]) -> None:
    for fd in gate:
        os.close(fd)


def _close_outputs(birth: Message) -> None:
    for fd in {birth["stdout"], birth["stderr"], birth["report"]}:
        os.close(fd)
