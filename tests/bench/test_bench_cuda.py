"""On GPUs: the clock is the device's, and memory is what its allocator says."""

import multiprocessing

import pytest
import torch

from paceline.bench.conduct import Wanted, measure
from paceline.bench.recipe import Recipe
from paceline.bench.results import ONE_PROCESS, OURS

pytestmark = [pytest.mark.cuda, pytest.mark.slow]


class Silent:
    def begin(self, total):
        pass

    def at(self, what):
        pass

    def advance(self):
        pass

    def note(self, text):
        raise AssertionError(text)


@pytest.fixture
def no_server_stays():
    yield
    multiprocessing.forkserver._forkserver._stop()


def test_a_bench_of_all_gpus_up_to_two_is_whole(no_server_stays):
    most = min(2, torch.cuda.device_count())
    found = measure(Wanted(Recipe("support.trained:make"), most=most, steps=4, device="cuda"), Silent())
    assert len(found.machine.devices) == torch.cuda.device_count()
    assert {run.num_devices for run in found.runs} == {1, most}
    one = found.run(ONE_PROCESS, 1)
    for run in found.runs:
        assert len(run.step_s) == 4
        assert min(run.step_s) > 0
        assert len(run.peak_bytes) == run.num_devices
    assert min(one.peak_bytes) > 4_000_000  # parameters and gradients
    assert min(one.phases.forward_s, one.phases.backward_s, one.phases.optimizer_s) > 0
    if most == 2:
        assert found.run(OURS, 2).phases.exposed_s >= 0
        assert {span.rank for span in found.step} == {0, 1}
        assert {collective.backend for collective in found.collectives} == {"nccl"}
