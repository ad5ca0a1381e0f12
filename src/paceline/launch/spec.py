"""What is to be launched, as one frozen value that is known to be good before any process starts."""

import os
import resource
import zipfile
from dataclasses import dataclass

from paceline.errors import LaunchError

# Two output channels and a report pipe a rank, both ends of which one process holds for a moment.
_FDS_PER_RANK = 6
_FDS_BESIDE = 64


@dataclass(frozen=True)
class LaunchSpec:
    """One launch of ``num_ranks`` ranks on this host.

    Args:
        target: the script as the user typed it (a file, or a folder or zip with a ``__main__.py``), or a module's name.
        args: what the script finds in ``sys.argv[1:]``.
        is_module: ``target`` is a module, as in ``python -m``.
        num_ranks: how many ranks; all on this host, so it is WORLD_SIZE and LOCAL_WORLD_SIZE alike.
        master_port: the rendezvous port; 0 takes any free one.
        grace_s: how long ranks that were asked to stop may take before they are killed, in seconds.
    Raises:
        LaunchError: a value is out of range, or there is no such script.
    """

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False
    num_ranks: int = 1
    master_port: int = 0
    grace_s: float = 5.0

    def __post_init__(self) -> None:
        _check_num_ranks(self.num_ranks)
        if not 0 <= self.master_port <= 65535:
            raise LaunchError(
                f"expected a port from 1 to 65535, or 0 for any free one, but got {self.master_port}; "
                "leave --master-port out to take a free one"
            )
        if not self.grace_s >= 0:
            raise LaunchError(f"expected a grace of 0 seconds or more, but got {self.grace_s:g}")
        if not self.is_module:
            _check_script(self.target)


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


def is_container(path: str) -> bool:
    """Whether python would look for a ``__main__`` inside ``path``: a folder or a zip archive."""
    return os.path.isdir(path) or zipfile.is_zipfile(path)
