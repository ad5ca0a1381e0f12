"""Random states that are put aside: nothing of them is lost, however they are copied."""

import ctypes
import random

import numpy as np
import pytest
import torch

from paceline.data import states
from paceline.data.seeds import OwnRandomness, Seeded, kept_randomness, seed_process


@pytest.fixture(params=["as memory", "in the public ways"])
def _each_way(request, monkeypatch):
    if request.param == "in the public ways":
        monkeypatch.setattr(states, "_pythons_memory", lambda: None)
        monkeypatch.setattr(states, "_numpys_memory", lambda bits: None)


def draws():
    """A draw from each generator; the normal ones leave a deviate for the next call, or take the one that is left."""
    return torch.rand(()).item(), np.random.rand(), np.random.randn(), random.random(), random.gauss(0, 1)


def drawn_after(num_before, interlude):
    seed_process(5)
    for _ in range(num_before):
        draws()
    interlude()
    return [draws() for _ in range(3)]


@pytest.mark.usefixtures("_each_way")
@pytest.mark.parametrize("num_before", [0, 1, 2, 400])
@pytest.mark.parametrize("num_within", [0, 1, 2])
def test_a_process_draws_on_as_if_nothing_had_been_drawn_between(num_before, num_within):
    def interlude():
        own = OwnRandomness(1)
        for context in (Seeded(7), own, own, kept_randomness()):
            with context:
                for _ in range(num_within):
                    draws()

    assert drawn_after(num_before, interlude) == drawn_after(num_before, lambda: None)


@pytest.mark.usefixtures("_each_way")
@pytest.mark.parametrize("num_before", [0, 1])
def test_what_is_drawn_within_follows_from_the_seed_alone_and_goes_on(num_before):
    for _ in range(num_before):
        draws()
    with Seeded(2**63 + 11):
        expected = [draws() for _ in range(3)]
    own, found = OwnRandomness(2**63 + 11), []
    for _ in range(3):
        draws()
        with own:
            found.append(draws())
    assert found == expected


def test_a_generator_of_numpy_that_cannot_be_seeded_is_put_back():
    before, other = np.random.get_bit_generator(), np.random.PCG64(3)
    expected = np.random.Generator(np.random.PCG64(3)).random(2).tolist()
    np.random.set_bit_generator(other)
    try:
        found = [np.random.rand()]
        with Seeded(1):
            np.random.rand()
        found.append(np.random.rand())
        assert np.random.get_bit_generator() is other
    finally:
        np.random.set_bit_generator(before)
    assert found == expected


def test_memory_that_is_not_a_state_is_not_taken_for_one():
    generator = random.Random(0)
    assert not states.is_state(ctypes.create_string_buffer(16), generator.random)
    assert states.is_state(states._place_of_pythons(generator), generator.random)
