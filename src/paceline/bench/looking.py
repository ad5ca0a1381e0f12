"""What is measured, and on what: found out before anything is timed.

The invariant: the user's function is called, and devices are counted, in a rank alone, so that the command's own
process never touches a device.
"""

import pathlib
import platform
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psutil
import torch

import paceline
from paceline.bench.ranks import RanksFailedError, Tell, messages_of
from paceline.bench.recipe import Recipe
from paceline.bench.results import Machine
from paceline.errors import BenchError
from paceline.launch.counts import usable_cores


@dataclass(frozen=True)
class Found:
    """What a rank has found.

    Attributes:
        gpus: by name.
        batch_size: samples of one device in a step.
    """

    gpus: tuple[str, ...]
    num_parameters: int
    parameter_bytes: int
    batch_size: int


def find_out(recipe: Recipe) -> Found:
    """Make the model once, and look at it.

    Raises:
        BenchError: the recipe is none, or the rank that looked has died.
    """
    try:
        (found,) = [message for message in messages_of(_look, recipe, 1) if isinstance(message, Found)]
    except RanksFailedError as error:
        prefix = "" if error.is_refusal else "the model could not be made: "
        raise BenchError(f"{prefix}{error}") from None
    return found


def _look(_: int, recipe: Recipe, tell: Tell) -> None:
    training = recipe.make(torch.device("cpu"))
    params = list(training.model.parameters())
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    tell(
        Found(
            tuple(torch.cuda.get_device_name(index) for index in range(count)),
            sum(param.numel() for param in params),
            sum(param.numel() * param.element_size() for param in params),
            training.batch_size,
        )
    )


def look_at_machine(gpus: tuple[str, ...]) -> Machine:
    """This one, as it is now."""
    return Machine(
        processor=_processor(),
        cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        devices=gpus,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=torch.__version__,
        paceline=paceline.__version__,
        began=datetime.now().astimezone().isoformat(timespec="seconds"),
        load=psutil.getloadavg()[0],
    )


def _processor() -> str:
    try:
        told: Any = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        told = []
    names = (line.partition(":")[2].strip() for line in told if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
