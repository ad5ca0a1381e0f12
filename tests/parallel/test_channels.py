"""Over which groups a wrapper talks."""

import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel
from paceline.parallel.reducer import channels
from support.ranks import run_ranks


def backends_of_a_wrapper(world):
    wrapped = DistributedDataParallel(nn.Linear(1, 1))
    groups = wrapped._reducer._channels
    return [dist.get_backend(group) for group in (groups.gradients, groups.control)]


def test_gradients_travel_over_what_the_user_chose_and_control_in_memory_where_that_is_shared():
    assert run_ranks(2, backends_of_a_wrapper, backend="shm") == [["shm", "shm"]] * 2
    assert run_ranks(2, backends_of_a_wrapper, backend="gloo") == [["gloo", "shm"]] * 2


def test_ranks_that_share_no_memory_keep_to_what_the_user_chose(monkeypatch):
    monkeypatch.setattr(channels, "choose_cpu_backend", lambda peers: "hier" if len(peers) == 2 else "")
    assert run_ranks(2, backends_of_a_wrapper, backend="gloo") == [["gloo", "gloo"]] * 2


def groups_of_wrappers(world):
    """The names of the groups of two wrappers that live at once, and of one that comes when the first is gone."""

    def names(wrapped):
        groups = wrapped._reducer._channels
        return groups.gradients.group_name, groups.control.group_name

    first, second = DistributedDataParallel(nn.Linear(1, 1)), DistributedDataParallel(nn.Linear(1, 1))
    living = [names(first), names(second)]
    del first
    return living, names(DistributedDataParallel(nn.Linear(1, 1)))


def test_two_wrappers_share_no_group_and_the_next_takes_those_of_one_that_is_gone():
    for living, next_one in run_ranks(2, groups_of_wrappers, backend="gloo"):
        assert len({name for pair in living for name in pair}) == 4
        assert next_one == living[0]
