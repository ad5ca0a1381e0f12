"""What has been found so far, turn by turn, until it is a Bench.

The invariant: at any moment ``bench`` gives all that is finished, and nothing half done.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.bench.results import ONE_PROCESS, OURS, Bench, Collective, Machine, Phases, Run, Span, Subject
from paceline.bench.times import Took


@dataclass
class _Way:
    """One way on so many devices."""

    backend: str | None
    turns: list[Took] = field(default_factory=list)
    peak_bytes: tuple[int, ...] = ()
    error: str | None = None


class Findings:
    """Filled by whoever measures."""

    def __init__(self, machine: Machine, subject: Subject) -> None:
        self.collectives: list[Collective] = []
        self._machine, self._subject = machine, subject
        self._ways: dict[tuple[int, str], _Way] = {}  # by the number of devices; one process has turns with each

    def expect(self, num_devices: int, way: str, backend: str | None) -> None:
        """This way will be measured."""
        self._ways[num_devices, way] = _Way(backend)

    def add(self, num_devices: int, took: Took) -> None:
        self._ways[num_devices, took.way].turns.append(took)

    def fail(self, num_devices: int, way: str, error: str) -> None:
        """This way cannot be measured, so what it had is dropped; of the others all rounds are kept that are whole."""
        failed = self._ways[num_devices, way]
        failed.error, failed.turns = error, []
        whole = self.rounds_of(num_devices)
        for (number, _), found in self._ways.items():
            if number == num_devices:
                del found.turns[whole:]

    def rounds_of(self, num_devices: int) -> int:
        """In how many rounds all ways had their turn that have not failed."""
        return min((len(found.turns) for found in self._of(num_devices).values() if found.error is None), default=0)

    def left(self, num_devices: int) -> tuple[str, ...]:
        """The ways that have not failed."""
        return tuple(way for way, found in self._of(num_devices).items() if found.error is None)

    def keep_peak(self, num_devices: int, way: str, peak_bytes: tuple[int, ...]) -> None:
        self._ways[num_devices, way].peak_bytes = peak_bytes

    def bench(self, *, interrupted: bool) -> Bench:
        """All that there is. Ways that have not had a turn yet, and have not failed, are left out."""
        numbers = sorted({number for number, _ in self._ways})
        runs = [self._run(number, way) for number in numbers for way in self._of(number) if way != ONE_PROCESS]
        runs = [*self._one_process(numbers), *runs]
        steps = {number: found.turns for (number, way), found in self._ways.items() if way == OURS and found.turns}
        return Bench(
            self._machine,
            self._subject,
            tuple(run for run in runs if run.step_s or run.error),
            _median_step(steps[max(steps)]) if steps else (),
            tuple(self.collectives),
            interrupted,
        )

    def _of(self, num_devices: int) -> dict[str, _Way]:
        return {way: found for (number, way), found in self._ways.items() if number == num_devices}

    def _run(self, num_devices: int, way: str) -> Run:
        found, alone = self._ways[num_devices, way], self._ways[num_devices, ONE_PROCESS]
        return Run(
            way,
            found.backend,
            num_devices,
            _steps_of(found.turns),
            _phases_of(found.turns),
            _bytes_of(found.turns),
            found.peak_bytes,
            found.error,
            _steps_of(alone.turns[: len(found.turns)]),
        )

    def _one_process(self, numbers: Sequence[int]) -> list[Run]:
        """Once, with the turns that it had beside each number of ranks."""
        founds = [self._ways[number, ONE_PROCESS] for number in numbers if (number, ONE_PROCESS) in self._ways]
        turns = [turn for found in founds for turn in found.turns]
        peaks = next((found.peak_bytes for found in founds if found.peak_bytes), ())
        error = None if turns else next((found.error for found in founds if found.error), None)
        return [Run(ONE_PROCESS, None, 1, _steps_of(turns), _phases_of(turns), None, peaks, error)]


def _steps_of(turns: Sequence[Took]) -> tuple[float, ...]:
    return tuple(seconds for turn in turns for seconds in turn.step_s)


def _phases_of(turns: Sequence[Took]) -> Phases | None:
    """Of each step's rank that computed longest: the others have also waited for that one."""
    if not turns or not all(turn.phases for turn in turns):
        return None
    slowest = [max(turn.phases, key=lambda of: of.forward_s + of.backward_s + of.optimizer_s) for turn in turns]
    return Phases(
        statistics.median(phases.forward_s for phases in slowest),
        statistics.median(phases.backward_s for phases in slowest),
        statistics.median(phases.exposed_s for phases in slowest),
        statistics.median(phases.optimizer_s for phases in slowest),
    )


def _bytes_of(turns: Sequence[Took]) -> int | None:
    sent = [turn.bytes_sent for turn in turns if turn.bytes_sent is not None]
    return round(statistics.median(sent)) if sent else None


def _median_step(turns: Sequence[Took]) -> tuple[Span, ...]:
    """The watched step of median length."""
    watched = sorted((turn.spans for turn in turns if turn.spans), key=lambda spans: max(span.end_s for span in spans))
    return watched[len(watched) // 2] if watched else ()
