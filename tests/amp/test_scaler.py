"""The loss scale, verdict by verdict."""

import pytest

from paceline.amp.scaler import LossScaler


def scales(scaler, verdicts):
    seen = []
    for is_overflow in verdicts:
        scaler.update(is_overflow=is_overflow)
        seen.append(scaler.loss_scale())
    return seen


def test_it_starts_at_65536_and_halves_at_each_overflow():
    assert scales(LossScaler("dynamic"), [False, True, True, False]) == [2**16, 2**15, 2**14, 2**14]


def test_it_doubles_after_2000_updates_without_an_overflow():
    scaler = LossScaler("dynamic")
    assert scales(scaler, [False] * 1999)[-1] == 2**16
    assert scales(scaler, [True, *[False] * 2000])[-1] == 2**16
    assert scales(scaler, [False] * 2000)[-1] == 2**17


def test_it_keeps_between_its_bounds():
    scaler = LossScaler("dynamic", min_loss_scale=2.0**15, max_loss_scale=2.0**16)
    assert scales(scaler, [True, True, True]) == [2**15] * 3
    scaler._loss_scale = 2.0**16
    assert scales(scaler, [False] * 2000)[-1] == 2**16
    assert LossScaler("dynamic", max_loss_scale=4.0).loss_scale() == 4.0
    assert LossScaler("dynamic", min_loss_scale=2.0**20).loss_scale() == 2.0**20


def test_a_static_scale_stays():
    assert scales(LossScaler(128.0), [True, *[False] * 3000]) == [128.0] * 3001


@pytest.mark.parametrize(
    ("scaler", "verdicts", "stuck"),
    [
        (LossScaler("dynamic", min_loss_scale=2.0**15), [True, True, True], [False, True, True]),
        (LossScaler("dynamic", min_loss_scale=2.0**14), [True, False, True, True], [False, False, False, True]),
        (LossScaler(128.0), [True, False, True, True], [False, False, False, True]),
        (LossScaler("dynamic"), [True] * 40, [False] * 32 + [True] * 8),
    ],
)
def test_it_is_stuck_at_the_second_overflow_in_a_row_at_its_floor(scaler, verdicts, stuck):
    assert [scaler.update(is_overflow=verdict) for verdict in verdicts] == stuck


def test_overflows_are_counted():
    scaler = LossScaler("dynamic")
    scales(scaler, [True, False, True, False, False])
    assert scaler.state_dict() == {"loss_scale": 2.0**14, "unskipped": 2, "skipped": 2}


def test_it_goes_on_from_what_apex_has_saved():
    scaler = LossScaler("dynamic")
    scaler.load_state_dict({"loss_scale": 512.0, "unskipped": 1999})
    assert (scaler.loss_scale(), scaler.num_skipped) == (512.0, 0)
    assert scales(scaler, [False]) == [1024.0]


def test_a_static_scale_is_not_loaded_over():
    scaler = LossScaler(128.0)
    scaler.load_state_dict({"loss_scale": 512.0, "unskipped": 3})
    assert scaler.loss_scale() == 128.0
