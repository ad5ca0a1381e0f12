"""The fork server: imports torch once, forks stores and ranks for one life after another, and tells how they end.

It starts no thread and touches no device, since a fork would carry neither over. It reaps no rank before its life is
swept: a dead but unreaped rank keeps its process id, so a signal to its group cannot hit a stranger.
"""

import contextlib
import gc
import importlib
import itertools
import os
import selectors
import signal
import socket
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NoReturn

from paceline.launch.dispositions import OF_SUPERVISOR, Dispositions, only_wake
from paceline.launch.prctl import die_with_parent, outlive_parent
from paceline.launch.ranks import rank as ranks
from paceline.launch.wire import Message, Receiver, send

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
# What torch imports when the first optimizer, or wrapper of its own, is made: a second in each rank, on a core that all
# of them want. Only for scripts that make one, since the others would wait for it.
_COMPILER = "torch._dynamo"
_WANT_COMPILER = (b"optim", b"nn.parallel")
# When the supervisor is gone: for ranks to end on SIGTERM, then for what they left behind to end by itself.
_ORPHAN_GRACE_S = 1.0
_LINGER_S = 0.5


def main() -> Callable[[], None]:
    """Serve one launch; returns only in a rank, and returns what runs the script there."""
    os.setpgid(0, 0)
    die_with_parent(os.getppid())
    dispositions = Dispositions.capture([*OF_SUPERVISOR, signal.SIGCHLD])
    for signum in OF_SUPERVISOR:
        signal.signal(signum, signal.SIG_IGN)
    server = _Server(socket.socket(fileno=int(sys.argv[1])), dispositions)
    return server.serve()


def preload(target: str) -> None:
    """Import what scripts will want, and what ``target`` mentions.

    The garbage collector rests meanwhile: it would find nothing to free, in a quarter of the whole time. Afterwards
    what is there is frozen, so that no collection in a rank touches, and thereby copies, the shared pages.
    """
    gc.disable()
    for name in (*PRELOADED, *([_COMPILER] if _mentions_any(target, _WANT_COMPILER) else [])):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    gc.freeze()
    gc.enable()


def _mentions_any(script: str, words: Iterable[bytes]) -> bool:
    try:
        with open(script, "rb") as file:
            source = file.read()
    except OSError:  # a module's name, or a folder
        return False
    return any(word in source for word in words)


