"""Benches as values, made by hand: what reports are tested with."""

import dataclasses
import random

from paceline.bench.results import (
    DATA_PARALLEL,
    MORE_THREADS,
    ONE_PROCESS,
    OURS,
    TORCHS,
    Bench,
    Collective,
    Machine,
    Phases,
    Run,
    Span,
    Subject,
)

MACHINE = Machine(
    processor="AMD EPYC 9474F 48-Core Processor",
    cores=8,
    memory_bytes=64 * 2**30,
    devices=(),
    system="Linux 6.1.0, glibc 2.36",
    python="3.11.9",
    torch="2.13.0",
    paceline="0.1.0",
    began="2026-11-30T20:15:00+01:00",
    load=0.1,
)
SUBJECT = Subject("mnist", num_parameters=1_199_882, parameter_bytes=4_799_528, batch_size=64, threads=1)
ALONE_S = 0.040
STEP_S = {  # of each way, over the number of devices
    OURS: {1: 0.0402, 2: 0.0432, 4: 0.0457, 8: 0.0551},
    TORCHS: {1: 0.0409, 2: 0.0511, 4: 0.0605, 8: 0.0842},
    DATA_PARALLEL: {1: 0.0403, 2: 0.0552, 4: 0.0834, 8: 0.1511},
    MORE_THREADS: {2: 0.0441, 4: 0.0523, 8: 0.0712},
}
MIB = 2**20


def bench_on(most=8, *, machine=MACHINE, subject=SUBJECT):
    """All ways on 1, 2, 4, ... ``most`` devices, with everything measured."""
    numbers = [number for number in (1, 2, 4, 8) if number <= most]
    runs = [Run(ONE_PROCESS, None, 1, _around(ALONE_S), _phases(ALONE_S, 0.0), None, (118 * MIB,))]
    for number in numbers:
        for way, step_s in STEP_S.items():
            if number in step_s:
                runs.append(_run(way, number, step_s[number]))
    return Bench(machine, subject, tuple(runs), step(min(most, 2)), tuple(collectives(most)))


def _run(way, number, step_s):
    is_ranks = way in (OURS, TORCHS)
    return Run(
        way,
        {OURS: "shm", TORCHS: "gloo"}.get(way),
        number,
        _around(step_s),
        _phases(step_s, 0.3 * max(0.0, step_s - ALONE_S) if is_ranks else 0.0) if way != DATA_PARALLEL else None,
        4_799_528 * 2 * (number - 1) // number if is_ranks else None,
        () if way == MORE_THREADS else _peaks(way, number),
        alone_s=_around(ALONE_S),
    )


def _around(median_s, rounds=9):
    """Times of which ``median_s`` is the median."""
    return tuple(median_s * (1 + 0.004 * (index - rounds // 2)) for index in range(rounds))


def _phases(step_s, exposed_s):
    work_s = step_s - exposed_s
    return Phases(0.33 * work_s, 0.57 * work_s, exposed_s, 0.08 * work_s)


def _peaks(way, number):
    if way == DATA_PARALLEL and number > 1:
        return (121 * MIB + 31 * MIB * number, *(64 * MIB,) * (number - 1))
    return tuple((118 if way == OURS else 126) * MIB + 300_000 * rank for rank in range(number))


def step(num_ranks, num_buckets=4):
    """A step in which every bucket but the last is hidden behind backward, on each rank."""
    spans = []
    for rank in range(num_ranks):
        late_s = 0.0008 * rank
        spans += [
            Span(rank, "forward", late_s, 0.013 + late_s),
            Span(rank, "backward", 0.013 + late_s, 0.037 + late_s),
            Span(rank, "exposed", 0.037 + late_s, 0.0398),
            Span(rank, "optimizer", 0.0398, 0.0432),
        ]
        for bucket in range(num_buckets):
            begin_s = 0.016 + 0.021 * (bucket + 0.9) / num_buckets + late_s
            end_s = 0.0396 if bucket == num_buckets - 1 else begin_s + 0.0035
            spans.append(Span(rank, "bucket", begin_s, end_s, bucket, 1_199_882))
    return tuple(spans)


def collectives(most):
    """Over shm, and over gloo with a higher latency and a quarter of the bandwidth."""
    for world_size in (number for number in (2, 4, 8) if number <= most):
        for power in range(10, 27, 2):
            copy_s = 1.5e-6 + 2**power / 9e9
            yield Collective("shm", world_size, 2**power, 25e-6 + 1.7 * copy_s, copy_s)
            yield Collective("gloo", world_size, 2**power, 310e-6 * world_size / 2 + 7.2 * copy_s, copy_s)


HOSTILE = '<script>alert("x")</script> & $\\alpha$ 模型 ' + "a_very_long_name_without_any_break_" * 4


def hostile():
    """Names and errors that are markup, and long."""
    bench = bench_on(2, subject=dataclasses.replace(SUBJECT, name=HOSTILE))
    machine = dataclasses.replace(MACHINE, processor=HOSTILE, load=7.5)
    error = f"rank 1: RuntimeError: {HOSTILE}\n" + "  File 'x.py', line 1\n" * 30
    failed = Run(TORCHS, "gloo", 2, error=error)
    return dataclasses.replace(
        bench, machine=machine, runs=(*(run for run in bench.runs if run.way != TORCHS), failed), interrupted=True
    )


def on_gpus():
    """Eight GPUs, several backends for one way, and a step of eight ranks with many buckets."""
    machine = dataclasses.replace(MACHINE, cores=96, devices=("NVIDIA H100 80GB HBM3",) * 8, load=1.2)
    subject = Subject("gpt", 124_439_808, 497_759_232, 16, 12)
    bench = bench_on(8, machine=machine, subject=subject)
    ours = [dataclasses.replace(run, backend="nccl") for run in bench.runs if run.way == OURS]
    hier = [
        dataclasses.replace(run, backend="hier", step_s=tuple(1.2 * s for s in run.step_s))
        for run in ours
        if run.num_devices > 1
    ]
    others = [run for run in bench.runs if run.way != OURS]
    big = [dataclasses.replace(run, peak_bytes=tuple(80 * peak for peak in run.peak_bytes)) for run in (*others, *ours)]
    return dataclasses.replace(bench, runs=(*big, *hier), step=step(8, 20))


def at_random(seed):
    """Any parts of a bench, with any of its figures missing."""
    chance = random.Random(seed)
    bench = bench_on(chance.choice([1, 2, 8]))
    runs = []
    for run in bench.runs:
        lacks = {"phases": None, "bytes_sent": None, "peak_bytes": (), "alone_s": (), "step_s": ()}
        chosen = {name: value for name, value in lacks.items() if chance.random() < 0.25}
        if chance.random() < 0.7:
            runs.append(dataclasses.replace(run, **chosen))
    return dataclasses.replace(
        bench,
        runs=tuple(runs),
        step=bench.step if chance.random() < 0.5 else (),
        collectives=bench.collectives if chance.random() < 0.5 else (),
        interrupted=chance.random() < 0.5,
    )
