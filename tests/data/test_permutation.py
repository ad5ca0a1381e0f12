"""The shuffle: a bijection at every size, uniform where that can be counted, unrelated from epoch to epoch."""

import itertools
import math

import numpy as np
import pytest

from paceline.data import permutation
from paceline.data.permutation import Permutation, mix


def shuffled(size, *, seed=0, epoch=0):
    return Permutation(size, seed=seed, epoch=epoch).permute(np.arange(size))


@pytest.fixture
def network_only(monkeypatch):
    """Run the network at small sizes too, where a table would serve."""
    monkeypatch.setattr(permutation, "TABLE_LIMIT", 0)


def chi_square(counts):
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


def test_mix_and_key_stream_give_the_published_first_outputs_of_splitmix64():
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert mix(0) == published[0]
    assert permutation._key_stream(0, 3).tolist() == published


def test_mix_tells_order_sign_and_number_of_words_apart():
    assert len({mix(1, 2), mix(2, 1), mix(1), mix(1, 0), mix(-1), mix(0, 1), mix(3)}) == 7


@pytest.mark.parametrize("seed", [0, 1])
def test_every_small_size_is_permuted_exactly(seed):
    for size in range(1, 700):
        assert sorted(shuffled(size, seed=seed)) == list(range(size)), size


@pytest.mark.usefixtures("network_only")
@pytest.mark.parametrize("seed", [0, 1])
def test_the_network_alone_permutes_every_small_size_exactly(seed):
    for size in range(1, 700):
        assert sorted(shuffled(size, seed=seed)) == list(range(size)), size


@pytest.mark.parametrize("size", [4095, 4096, 4097, 4160, 4161, 10007, 65536, 65537, 300_000])
def test_sizes_around_every_internal_border_are_permuted_exactly(size):
    np.testing.assert_array_equal(np.sort(shuffled(size, seed=3, epoch=9)), np.arange(size))