class _Server:
    def __init__(self, control: socket.socket, dispositions: Dispositions) -> None:
        self._control = control
        self._receiver = Receiver(control)
        self._orders: deque[tuple[Message, list[int]]] = deque()  # received, and not yet obeyed
        self._dispositions = dispositions
        self._pid = os.getpid()
        self._job: Message = {}
        self._rank_of: dict[int, int] = {}  # by pid; those that have not ended
        self._children: list[int] = []  # of this life, not reaped
        self._groups: list[int] = []
        self._store_pid = 0
        self._meeting_pid = 0
        self._wake_reader, self._wake_writer = socket.socketpair()

    def serve(self) -> Callable[[], None]:
        """Obey until the supervisor hangs up."""
        for end in (self._wake_reader, self._wake_writer):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, only_wake)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._wake_reader, selectors.EVENT_READ)
            while True:
                self._report_ends()
                for key, _ in selector.select():
                    if key.fileobj is not self._control:
                        self._wake_reader.recv(4096)
                        continue
                    received = self._receiver.receive()
                    if received is None:
                        self._end()
                    self._orders.extend(received)
                while self._orders:
                    program = self._obey(*self._orders.popleft())
                    if program is not None:
                        return program

    def _obey(self, order: Message, fds: list[int]) -> Callable[[], None] | None:
        """Do as the supervisor says. Returns something only in a rank: what runs the script there."""
        if order["do"] == "prepare":
            self._job = order
            # They were held back while python started; from now on they are ignored.
            self._dispositions = replace(self._dispositions, mask=frozenset(order["mask"]))
            self._dispositions.restore_mask()
            if not order["is_command"]:
                preload(order["target"])
            outlive_parent()  # from here on its end is seen on the control socket, and the ranks are ended in order
            self._send({"event": "ready"})
        elif order["do"] == "host":
            self._store_pid = self._fork_apart(lambda: _host_store(order, fds[0]), fds[0])
        elif order["do"] == "meet":
            self._meeting_pid = self._fork_apart(lambda: _meet(order, fds[0]), fds[0])
        elif order["do"] == "sweep":
            self._sweep()
            self._send({"event": "swept"})
        else:
            return self._bear(order, fds)
        return None

    def _bear(self, order: Message, fds: list[int]) -> Callable[[], None] | None:
        gate = os.pipe()
        pid = self._fork()
        if not pid:
            self._leave_server()
            _pass(gate)
            birth = order | dict(zip(("stdout", "stderr", "report", "page"), fds, strict=True))
            try:
                ranks.become(birth, server_pid=self._pid, dispositions=self._dispositions)
            except Exception as error:
                ranks.give_up(birth, error)
            return ranks.runner(birth, self._job, self._dispositions)
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(OSError):  # the rank does it too: the group exists, whichever of us comes first
            os.setpgid(pid, pid)
        self._rank_of[pid] = order["rank"]
        self._children.append(pid)
        self._groups.append(pid)
        self._send({"event": "born", "rank": order["rank"], "pid": pid})
        for fd in gate:
            os.close(fd)
        return None

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

    def _fork_apart(self, work: Callable[[], object], fd: int) -> int:
        """Have ``work`` done with ``fd`` in a process of its own, since it needs threads, which a fork would lose."""
        pid = self._fork()
        if pid:
            os.close(fd)
            return pid
        try:
            die_with_parent(self._pid)
            self._leave_server()
            work()
        finally:
            os._exit(1)

    def _leave_server(self) -> None:
        """In a fork: close what is the server's."""
        signal.set_wakeup_fd(-1)
        for end in (self._control, self._wake_reader, self._wake_writer):
            end.close()
        self._receiver.drop()
        for fd in itertools.chain.from_iterable(fds for _, fds in self._orders):
            os.close(fd)

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
            send(self._control, message)

    def _end(self) -> NoReturn:
        self._sweep()
        if self._meeting_pid:
            os.kill(self._meeting_pid, signal.SIGKILL)
        os._exit(0)

    def _sweep(self) -> None:
        """Leave nothing of this life: ranks that still run, then whatever is left in any rank's group."""
        if self._rank_of:
            self._signal_groups(signal.SIGTERM)
            deadline = time.monotonic() + _ORPHAN_GRACE_S
            while self._rank_of and time.monotonic() < deadline:
                self._report_ends()
                time.sleep(0.01)
            self._signal_groups(signal.SIGKILL)
        if self._store_pid:
            os.kill(self._store_pid, signal.SIGKILL)
            os.waitpid(self._store_pid, 0)
            self._store_pid = 0
        for pid in self._children:
            if _may_signal(pid):  # else it is another user's, and ends when they want it to
                os.waitpid(pid, 0)
        deadline = time.monotonic() + _LINGER_S
        while self._signal_groups(0) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._signal_groups(signal.SIGKILL)
        self._rank_of.clear()
        self._children.clear()
        self._groups.clear()

    def _signal_groups(self, signum: int) -> bool:
        """Signal every group that still has a member; whether there was one."""
        self._groups = [group for group in self._groups if _signal_group(group, signum)]
        return bool(self._groups)


def _host_store(order: Message, listener: int) -> None:
    """Host the store where the ranks meet."""
    from torch.distributed import TCPStore

    store = TCPStore(
        order["address"],
        order["port"],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener,
        use_libuv=True,
    )
    while store:
        signal.pause()


def _meet(order: Message, connection: int) -> None:
    """Meet the other hosts, for as long as the supervisor wants."""
    from paceline.launch.hosts.meet import serve

    serve(socket.socket(fileno=connection), order["nodes"], order["num_ranks"])


def _signal_group(group: int, signum: int) -> bool:
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):  # empty; or it changed its user, and is no longer ours to end
        return False
    return True


def _may_signal(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    return True


def _pass(gate: tuple[int, int]) -> None:
    """Wait until the supervisor has been told of this rank, so that no signal to the launcher misses it any more."""
    os.close(gate[1])
    os.read(gate[0], 1)
    os.close(gate[0])
