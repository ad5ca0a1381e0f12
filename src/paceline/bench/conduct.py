"""A bench from its beginning to its end: what is measured, in which order, and what becomes of what fails.

Steps come first, for each number of devices; then memory; then all_reduce. A rank that raises, or dies, takes its set
of ranks along: the way whose turn it was has failed, and a fresh set goes on with the others.

The invariant: Ctrl-C, whenever it comes, leaves what is finished, and no process.
"""

import math
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist

from paceline.bench import collectives, memory, times
from paceline.bench.findings import Findings
from paceline.bench.looking import Found, find_out, look_at_machine
from paceline.bench.ranks import RanksFailedError, Task, messages_of
from paceline.bench.recipe import Recipe
from paceline.bench.results import DATA_PARALLEL, MORE_THREADS, ONE_PROCESS, OURS, TORCHS, Bench, Subject
from paceline.bench.ways import KEYS, Setting, is_on_every_rank
from paceline.devices import check_backend
from paceline.environment import read_placement
from paceline.errors import BenchError
from paceline.launch.counts import usable_cores

_STEPS_A_TURN = 4


class Show(Protocol):
    """Who is told how far it is."""

    def begin(self, total: int) -> None:
        """So many parts, of which ``advance`` tells."""

    def at(self, what: str) -> None: ...

    def advance(self) -> None: ...

    def note(self, text: str) -> None:
        """Something that went wrong, and ended nothing."""


@dataclass(frozen=True)
class Wanted:
    """What is to be measured.

    Args:
        recipe: of the model.
        most: of devices; None for as many as there are.
        ways: beside one process.
        steps: that are timed of each way, at least.
        backend: of paceline's DistributedDataParallel, or ``auto``.
        device: ``auto``, ``cpu`` or ``cuda``.
        threads: of torch's, a rank; None to share the cores out.
    Raises:
        BenchError: there is no such way.
        WorldError: there is no such backend here.
    """

    recipe: Recipe
    most: int | None = None
    ways: tuple[str, ...] = (MORE_THREADS, DATA_PARALLEL, OURS, TORCHS)
    steps: int = 40
    backend: str = "auto"
    device: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        if unknown := [way for way in self.ways if way not in KEYS.values()]:
            raise BenchError(f"--ways {','.join(unknown)}: expected some of {', '.join(KEYS)}, with commas between")
        check_backend(self.backend)


def measure(wanted: Wanted, show: Show) -> Bench:
    """Measure all of it, or until Ctrl-C.

    Raises:
        BenchError: the recipe is none, this machine lacks the devices, or this process is a rank itself.
        LaunchError: this host cannot hold so many ranks.
        KeyboardInterrupt: before anything was measured.
    """
    if (told := read_placement(os.environ)).world_size > 1:
        raise BenchError(
            f"this process is rank {told.rank} of {told.world_size}, but a bench starts its own ranks; run it by itself"
        )
    show.at(f"looking at {wanted.recipe.model}")
    plan = _Plan(wanted, find_out(wanted.recipe))
    findings = Findings(look_at_machine(plan.found.gpus if plan.is_on_gpus else ()), plan.subject)
    show.begin(plan.num_parts)
    try:
        for setting in plan.settings:
            _measure_steps(plan, setting, findings, show)
        for setting in plan.settings:
            _measure_memory(plan, setting, findings, show)
        _measure_collectives(plan, findings, show)
    except KeyboardInterrupt:
        return findings.bench(interrupted=True)
    return findings.bench(interrupted=False)


