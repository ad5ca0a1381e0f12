"""The supervisor's side of the fork server: how it is started, spoken to and ended."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from paceline.launch.counts import usable_cores
from paceline.launch.dispositions import OF_SUPERVISOR
from paceline.launch.layout import shared_environment
from paceline.launch.spec.launch import LaunchSpec
from paceline.launch.wire import Message, Receiver, send
from paceline.processes import own_mark

# Runs in the server and, with all of what is below it gone, in each rank. The current folder must not shadow modules
# that the server imports, so it leaves the path first; the package is found wherever this launcher was found.
_BOOT = (
    "import sys; sys.path[:1] = [p for p in sys.path[:1] if p]; sys.path.append({home!r}); "
    "from paceline.launch.server.forkserver import main; sys.path.pop(); main()()"
)
# It sweeps for at most 1.5 s once the supervisor has hung up.
_END_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Birth:
    """What a rank is born with: its arguments, the variables that are its own, and its ends of what leads out of it.

    ``page`` is where it tells what it waits for: see ``paceline.waits``.

    ``rank`` is its number on this host.
    """

    rank: int
    args: Sequence[str]
    environment: dict[str, str]
    numa_binding: str
    stdout: int
    stderr: int
    report: int
    page: int


class ForkServer:
    """The running server. What is asked of it before it is ready waits."""

    def __init__(self, spec: LaunchSpec) -> None:
        self.control, theirs = socket.socketpair()
        self._receiver = Receiver(self.control)
        # Until it has a say in it no signal is to end it, and no key: python's own start takes a while.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, OF_SUPERVISOR)
        try:
            self._process = _start(spec, theirs.fileno())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        self._order(
            {
                "do": "prepare",
                "mask": [int(signum) for signum in mask],
                "target": spec.target,
                "is_module": spec.is_module,
                "is_command": spec.is_command,
            }
        )

    def host_store(self, listener: socket.socket, address: str, port: int) -> None:
        """Have the store where the ranks meet hosted on ``listener``, which the caller may close."""
        self._order({"do": "host", "address": address, "port": port}, [listener.fileno()])

    def open_meeting(self, spec: LaunchSpec, run_id: str) -> socket.socket:
        """Have the process forked in which this host meets the others; what leads to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            nodes = asdict(spec.nodes) | {"endpoint": spec.meeting_point, "run_id": run_id}
            self._order({"do": "meet", "nodes": nodes, "num_ranks": spec.num_ranks}, [theirs.fileno()])
        return ours

    def bear(self, birth: Birth) -> None:
        """Fork a rank. The caller may close its ends."""
        order = {
            "do": "bear",
            "rank": birth.rank,
            "args": list(birth.args),
            "environment": birth.environment,
            "numa_binding": birth.numa_binding,
        }
        self._order(order, [birth.stdout, birth.stderr, birth.report, birth.page])

    def sweep(self) -> None:
        """Leave nothing of this life; a "swept" event tells when that is done."""
        self._order({"do": "sweep"})

    def _order(self, order: Message, fds: Sequence[int] = ()) -> None:
        with contextlib.suppress(OSError):  # it died: seen when it is next listened to
            send(self.control, order, fds)

    def receive(self) -> list[Message] | None:
        """Messages that have come; None once the server is gone."""
        received = self._receiver.receive()
        return None if received is None else [message for message, _ in received]

    def end(self) -> None:
        """Hang up, and wait until the server has swept what the ranks left behind."""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_WR)
        self.wait()
        self.control.close()

    def wait(self) -> int:
        """The exit code, or minus the signal, of a server that is about to end."""
        try:
            return self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()

    def kill(self) -> None:
        """End it at once, and with it, by the kernel, its ranks."""
        self._process.send_signal(signal.SIGKILL)


def _start(spec: LaunchSpec, control: int) -> "subprocess.Popen[bytes]":
    home = str(pathlib.Path(__file__).resolve().parents[3])
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if getattr(sys.stdout, "write_through", False):
        flags = [*flags, "-u"]
    # The script is on its command line too, so that who looks for the script's processes finds all of them.
    command = [sys.executable, *flags, "-c", _BOOT.format(home=home), str(control), spec.target, *spec.args]
    shared = shared_environment(
        os.environ, num_ranks=spec.num_ranks, num_cores=usable_cores(), is_alone=spec.nodes.is_alone
    )
    return subprocess.Popen(
        command,
        env={**os.environ, **shared, **own_mark()},
        pass_fds=[control],
        preexec_fn=os.setpgrp,
        # A rank is in the background of the terminal, where a read would stop it.
        stdin=subprocess.DEVNULL if os.isatty(0) else None,
    )
