"""What each way of training is called in a report, and how it is drawn."""

from dataclasses import dataclass

from paceline.bench.results import DATA_PARALLEL, MORE_THREADS, ONE_PROCESS, OURS, TORCHS, Bench, Run


@dataclass(frozen=True)
class Look:
    """Its name, in full and beside a line, a colour of the palette, and a mark that tells it without colours too."""

    name: str
    short: str
    colour: str
    shape: str
    devices: str  # what it trains on


LOOKS = {
    ONE_PROCESS: Look("one process", "one process", "alone", "circle", "process"),
    MORE_THREADS: Look("one process, more threads", "more threads", "alone", "square", "times the threads"),
    DATA_PARALLEL: Look("paceline DataParallel", "DataParallel", "parallel", "triangle", "replica"),
    TORCHS: Look("torch DDP", "torch DDP", "torch", "diamond", "rank"),
    OURS: Look("paceline DDP", "paceline DDP", "ours", "circle", "rank"),
}

_BACKENDS = {"shm": "ours", "nccl": "ours", "gloo": "torch", "hier": "parallel"}


def look_of(way: str) -> Look:
    return LOOKS.get(way, Look(way, way, "alone", "diamond", "device"))


def name_of(bench: Bench, run: Run) -> str:
    """The way's name, and the backend's where the same way was measured over several."""
    return look_of(run.way).name + (f" over {run.backend}" if _has_several(bench, run.way) else "")


def named(bench: Bench, run: Run) -> str:
    """The way, and on how many of what it trains."""
    return look_of(run.way).name if run.way == ONE_PROCESS else f"{name_of(bench, run)}, {on(run)}"


def short_name_of(bench: Bench, run: Run) -> str:
    """The same in few letters."""
    return look_of(run.way).short + (f", {run.backend}" if _has_several(bench, run.way) else "")


def _has_several(bench: Bench, way: str) -> bool:
    return len({run.backend for run in bench.runs if run.way == way}) > 1


def on(run: Run) -> str:
    """On how many of what it trains: 2 ranks, 1 process, 2 times the threads."""
    noun = look_of(run.way).devices
    return f"{run.num_devices} {noun}" + ("s" if run.num_devices != 1 and run.way != MORE_THREADS else "")


def backend_colour(backend: str) -> str:
    return _BACKENDS.get(backend, "alone")
