"""Turns of each way, in ranks: what is timed, what is watched, and what is sent."""

import pathlib

import pytest
import torch
import torch.distributed as dist

from paceline.bench.recipe import Recipe
from paceline.bench.results import DATA_PARALLEL, MORE_THREADS, ONE_PROCESS, OURS, TORCHS
from paceline.bench.steps import take_turn
from paceline.bench.ways import Setting, build
from paceline.parallel.reducer.clock import Clock
from support.ranks import run_ranks

NUM_STEPS = 3
GRADIENTS, BUFFERS = 2_002_000, 4_008


def written_bytes():
    """By all threads of this process, to sockets too."""
    told = pathlib.Path("/proc/self/io").read_text()
    return int(told.split("wchar: ")[1].split()[0])


def turns(world, ways, backend="shm"):
    """By way: a turn, and how many bytes were written in one of its steps."""
    setting, clock = Setting(world.world_size, 1, "cpu", backend), Clock(torch.device("cpu"))
    found = {}
    for way in ways:
        trainee = build(way, Recipe("support.trained:make"), setting)
        take_turn(trainee, 1, clock, world.rank)  # torch's DDP finds its buckets
        dist.barrier()
        before = written_bytes()
        found[way] = take_turn(trainee, NUM_STEPS, clock, world.rank), (written_bytes() - before) / (NUM_STEPS + 2)
    return found


def test_a_turn_times_its_steps_and_tells_apart_the_phases_of_one_more():
    for rank, found in enumerate(run_ranks(2, turns, (OURS, TORCHS))):
        for turn, _ in found.values():
            assert len(turn.step_s) == NUM_STEPS
            assert min(turn.step_s) > 0
            phases = turn.phases
            assert min(phases.forward_s, phases.backward_s, phases.optimizer_s) > 0
            assert phases.exposed_s >= 0
        ours, _ = found[OURS]
        assert found[TORCHS][0].spans == ()
        assert {span.rank for span in ours.spans} == {rank}
        kinds = [span.kind for span in sorted(ours.spans, key=lambda span: span.begin_s) if span.kind != "bucket"]
        assert kinds == ["forward", "backward", "exposed", "backward", "optimizer"]
        assert sum(span.size_bytes for span in ours.spans if span.kind == "bucket") == GRADIENTS
        lasted = sum(span.end_s - span.begin_s for span in ours.spans if span.kind != "bucket")
        phases = ours.phases
        together = phases.forward_s + phases.backward_s + phases.exposed_s + phases.optimizer_s
        assert lasted == pytest.approx(together)


def test_what_is_sent_is_counted_from_what_is_reduced_and_is_what_gloo_really_writes():
    # Of two ranks each sends half of the gradients twice, and the buffers from one of them: half in the mean.
    torchs = round((2 * GRADIENTS + BUFFERS) / 2)
    found = run_ranks(2, turns, (OURS, TORCHS), "gloo", backend="gloo")
    for turn in (found[0][TORCHS][0], found[1][TORCHS][0]):
        assert turn.bytes_sent == torchs
    for of_rank in found:
        assert torchs < of_rank[OURS][0].bytes_sent < torchs + 1000  # and the control message
    assert sum(of_rank[TORCHS][1] for of_rank in found) / 2 == pytest.approx(torchs, rel=0.02)


def test_in_one_process_nothing_is_sent_and_only_replicas_cannot_be_looked_into():
    def alone(world):
        setting, clock = Setting(2, 1, "cpu", "shm"), Clock(torch.device("cpu"))
        trainees = [
            build(way, Recipe("support.trained:make"), setting) for way in (ONE_PROCESS, MORE_THREADS, DATA_PARALLEL)
        ]
        turns = [take_turn(trainee, 1, clock, 0) for trainee in trainees]
        return [(t.training.batch_size, t.threads) for t in trainees], turns

    ((sizes, turns),) = run_ranks(1, alone)
    assert sizes == [(4, 1), (8, 2), (8, 1)]  # a batch for each device
    assert [turn.bytes_sent for turn in turns] == [None] * 3
    assert [turn.phases and turn.phases.exposed_s for turn in turns] == [0.0, 0.0, None]
