"""What is to be launched, as one frozen value that is known to be good before any process starts."""

import os
import resource
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.errors import LaunchError
from paceline.launch.spec.logs import LogSpec
from paceline.launch.spec.nodes import NodesSpec
from paceline.ports import spell_endpoint

# Two output channels and a report pipe a rank, both ends of which one process holds for a moment, and its page.
_FDS_PER_RANK = 7
_FDS_BESIDE = 64
_USUAL_PORT = 29500  # torchrun's


@dataclass(frozen=True)
class LaunchSpec:
    """One launch of ``num_ranks`` ranks on this host.

    Args:
        target: the script as the user typed it (a file, or a folder or zip with a ``__main__.py``), or a module's name.
        args: what the script finds in ``sys.argv[1:]``.
        is_module: ``target`` is a module, as in ``python -m``.
        is_command: ``target`` is a program of any kind, not Python's.
        num_ranks: how many ranks on this host.
        master_port: the rendezvous port; 0 takes any free one.
        grace_s: how long ranks that were asked to stop may take before they are killed, in seconds.
        max_restarts: how often all ranks are started again after one has failed.
        role: what ROLE_NAME tells the ranks.
        has_virtual_local_rank: each rank sees its own GPU alone, as device 0, and LOCAL_RANK=0.
        numa_binding: how ranks are bound to the cores near their GPU; empty for not at all.
        signals: the names of those that end the launch, or are passed on.
        report_path: where the verdict is written as JSON; empty for nowhere.
        hang_timeout_s: after how long a wait for other ranks it is said where all are, in seconds; 0 for never.
        logs: what becomes of the ranks' output.
        nodes: the hosts of the job.
    Raises:
        LaunchError: a value is out of range, or there is no such script.
    """

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False
    is_command: bool = False
    num_ranks: int = 1
    master_port: int = 0
    grace_s: float = 5.0
    max_restarts: int = 0
    role: str = "default"
    has_virtual_local_rank: bool = False
    numa_binding: str = ""
    signals: tuple[str, ...] = ()
    report_path: str = ""
    hang_timeout_s: float = 0.0
    logs: LogSpec = field(default_factory=LogSpec)
    nodes: NodesSpec = field(default_factory=NodesSpec)

    @property
    def meeting_point(self) -> str:
        """Where the launchers of several hosts meet, as HOST:PORT."""
        return self.nodes.endpoint or spell_endpoint(self.nodes.address.strip("[]"), self.master_port or _USUAL_PORT)

    def __post_init__(self) -> None:
        _check_num_ranks(self.num_ranks)
        if self.max_restarts < 0:
            raise LaunchError(f"expected 0 restarts or more, but got {self.max_restarts}")
        check_signals(self.signals)
        if not 0 <= self.master_port <= 65535:
            raise LaunchError(
                f"expected a port from 1 to 65535, or 0 for any free one, but got {self.master_port}; "
                "leave --master-port out to take a free one"
            )
        if not self.grace_s >= 0:
            raise LaunchError(f"expected a grace of 0 seconds or more, but got {self.grace_s:g}")
        if not (self.hang_timeout_s >= 1 or self.hang_timeout_s == 0):  # a shorter look would cost more than it tells
            raise LaunchError(
                f"expected a hang timeout of at least 1 second, or 0 for none, but got {self.hang_timeout_s:g}"
            )
        if self.hang_timeout_s and self.is_command:
            raise LaunchError(
                "--hang-timeout looks at the stacks of Python, which a program that is started with --no-python need "
                "not have; leave one of the two out"
            )
        if self.is_command:
            _check_program(self.target)
        elif not self.is_module:
            _check_script(self.target)


def check_signals(names: Sequence[str]) -> None:
    """Raises LaunchError: one is no signal, or none that can be handled."""
    for name in names:
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            raise LaunchError(
                f"{name!r} in --signals-to-handle is no signal that can be handled; expected names such as SIGTERM"
            )


def _check_num_ranks(num_ranks: int) -> None:
    if num_ranks < 1:
        raise LaunchError(f"expected at least 1 rank, but got -n {num_ranks}")
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = max(1, (open_files - _FDS_BESIDE) // _FDS_PER_RANK)
    if num_ranks > most:
        raise LaunchError(
            f"-n {num_ranks} is more than this host can hold: {open_files} open files allow {most} ranks; "
            "start fewer, or raise `ulimit -n`"
        )


def _check_program(target: str) -> None:
    if shutil.which(target) is not None:
        return
    if os.path.dirname(target) and os.path.isdir(target):
        raise LaunchError(f"{target!r} is a folder, so --no-python cannot start it")
    if os.path.dirname(target) and os.path.exists(target):
        raise LaunchError(
            f"{target!r} may not be executed by this user; make it executable (chmod +x), or leave --no-python out if "
            "it is a script of Python's"
        )
    raise LaunchError(f"no such program: {target!r} (looked along PATH)")


def _check_script(path: str) -> None:
    if not os.path.exists(path):
        raise LaunchError(f"no such script: {path!r} (looked in {os.getcwd()}); a module wants -m before its name")
    if os.path.isdir(path):
        if not any(os.path.isfile(os.path.join(path, name)) for name in ("__main__.py", "__main__.pyc")):
            raise LaunchError(f"{path!r} is a folder without a __main__.py, so there is nothing to run")
    elif not os.path.isfile(path):
        raise LaunchError(f"{path!r} is neither a script nor a folder, so it cannot run on several ranks")
    elif not os.access(path, os.R_OK):
        raise LaunchError(f"{path!r} may not be read by this user")
