"""How many ranks ``-n`` asks for: a number, or a word that looks at this host.

Devices are counted in a process of its own, so that neither torch nor CUDA is ever loaded into the launcher.
"""

import os
import subprocess
import sys

from paceline.errors import LaunchError

_COUNT_GPUS = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"


def usable_cores() -> int:
    """Cores that this process may run on, which a container or ``taskset`` makes fewer than the machine has."""
    return len(os.sched_getaffinity(0))


def resolve_num_ranks(asked: str) -> int:
    """A number of ranks from what the user typed.

    Args:
        asked: a number; "gpu", one rank a CUDA device; "cpu", one a usable core; "auto", the first of these that
            this host has.
    Raises:
        LaunchError: it is none of these, or "gpu" on a host without one.
    """
    if asked == "cpu":
        return usable_cores()
    if asked in ("gpu", "auto"):
        num_gpus = _count_gpus()
        if num_gpus == 0 and asked == "gpu":
            raise LaunchError("-n gpu wants a CUDA device, but torch finds none here; use -n cpu, or a number")
        return num_gpus or usable_cores()
    try:
        return int(asked)
    except ValueError:
        raise LaunchError(f"expected a number, auto, cpu or gpu for -n, but got {asked!r}") from None


def _count_gpus() -> int:
    command = [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", _COUNT_GPUS]  # type: ignore[attr-defined]
    counted = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if counted.returncode:
        last_line = (counted.stderr.strip().splitlines() or ["no message"])[-1]
        raise LaunchError(f"torch could not count this host's devices: {last_line}")
    return int(counted.stdout.split()[-1])
