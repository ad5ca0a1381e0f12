"""The supervisor's side of the fork server: how it is started, spoken to and ended."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass

from paceline.launch.counts import usable_cores
from paceline.launch.environment import MASTER_ADDR, rank_environment, shared_environment
from paceline.launch.local_rank import declared_spelling, local_rank_args
from paceline.launch.plumbing import Outlet, open_channel
from paceline.launch.ports import claim_port
from paceline.launch.spec import LaunchSpec
from paceline.launch.wire import Decoder, Message, encode
from paceline.processes import started_at

# Runs in the server and, with all of what is below it gone, in each rank. The current folder must not shadow modules
# that the server imports, so it leaves the path first; the package is found wherever this launcher was found.
_BOOT = (
    "import sys; sys.path[:1] = [p for p in sys.path[:1] if p]; sys.path.append({home!r}); "
    "from paceline.launch.forkserver import main; sys.path.pop(); main()()"
)
# It sweeps for at most 1.5 s once the supervisor has hung up.
_END_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Ends:
    """The supervisor's ends of what leads to one rank; ``outputs`` maps a reading end to its outlet."""

    rank: int
    outputs: dict[int, Outlet]
    report: int


class ForkServer:
    """The running server and the supervisor's ends of all that leads to it."""

    def __init__(self, spec: LaunchSpec, outlets: list[Outlet]) -> None:
        self.ends: list[Ends] = []
        self._decoder = Decoder()
        self._theirs: set[int] = set()
        listener = claim_port(spec.master_port, backlog=max(128, spec.num_ranks))
        self.control, their_control = socket.socketpair()
        try:
            port, run_id = listener.getsockname()[1], secrets.token_hex(8)
            option = None if spec.is_module else declared_spelling(spec.target)
            job = {
                "listener": listener.fileno(),
                "address": MASTER_ADDR,
                "port": port,
                "target": spec.target,
                "is_module": spec.is_module,
                "ranks": [
                    {
                        "rank": rank,
                        "args": local_rank_args(option, spec.args, rank),
                        "environment": rank_environment(spec, rank, port=port, run_id=run_id),
                        **self._open_ends(rank, outlets),
                    }
                    for rank in range(spec.num_ranks)
                ],
            }
            self._process = _start(spec, their_control.fileno(), {listener.fileno(), *self._theirs})
        finally:
            for fd in self._theirs:
                os.close(fd)
            listener.close()
            their_control.close()
        with contextlib.suppress(OSError):  # it died: seen when it is next listened to
            self.control.sendall(encode(job))

    def _open_ends(self, rank: int, outlets: list[Outlet]) -> dict[str, int]:
        theirs: dict[str, int] = {}
        outputs: dict[int, Outlet] = {}
        for outlet in outlets:
            reader, writer = open_channel(outlet)
            outputs[reader] = outlet
            theirs.update(dict.fromkeys(outlet.streams, writer))
        reader, theirs["report"] = os.pipe()
        os.set_blocking(reader, False)
        self.ends.append(Ends(rank, outputs, reader))
        self._theirs.update(theirs.values())
        return theirs

    def receive(self) -> list[Message] | None:
        """Messages that have come; None once the server is gone."""
        try:
            data = self.control.recv(65536)
        except ConnectionResetError:
            return None
        return self._decoder.feed(data) if data else None

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


def _start(spec: LaunchSpec, control: int, fds: set[int]) -> "subprocess.Popen[bytes]":
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if getattr(sys.stdout, "write_through", False):
        flags = [*flags, "-u"]
    # The script is on its command line too, so that who looks for the script's processes finds all of them.
    command = [sys.executable, *flags, "-c", _BOOT.format(home=home), str(control), spec.target, *spec.args]
    # By this, in /proc/PID/environ, who looks for what a launcher has started finds it when that is gone: see runs.
    mark = {"PACELINE_LAUNCHER": f"{os.getpid()}:{started_at(os.getpid())}"}
    shared = shared_environment(os.environ, num_ranks=spec.num_ranks, num_cores=usable_cores())
    return subprocess.Popen(
        command,
        env={**os.environ, **shared, **mark},
        pass_fds=[control, *fds],
        # A rank is in the background of the terminal, where a read would stop it.
        stdin=subprocess.DEVNULL if os.isatty(0) else None,
    )