class _Plan:
    """What was asked for, on this machine."""

    def __init__(self, wanted: Wanted, found: Found) -> None:
        self.wanted, self.found = wanted, found
        self.is_on_gpus = wanted.device == "cuda" or (wanted.device == "auto" and bool(found.gpus))
        there = len(found.gpus) if self.is_on_gpus else usable_cores()
        if self.is_on_gpus and not 1 <= (wanted.most or 1) <= there:
            raise BenchError(
                f"--devices {wanted.most or 1}: torch finds {there} CUDA devices here; ask for fewer, or for "
                "--device cpu"
            )
        most = wanted.most or there
        threads = wanted.threads or max(1, usable_cores() // most)
        kind, backend = "cuda" if self.is_on_gpus else "cpu", wanted.backend
        if backend == "auto":
            backend = "nccl" if self.is_on_gpus else "shm" if "shm" in dist.Backend.backend_list else "gloo"
        self.settings = tuple(Setting(number, threads, kind, backend) for number in numbers_of_devices(most))
        self.ways = tuple(way for way in wanted.ways if way != MORE_THREADS or not self.is_on_gpus)
        self.steps_a_turn = min(wanted.steps, _STEPS_A_TURN)
        self.num_rounds = math.ceil(wanted.steps / self.steps_a_turn)
        self.subject = Subject(
            wanted.recipe.model, found.num_parameters, found.parameter_bytes, found.batch_size, threads
        )

    def ways_of(self, setting: Setting) -> tuple[str, ...]:
        return (ONE_PROCESS, *(self.ways if setting.num_devices > 1 else ()))

    def memory_of(self, setting: Setting) -> Iterator[str]:
        """The ways whose memory is measured beside so many devices: one process once."""
        return (way for way in self.ways_of(setting) if way != ONE_PROCESS or setting is self.settings[0])

    @property
    def backends(self) -> tuple[str, ...]:
        """For all_reduce; none where there are no ranks."""
        setting = self.settings[-1]
        backends = (setting.backend_of(way) for way in self.ways_of(setting))
        return tuple(dict.fromkeys(backend for backend in backends if backend is not None))

    @property
    def num_parts(self) -> int:
        turns = sum(self.num_rounds * len(self.ways_of(setting)) for setting in self.settings)
        peaks = sum(len(list(self.memory_of(setting))) for setting in self.settings)
        return turns + peaks + len(self.backends) * len(collectives.SIZES)


def numbers_of_devices(most: int) -> list[int]:
    """The powers of two from 2 on, and ``most``; 1 alone where there is one: one process has turns with all others."""
    return sorted({*(1 << power for power in range(1, most.bit_length()) if 1 << power <= most), most})


def _measure_steps(plan: _Plan, setting: Setting, findings: Findings, show: Show) -> None:
    number = setting.num_devices
    for way in plan.ways_of(setting):
        findings.expect(number, way, setting.backend_of(way))
    while (ways := findings.left(number)) and (rounds := plan.num_rounds - findings.rounds_of(number)) > 0:
        job = times.Job(plan.wanted.recipe, setting, ways, rounds, plan.steps_a_turn)
        blamed = ways
        try:
            for message in _messages(times.take_turns, job, number):
                if isinstance(message, times.Began):
                    blamed = (message.way,)
                    show.at(f"{_devices(number)}, steps in turns: {message.way}")
                else:
                    findings.add(number, message)
                    show.advance()
        except RanksFailedError as error:
            for way in blamed:
                findings.fail(number, way, str(error))
                show.note(f"{_where(way, number)} failed: {_first_line(error)}")


def _measure_memory(plan: _Plan, setting: Setting, findings: Findings, show: Show) -> None:
    number, left = setting.num_devices, findings.left(setting.num_devices)
    for way in plan.memory_of(setting):
        show.at(f"{_devices(1 if way == ONE_PROCESS else number)}, memory: {way}")
        job = memory.Job(plan.wanted.recipe, setting, way)
        try:
            for peak_bytes in _messages(memory.measure_memory, job, _ranks_of(way, number)) if way in left else ():
                findings.keep_peak(number, way, peak_bytes)
        except RanksFailedError as error:
            show.note(f"the memory of {_where(way, number)} could not be measured: {_first_line(error)}")
        show.advance()


def _measure_collectives(plan: _Plan, findings: Findings, show: Show) -> None:
    setting = plan.settings[-1]
    if not plan.backends:
        return
    show.at(f"{_devices(setting.num_devices)}, all_reduce over {' and '.join(plan.backends)}")
    job = collectives.Job(setting, plan.backends)
    try:
        for collective in _messages(collectives.measure_collectives, job, setting.num_devices):
            findings.collectives.append(collective)
            show.advance()
    except RanksFailedError as error:
        show.note(f"all_reduce on {_devices(setting.num_devices)} could not be measured: {_first_line(error)}")


def _messages(task: Task, job: object, num_ranks: int) -> Iterator[Any]:
    with closing(messages_of(task, job, num_ranks)) as messages:
        yield from messages


def _ranks_of(way: str, number: int) -> int:
    return number if is_on_every_rank(way) else 1


def _where(way: str, number: int) -> str:
    return way if way == ONE_PROCESS else f"{way} on {_devices(number)}"


def _first_line(error: RanksFailedError) -> str:
    return str(error).partition("\n")[0]


def _devices(number: int) -> str:
    return "1 device" if number == 1 else f"{number} devices"
