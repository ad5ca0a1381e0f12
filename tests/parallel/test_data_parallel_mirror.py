"""Copies on other devices stay, and are refreshed exactly where they differ."""

import copy
import pickle

import pytest
import torch
from torch import nn

from paceline.parallel import DataParallel
from paceline.parallel.data_parallel.mirror import Mirror, _digest, differ

CPUS = [torch.device("cpu")] * 3


def fetch(mirror, sources, devices=CPUS):
    """What was copied, after a check that all copies are right."""
    rows = mirror.fetch(sources, devices)
    assert len(rows) == len(devices) - 1
    for row in rows:
        for source, copied in zip(sources, row, strict=True):
            assert torch.equal(copied, source.detach())
            assert copied.data_ptr() != source.data_ptr()
            assert copied.stride() == source.stride()
            assert not copied.requires_grad
    return mirror.copied_bytes


def test_only_what_has_changed_is_copied_and_memory_stays():
    mirror, sources = Mirror(), [torch.randn(10, requires_grad=True), torch.randn(5000)]
    assert fetch(mirror, sources) == 2 * 5010 * 4
    before = [row[0].data_ptr() for row in mirror.fetch(sources, CPUS)]
    assert mirror.copied_bytes == 0
    with torch.no_grad():
        sources[0].add_(1)
    assert fetch(mirror, sources) == 2 * 10 * 4
    assert [row[0].data_ptr() for row in mirror.fetch(sources, CPUS)] == before


@pytest.mark.parametrize("numel", [1, 7, 10, 1024, 5000, 100_003])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64]
)
def test_what_is_written_past_torchs_count_is_found(numel, dtype):
    source = torch.zeros(numel, dtype=dtype)
    mirror = Mirror()
    fetch(mirror, [source])
    assert fetch(mirror, [source]) == 0
    for at in {0, numel // 2, numel - 1}:
        source.data[at] = 1
        assert fetch(mirror, [source]) == 2 * source.numel() * source.element_size()


@pytest.mark.parametrize("distance", [1, 251])
def test_elements_that_change_places_are_found(distance):
    source = torch.arange(502.0 * 64).view(502, 64)
    mirror = Mirror()
    fetch(mirror, [source])
    source.data[[0, distance]] = source.data[[distance, 0]]
    assert fetch(mirror, [source]) > 0


def test_a_digest_tells_of_each_element_and_of_what_changes_places():
    words = torch.arange(502 * 64)
    before = _digest(words)
    for rows in ([0, 1], [0, 251], [0, 257]):
        changed = words.view(502, 64).clone()
        changed[rows] = changed[rows[::-1]]
        assert not torch.equal(_digest(changed.view(-1)), before)
    for at in (0, 251, 502 * 64 - 1):
        changed = words.clone()
        changed[at] += 1
        assert not torch.equal(_digest(changed), before)


@pytest.mark.parametrize(
    "make",
    [lambda: torch.randn(5001)[1:], lambda: torch.randn(11)[1:], lambda: torch.randn(4, dtype=torch.complex64).conj()],
    ids=["large part", "small part", "conjugate"],
)
def test_parts_of_other_tensors_and_conjugates_are_copied_once(make):
    source = make()
    mirror = Mirror()
    assert mirror.fetch([source], CPUS)[0][0].tolist() == source.tolist()
    mirror.fetch([source], CPUS)
    assert mirror.copied_bytes == 0


def test_a_copy_that_a_replica_has_written_into_is_made_anew():
    source = torch.ones(3)
    mirror = Mirror()
    mirror.fetch([source], CPUS)[0][0].mul_(2)
    assert fetch(mirror, [source]) == 3 * 4
    mirror.fetch([source], CPUS)[1][0].data.mul_(2)
    assert fetch(mirror, [source]) == 3 * 4


def test_sources_that_change_their_kind_or_go():
    source = torch.nn.Parameter(torch.ones(4, 3, 2, 2))
    mirror = Mirror()
    fetch(mirror, [source])
    source.data = source.data.to(memory_format=torch.channels_last)
    assert fetch(mirror, [source]) > 0
    source.data = source.data.double()
    assert fetch(mirror, [source]) > 0
    source.data = torch.zeros(5, dtype=torch.float64)
    assert fetch(mirror, [source]) > 0
    source.data = torch.zeros(5, dtype=torch.float64)  # the same values, elsewhere
    fetch(mirror, [source])
    assert fetch(mirror, [torch.ones(2)]) > 0
    assert len(mirror.tensors()) == 2


def test_strides_that_do_not_fill_memory_empty_and_inference_tensors():
    mirror = Mirror()
    wide = torch.arange(20.0).view(4, 5)[:, :3]
    with torch.inference_mode():
        frozen = torch.ones(3)
    sources = [wide, torch.empty(0), frozen, torch.ones(1000, 3).t(), torch.tensor(float("nan")).expand(3)]
    for _ in range(2):
        for row in mirror.fetch(sources, CPUS):
            for source, copied in zip(sources, row, strict=True):
                torch.testing.assert_close(copied, source.clone(), equal_nan=True)
                assert not copied.is_inference()


def test_bits_are_compared_not_numbers():
    ones = [torch.tensor([0.0, 1.0]), torch.tensor(float("nan")), torch.ones(3000)]
    others = [torch.tensor([-0.0, 1.0]), torch.tensor(float("nan")), torch.ones(3000)]
    assert differ(ones, others) == [0]
    assert differ([], []) == []


def test_a_copied_mirror_holds_nothing():
    mirror = Mirror()
    mirror.fetch([torch.ones(3)], CPUS)
    assert copy.deepcopy(mirror).tensors() == []
    assert pickle.loads(pickle.dumps(mirror)).tensors() == []


@pytest.mark.parametrize("write", [lambda p: p.data.sub_(0.5 * p.grad), lambda p: p.data.clamp_(-0.01, 0.01)])
def test_weights_trained_through_data_are_those_of_the_bare_module(write):
    bare = nn.Linear(3, 1)
    wrapped = DataParallel(copy.deepcopy(bare), ["cpu"] * 2, loss=nn.MSELoss())
    x, y = torch.randn(5, 3), torch.randn(5, 1)
    for _ in range(3):
        for module in (bare, wrapped):
            module.zero_grad()
        nn.functional.mse_loss(bare(x), y).backward()
        wrapped.forward_backward(x, target=y)
        for module in (bare, wrapped):
            for param in module.parameters():
                write(param)
    torch.testing.assert_close(wrapped(x), bare(x))