@pytest.mark.parametrize("size", [10**9, 2**32 + 1, 10**12 + 39, 2**40 - 1, 2**40])
def test_huge_sizes_give_distinct_indices_in_range_that_spread_evenly(size):
    ends = np.concatenate([np.arange(50_000), np.arange(size - 50_000, size)])
    images = Permutation(size, seed=5, epoch=2).permute(ends)
    assert images.dtype == np.int64
    assert len(np.unique(images)) == 100_000
    assert 0 <= images.min() <= images.max() < size
    # 99 degrees of freedom: a fair shuffle exceeds 148.2 once in a thousand keys.
    assert chi_square(np.bincount(images * 100 // size, minlength=100)) < 148.2


def test_pieces_of_any_size_and_integer_type_give_what_the_whole_gives():
    whole = shuffled(50_000, seed=11)
    pieces = Permutation(50_000, seed=11, epoch=0)
    for dtype in (np.int32, np.uint16, np.uint64):
        positions = np.arange(49_000, 49_321).astype(dtype)
        np.testing.assert_array_equal(pieces.permute(positions), whole[49_000:49_321])
    backwards = pieces.permute(np.arange(50_000)[::-1])
    np.testing.assert_array_equal(backwards, whole[::-1])


def slow_network(size, position, *, seed, epoch):
    """The network for one position in plain integers, as the reference."""
    bits = (size - 1).bit_length()
    keys = [word >> (64 - bits) for word in permutation._key_stream(mix(seed, epoch), 12).tolist()]
    while True:
        for factor, term in zip(keys[::2], keys[1::2], strict=True):
            position = (position * (factor | 1) + term) % 2**bits
            position ^= position >> (bits + 1) // 2
        if position < size:
            return position


@pytest.mark.parametrize("size", [5003, 10**9, 2**31 + 1, 2**32 + 1, 2**40])
def test_the_network_is_the_one_that_plain_integers_compute(size):
    positions = [*range(100), *range(size - 100, size)]
    images = Permutation(size, seed=7, epoch=3).permute(np.array(positions))
    assert images.tolist() == [slow_network(size, position, seed=7, epoch=3) for position in positions]


def test_the_order_of_a_seed_is_frozen_so_that_a_resumed_run_meets_the_same_samples():
    assert shuffled(8).tolist() == [6, 4, 3, 7, 1, 2, 5, 0]
    network = Permutation(10**9, seed=7, epoch=3).permute(np.array([0, 1, 2, 999_999_999]))
    assert network.tolist() == [385628015, 795338038, 143023027, 393291150]


# The 99.9% points of chi-square with n! - 1 degrees of freedom.
@pytest.mark.parametrize(("size", "limit"), [(3, 20.52), (4, 49.73), (5, 172.5)])
def test_all_orders_of_a_tiny_dataset_come_equally_often(size, limit):
    orders = dict.fromkeys(itertools.permutations(range(size)), 0)
    for epoch in range(60 * len(orders)):
        orders[tuple(shuffled(size, epoch=epoch).tolist())] += 1
    assert chi_square(np.array(list(orders.values()))) < limit


def test_each_position_of_a_hundred_is_uniform_over_epochs():
    counts = np.zeros((100, 100))
    for epoch in range(3000):
        counts[np.arange(100), shuffled(100, seed=4, epoch=epoch)] += 1
    # 99 * 99 degrees of freedom, normal to good accuracy; 3.3 standard deviations.
    assert abs(chi_square(counts) - 9801) < 3.3 * math.sqrt(2 * 9801)


@pytest.mark.parametrize("other", [1, 64, 4096, 4999])
def test_pairs_of_positions_under_the_network_are_jointly_uniform(other):
    # 5000 takes 13 bits: positions 0 and 4096 differ in the top bit alone, the hardest case.
    counts = np.zeros((10, 10))
    pair = np.array([0, other])
    for epoch in range(4000):
        first, second = Permutation(5000, seed=1, epoch=epoch).permute(pair) // 500
        counts[first, second] += 1
    assert chi_square(counts) < 148.2


def test_each_position_under_the_network_is_uniform_over_epochs():
    positions = np.array([0, 1, 2, 63, 64, 2500, 4096, 4999])
    counts = np.zeros((len(positions), 100))
    for epoch in range(4000):
        counts[np.arange(len(positions)), Permutation(5000, seed=2, epoch=epoch).permute(positions) // 50] += 1
    for row in counts:
        assert chi_square(row) < 148.2


@pytest.mark.parametrize("distance", [1, 256, 2**14, 2**15])
def test_within_an_epoch_positions_of_any_distance_land_at_every_distance_equally_often(distance):
    size, num_bins, num_keys = 2**16, 1024, 24
    excess = 0.0
    for epoch in range(num_keys):
        images = shuffled(size, seed=8, epoch=epoch)
        distances = (images[distance:] - images[:-distance]) % size
        excess += chi_square(np.bincount(distances * num_bins // size, minlength=num_bins)) - (num_bins - 1)
    # In standard deviations of a sum of chi-squares.
    assert abs(excess) / math.sqrt(2 * (num_bins - 1) * num_keys) < 4


@pytest.mark.parametrize("lag", [1, 2, 3, 64, 4096])
def test_positions_at_any_distance_are_uncorrelated(lag):
    size = 1_000_000
    images = shuffled(size, seed=6, epoch=1)
    assert abs(np.corrcoef(images[:-lag], images[lag:])[0, 1]) < 4 / math.sqrt(size)


def test_neighbours_end_up_as_far_apart_as_in_a_uniform_shuffle():
    size = 1_000_000
    gaps = np.abs(np.diff(shuffled(size)))
    # Mean (n + 1) / 3, standard deviation n / sqrt(18).
    assert abs(gaps.mean() - (size + 1) / 3) < 4 * size / math.sqrt(18 * size)


def test_epochs_and_seeds_are_uncorrelated():
    size = 100_000
    base = shuffled(size, seed=0, epoch=0)
    for seed, epoch in ((0, 1), (1, 0), (0, -1), (-1, 0), (2**63, 0), (0, 2**64 - 1)):
        other = shuffled(size, seed=seed, epoch=epoch)
        assert abs(np.corrcoef(base, other)[0, 1]) < 4 / math.sqrt(size)


def test_two_epochs_share_a_place_for_about_one_sample():
    # The number of shared places of two independent shuffles is Poisson with mean 1.
    epochs = [shuffled(10_000, epoch=epoch) for epoch in range(101)]
    shared = sum(int((a == b).sum()) for a, b in itertools.pairwise(epochs))
    assert abs(shared - 100) < 40
