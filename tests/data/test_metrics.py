"""Metrics: exact over all ranks, whatever each of them has."""

import math

import pytest
import torch

from paceline.data import Accuracy, ConfusionCounts, Mean
from paceline.data.metrics import _exact_sum
from paceline.errors import DataError
from support.ranks import run_ranks


def test_metrics_over_unequal_ranks_are_those_of_one_process_bit_by_bit():
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(1001, generator=draw) * 10.0 ** torch.randint(-30, 30, (1001,), generator=draw)
    weights = torch.rand(1001, generator=draw)
    guesses, targets = (torch.randint(0, 3, (1001,), generator=draw) for _ in range(2))
    parts = [slice(0, 700), slice(700, 1001), slice(1001, 1001)]

    def measure(own):
        mean, weighted, accuracy, counts = Mean(), Mean(), Accuracy(), ConfusionCounts(3)
        for start in range(own.start, own.stop, 64):
            some = slice(start, min(start + 64, own.stop))
            mean.update(values[some])
            weighted.update(values[some], weights[some])
            accuracy.update(guesses[some], targets[some])
            counts.update(guesses[some], targets[some])
        return mean.compute(), weighted.compute(), accuracy.compute(), counts.compute().tolist()

    alone = measure(slice(0, 1001))
    assert run_ranks(3, lambda world: measure(parts[world.rank]), timeout_s=60) == [alone] * 3
    assert alone[0] == math.fsum(values.double().tolist()) / 1001
    assert alone[2] == int((guesses == targets).sum()) / 1001
    assert sum(map(sum, alone[3])) == 1001


def test_a_mean_does_not_round_before_its_end():
    mean = Mean()
    mean.update([1e300, 1.0])
    mean.update(torch.tensor([-1e300, 2.0], dtype=torch.float64))
    assert mean.compute() == 0.75
    mean.reset()
    mean.update(5e-324, 3)
    assert mean.compute() == 5e-324


def test_a_mean_of_batch_means_weighs_by_their_size():
    mean = Mean()
    mean.update(torch.tensor(2.0), 3)
    mean.update(torch.tensor(6.0), 1)
    assert mean.compute() == 3.0


@pytest.mark.parametrize(("values", "expected"), [([math.inf, 1.0], math.inf), ([math.inf, -math.inf], math.nan)])
def test_what_is_not_finite_shows(values, expected):
    mean = Mean()
    mean.update(values)
    mean.update(3.0)
    assert mean.compute() == pytest.approx(expected, nan_ok=True)


def test_nothing_at_all_has_no_mean():
    assert math.isnan(Mean().compute())
    assert math.isnan(Accuracy().compute())
    assert ConfusionCounts(2).compute().tolist() == [[0, 0], [0, 0]]


def test_exact_sums_are_pythons_own_of_fractions():
    values = torch.tensor([2.0**-1074, -(2.0**-1022), 2.0**1023, 3.5, -0.0], dtype=torch.float64)
    assert _exact_sum(values.numpy()) == 2**52 - 2**104 + 2**2149 + 7 * 2**1125


def test_scores_are_taken_for_their_largest_and_negative_targets_left_out():
    scores = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    targets = torch.tensor([1, 1, -100])
    accuracy, counts = Accuracy(), ConfusionCounts(2)
    accuracy.update(scores, targets)
    counts.update(scores, targets)
    assert accuracy.compute() == 0.5
    assert counts.compute().tolist() == [[0, 0], [1, 1]]
    counts.reset()
    assert counts.compute().sum() == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Mean().update(1.0, -1), "a weight of a Mean should be finite and 0 or more"),
        (lambda: ConfusionCounts(0), "num_classes should be 1 or more, got 0"),
        (lambda: ConfusionCounts(2).update(torch.tensor([2]), torch.tensor([0])),
         "a guess should be a class from 0 to 1, got 2 to 2"),
        (lambda: Accuracy().update(torch.zeros(3), torch.zeros(2)),
         "guesses should have the targets' shape (2,), or one dimension of scores more at the end, got (3,)"),
        (lambda: Accuracy().update(torch.tensor([[0.7], [-2.0]]), torch.tensor([1, 0])),
         "guesses of shape (2, 1) hold the score of one class only, which would always be the largest. Give classes, "
         "such as (scores > 0).squeeze(-1)."),
        (lambda: ConfusionCounts(2).update(torch.tensor([0.7, 0.2]), torch.tensor([1, 0])),
         "guesses of the targets' shape should be classes, got numbers that are not whole, it seems scores. Give "
         "classes, such as (scores > 0), or the scores of all classes along one more dimension, at the end."),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(DataError) as caught:
        call()
    assert str(caught.value) == message


def test_torchmetrics_sync_over_our_groups():
    torchmetrics = pytest.importorskip("torchmetrics")

    def measure(world):
        accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        guesses = torch.tensor([[0, 1, 2, 2], [1]][world.rank])
        accuracy.update(guesses, torch.ones_like(guesses))
        return accuracy.compute().item()

    assert run_ranks(2, measure, timeout_s=60) == pytest.approx([0.4, 0.4])


@pytest.mark.cuda
def test_guesses_on_a_gpu_are_counted_against_targets_on_the_cpu():
    scores, targets = torch.tensor([[0.1, 0.9], [0.8, 0.2]], device="cuda"), torch.tensor([1, 1])
    accuracy, counts = Accuracy(), ConfusionCounts(2)
    accuracy.update(scores, targets)
    counts.update(scores, targets)
    assert accuracy.compute() == 0.5
    assert counts.compute().tolist() == [[0, 0], [1, 1]]
