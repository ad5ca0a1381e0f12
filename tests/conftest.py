"""What holds for every test: one thread per process, and nothing left behind."""

import contextlib
import os
import pathlib
import threading
import time
from collections.abc import Iterator

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the processes that tests start
# For each connection, torch asks a name server for the name of ::ffff:127.0.0.1; a lost answer costs five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # looking for GPUs must not keep forked ranks from using them

import psutil
import pytest
import torch

torch.set_num_threads(1)  # forked ranks could not use a pool of threads that this process had started


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked ``cuda`` where there is no GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail a test that leaves a process, a thread, an environment variable, shared memory or a process group."""
    before = _belongings()
    yield
    deadline = time.monotonic() + 5.0
    while (left := _difference(before, _belongings())) and time.monotonic() < deadline:
        time.sleep(0.02)
    if shared := left.pop("shared memory", set()):
        # Other programs of this user come and go beside the tests: what one of them uses, or has just used, is not
        # left behind by us.
        used = _inodes_of_others()
        orphans = {name for name in shared if (inode := _inode_of(name)) is not None and inode not in used}
        left |= {"shared memory": orphans} if orphans else {}
    assert not left, f"left behind: {left}"


def _belongings() -> dict[str, set[str]]:
    children = [child for child in psutil.Process().children(recursive=True) if child.is_running()]
    theirs = ("PYTEST_", "TORCHINDUCTOR_")  # pytest and torch's compiler write their own
    own = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
    return {
        "processes": {f"{child.pid} {child.name()}" for child in children if "resource_tracker" not in _command(child)},
        "threads": {thread.name for thread in threading.enumerate()},
        "environment": {f"{name}={value}" for name, value in own.items()},
        "shared memory": set(_own_files(pathlib.Path("/dev/shm"))),
        "process groups": {"torch's default one"} if torch.distributed.is_initialized() else set(),
    }


def _difference(before: dict[str, set[str]], after: dict[str, set[str]]) -> dict[str, set[str]]:
    kept = {name: after[name] - before[name] for name in after}
    kept["environment"] |= before["environment"] - after["environment"]
    return {name: items for name, items in kept.items() if items}


def _inodes_of_others() -> set[int]:
    """What lies in /dev/shm and is open or mapped in a live process outside of this one's family.

    By inode: a semaphore is mapped under the name of a draft, and then linked to its own.
    """
    family = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    inodes = set()
    for pid in set(psutil.pids()) - family:
        with contextlib.suppress(OSError):
            lines = pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines()
            inodes |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
            with os.scandir(f"/proc/{pid}/fd") as entries:
                for entry in entries:
                    if os.readlink(entry.path).startswith("/dev/shm/"):
                        inodes.add(os.stat(entry.path).st_ino)
    return inodes


def _inode_of(name: str) -> int | None:
    """None once it is gone."""
    try:
        return os.stat(f"/dev/shm/{name}").st_ino
    except OSError:
        return None


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _own_files(folder: pathlib.Path) -> Iterator[str]:
    if folder.is_dir():
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):  # gone since it was listed
                if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    yield entry.name
