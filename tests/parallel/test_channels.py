"""Over which groups a wrapper talks."""

import errno
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel
from paceline.parallel.reducer import channels
from support.ranks import run_ranks


def backends_of_a_wrapper(world, may_share=None):
    if may_share:
        os.environ["PACELINE_SHARED_MEMORY"] = may_share
    else:
        os.environ.pop("PACELINE_SHARED_MEMORY", None)
    wrapped = DistributedDataParallel(nn.Linear(1, 1))
    groups = wrapped._reducer._channels
    return [dist.get_backend(group) for group in (groups.gradients, groups.control)]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_gradients_and_control_travel_in_memory_where_ranks_share_it(backend):
    assert run_ranks(2, backends_of_a_wrapper, backend=backend) == [["shm", "shm"]] * 2


def test_ranks_that_may_not_or_cannot_share_memory_keep_to_gloo(monkeypatch):
    assert run_ranks(2, backends_of_a_wrapper, "0", backend="gloo") == [["gloo", "gloo"]] * 2
    monkeypatch.setattr(channels, "choose_cpu_backend", lambda peers: "hier" if len(peers) == 2 else "")
    assert run_ranks(2, backends_of_a_wrapper, backend="gloo") == [["gloo", "gloo"]] * 2


def refused(world):
    """The system of the first rank lets no memory be shared."""
    os.environ.pop("PACELINE_SHARED_MEMORY", None)

    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    os.memfd_create = refuse
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    (wrapped(torch.ones(1, 1)) * (world.rank + 1)).sum().backward()
    control = wrapped._reducer._channels.control
    return [str(warning.message) for warning in caught], dist.get_backend(control), wrapped.module.weight.grad.item()


def test_where_the_system_refuses_to_share_memory_gradients_travel_over_gloo_with_a_warning():
    for warned, backend, grad in run_ranks(2, refused, backend="gloo"):
        assert len(warned) == 1
        assert warned[0].startswith("gradients are averaged over Gloo, since memory cannot be shared: rank ")
        assert "Operation not permitted" in warned[0]
        assert (backend, grad) == ("gloo", 1.5)


def groups_of_wrappers(world):
    """The names of the groups of two wrappers that live at once, and of one that comes when the first is gone."""

    def names(wrapped):
        groups = wrapped._reducer._channels
        assert groups.gradients is groups.control
        return groups.control.group_name

    first, second = DistributedDataParallel(nn.Linear(1, 1)), DistributedDataParallel(nn.Linear(1, 1))
    living = [names(first), names(second)]
    del first
    return living, names(DistributedDataParallel(nn.Linear(1, 1)))


def test_two_wrappers_share_no_group_and_the_next_takes_those_of_one_that_is_gone():
    for living, next_one in run_ranks(2, groups_of_wrappers, backend="gloo"):
        assert len(set(living)) == 2
        assert next_one == living[0]


def chosen_by_itself(world):
    return world.backend


def test_nothing_is_shared_by_itself_where_one_rank_may_not(monkeypatch):
    assert run_ranks(2, chosen_by_itself) == ["shm"] * 2
    monkeypatch.setenv("PACELINE_SHARED_MEMORY", "0")
    assert run_ranks(2, chosen_by_itself) == ["gloo"] * 2
