"""What a bench has found, as values: ranks measure them, a JSON file keeps them, tables and reports show them.

The invariant: a bench that was interrupted is the same value with fewer parts, so whatever shows one shows both; and
what is computed from measurements is computed here, so that all who show it show the same.

Times are seconds, sizes bytes; a figure that could not be had is None, never 0.
"""

import statistics
from dataclasses import dataclass

ONE_PROCESS = "one process"
MORE_THREADS = "one process, more threads"
DATA_PARALLEL = "DataParallel"
OURS = "DistributedDataParallel"
TORCHS = "torch DistributedDataParallel"


@dataclass(frozen=True)
class Machine:
    """Where it was measured: what a reader needs to compare figures with his own."""

    processor: str
    cores: int
    memory_bytes: int
    devices: tuple[str, ...]  # accelerators by name; empty where ranks run on the CPU
    system: str
    python: str
    torch: str
    paceline: str
    began: str  # ISO 8601, with the offset from UTC
    load: float  # runnable processes, mean of the minute before it began


@dataclass(frozen=True)
class Subject:
    """The model that was trained, and on what."""

    name: str
    num_parameters: int
    parameter_bytes: int
    batch_size: int  # samples a rank or replica and step
    threads: int  # of torch's, a rank or replica


@dataclass(frozen=True)
class Phases:
    """Where a step's time goes, on the rank that computed longest in it: medians over the steps."""

    forward_s: float
    backward_s: float  # without what is exposed
    exposed_s: float  # communication that nothing hid
    optimizer_s: float


@dataclass(frozen=True)
class Run:
    """One way of training, on so many devices.

    Attributes:
        way: ``ONE_PROCESS``, ``MORE_THREADS``, ``DATA_PARALLEL``, ``OURS`` or ``TORCHS``.
        backend: what ranks talk over; None in one process.
        num_devices: ranks, or replicas; with more threads, how many times as many threads as one process has.
        step_s: each measured step's time, of its slowest rank.
        alone_s: the times of one process, on a batch for one device, that took turns with these steps.
        phases: None where a way cannot be looked into.
        bytes_sent: by one rank in one step, the mean over the ranks.
        peak_bytes: the most that each device held, in their order.
        error: why there are no figures; None where there are.
    """

    way: str
    backend: str | None
    num_devices: int
    step_s: tuple[float, ...] = ()
    phases: Phases | None = None
    bytes_sent: int | None = None
    peak_bytes: tuple[int, ...] = ()
    error: str | None = None
    alone_s: tuple[float, ...] = ()

    @property
    def median_s(self) -> float | None:
        """Of the steps; None where there are none."""
        return statistics.median(self.step_s) if self.step_s else None

    @property
    def imbalance(self) -> float | None:
        """The largest of the devices' peaks over their mean; None where they are not known, or all zero."""
        return max(self.peak_bytes) * len(self.peak_bytes) / sum(self.peak_bytes) if sum(self.peak_bytes) else None


@dataclass(frozen=True)
class Span:
    """Something in a step that lasted: moments are seconds since the first rank's step began.

    Attributes:
        kind: "forward", "backward", "exposed", "optimizer", or "bucket": a reduction, from its launch to its end.
        bucket: its number in launch order; None for the others.
        size_bytes: of the bucket.
    """

    rank: int
    kind: str
    begin_s: float
    end_s: float
    bucket: int | None = None
    size_bytes: int | None = None


@dataclass(frozen=True)
class Collective:
    """An all_reduce of one size: medians."""

    backend: str
    world_size: int
    size_bytes: int
    seconds: float
    copy_s: float  # of as many bytes copied by every rank at once: what memory allows


@dataclass(frozen=True)
class Bench:
    """All of it.

    Attributes:
        step: the spans of one step of paceline's DistributedDataParallel, the one of median length, on most ranks.
        interrupted: ended by its user before all had been measured.
        command: what was typed to measure it, so that a reader can do so again; empty where it is not known.
    """

    machine: Machine
    subject: Subject
    runs: tuple[Run, ...] = ()
    step: tuple[Span, ...] = ()
    collectives: tuple[Collective, ...] = ()
    interrupted: bool = False
    command: str = ""

    def run(self, way: str, num_devices: int) -> Run | None:
        return next((run for run in self.runs if (run.way, run.num_devices) == (way, num_devices)), None)

    def samples_per_s(self, run: Run) -> float | None:
        """In a step each device gets a batch; None where no step was measured."""
        return run.num_devices * self.subject.batch_size / run.median_s if run.median_s else None

    def gain(self, run: Run) -> float | None:
        """How many times as many samples a second as one process: the median over the rounds.

        None where one of the two is missing.
        """
        if not run.step_s or not run.alone_s:
            return 1.0 if run.step_s and run.way == ONE_PROCESS else None
        return statistics.median(
            run.num_devices * alone_s / step_s for alone_s, step_s in zip(run.alone_s, run.step_s, strict=False)
        )

    def efficiency(self, run: Run) -> float | None:
        """The gain as a share of what so many devices could give at most."""
        gain = self.gain(run)
        return None if gain is None else gain / run.num_devices
