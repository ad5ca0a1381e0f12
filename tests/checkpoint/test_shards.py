"""Sharded state: each rank writes its own part, and gets the whole, or the part that is its own now."""

import os
import pathlib
import pickle
import resource
import signal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor  # once here, rather than in each rank
from torch import nn

import paceline
from paceline.checkpoint import shards
from paceline.errors import CheckpointDamagedError, CheckpointError
from support.ranks import run_ranks

WEIGHT = torch.arange(10.0).view(5, 2)


def distributed(tensor):
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    return distribute_tensor(tensor, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def sharded(factor):
    state = {"weight": distributed(WEIGHT * factor), "of": {0: (torch.ones(1), [2.5])}, "empty": {}}
    return {"net": state, "step": 3 * factor}


def save_twice(world, folder):
    for factor in (1, 2):
        paceline.save(sharded(factor), f"{folder}/a.pt")
    found = paceline.load(f"{folder}/a.pt")
    paceline.save({"net": {"weight": WEIGHT * 2}, "step": 6}, f"{folder}/whole.pt")
    paceline.save(sharded(2)["net"] | {"of": torch.ones(1), "empty": torch.ones(0)}, f"{folder}/a.safetensors")
    return torch.equal(found["net"]["weight"], WEIGHT * 2) and found["step"] == 6 and list(found) == ["net", "step"]


def load_into(world, folder):
    """What three ranks get into shards of their own, and into whole tensors, of files that two have written."""
    told = []
    for name in ("a.pt", "whole.pt"):
        weight, plain = distributed(torch.zeros(5, 2)), torch.zeros(5, 2)
        state = {"net": {"weight": weight}, "step": 0}
        assert paceline.load(f"{folder}/{name}", into=state) is state
        assert state["net"]["weight"] is weight
        paceline.load(f"{folder}/{name}", into={"net": {"weight": plain}})
        assert paceline.load(f"{folder}/{name}", into={"net": {}})["net"]["weight"].tolist() == plain.tolist()
        told.append((weight.full_tensor().tolist(), weight.to_local().shape, plain.tolist(), state["step"]))
    for state in ({"other": 1}, {"net": {"weight": distributed(torch.zeros(4, 2))}}, {"step": torch.zeros(1)}):
        try:
            paceline.load(f"{folder}/a.pt", into=state)
        except CheckpointError as error:
            told.append(str(error))
    return told


@pytest.mark.slow
def test_shards_are_replaced_as_a_whole_and_loaded_on_any_number_of_ranks_and_never_if_a_part_is_damaged(tmp_path):
    path = tmp_path / "a.pt"
    (tmp_path / "a.pt.shards-0123456789abcdef").mkdir()  # of a dead writer
    (tmp_path / "a.pt.shards-kept").mkdir()  # of somebody else
    assert run_ranks(2, save_twice, str(tmp_path), backend="gloo") == [True, True]
    names = sorted(os.listdir(tmp_path))
    folder = names.pop(1)
    assert names == ["a.pt", "a.pt.shards-kept", "a.safetensors", "whole.pt"]
    assert sorted(os.listdir(tmp_path / folder)) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    found = paceline.load(path)  # on another number of ranks
    assert torch.equal(found["net"]["weight"], WEIGHT * 2)
    assert found["net"]["of"] == {0: (torch.ones(1), [2.5])}  # torch's folders have strings for keys
    assert found["net"]["empty"] == {}
    assert torch.equal(paceline.load(tmp_path / folder)["net"]["weight"], WEIGHT * 2)
    assert torch.equal(paceline.load(tmp_path / "a.safetensors")["weight"], WEIGHT * 2)
    for rank, told in enumerate(run_ranks(3, load_into, str(tmp_path), backend="gloo")):
        expected = ((WEIGHT * 2).tolist(), torch.Size([[2, 2, 1][rank], 2]), (WEIGHT * 2).tolist(), 6)
        assert told == [
            expected,
            expected,
            f"{path} does not fit: it has no other.",
            f"{path} does not fit: net.weight is a tensor of shape (4, 2) here, and there of shape (5, 2).",
            f"{path} does not fit: step is a tensor of shape (1,) here, and there a int.",
        ]
    (tmp_path / "link.pt").symlink_to(path)
    assert torch.equal(paceline.load(tmp_path / "link.pt")["net"]["weight"], WEIGHT * 2)
    part = tmp_path / folder / "__1_0.distcp"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(
        CheckpointDamagedError, match=r"a\.pt is damaged: its part .*/__1_0\.distcp is missing, or has an"
    ):
        paceline.load(path)


def test_a_state_that_contains_itself_is_looked_through_once():
    state = [1]
    state.append(state)
    assert not shards.is_sharded(state)


def test_what_is_loaded_into_is_a_dict(tmp_path):
    paceline.save({"weight": torch.ones(2), "step": 3}, tmp_path / "a.pt")
    model = nn.Linear(2, 1)
    with pytest.raises(
        CheckpointError, match=r"^into= is a Linear: expected a dict alone, such as model\.state_dict\(\)"
    ):
        paceline.load(tmp_path / "a.pt", into=model)
    with pytest.raises(CheckpointError, match=r"^into= came with model=: expected a dict alone, such as"):
        paceline.load(tmp_path / "a.pt", into={}, model=model)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    paceline.save({"optimizer": optimizer.state_dict()}, tmp_path / "b.pt")
    fresh = torch.optim.Adam(model.parameters())
    found = paceline.load(tmp_path / "b.pt", into={"optimizer": fresh.state_dict()})
    assert found["optimizer"]["state"][0]["exp_avg"].tolist() == optimizer.state[model.weight]["exp_avg"].tolist()
    own = {"weight": torch.zeros(2)}
    weight = own["weight"]
    assert paceline.load(tmp_path / "a.pt", into=own) is own
    assert own == {"weight": weight}
    assert weight.tolist() == [1.0, 1.0]


# -- runs ---------------------------------------------------------------------------------------------------------


def build(seed, is_sharded):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    if is_sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def values_of(model):
    return [getattr(param, "full_tensor", lambda p=param: p)().tolist() for param in model.parameters()]


def train(model, optimizer, first, on_step=lambda: None):
    """Two steps, on data that follow from the step."""
    for step in (first, first + 1):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        on_step()
    return values_of(model)


def train_and_save(world, folder, is_sharded):
    model, optimizer = build(0, is_sharded)
    with paceline.Checkpointer(folder, every=1, keep=1, model=model, optimizer=optimizer) as checkpoints:
        before = train(model, optimizer, 0, checkpoints.step)
        checkpoints.export(f"{folder}.safetensors")
    return sorted(os.listdir(folder)), before, train(model, optimizer, 2)


def resume(world, folder, is_sharded):
    model, optimizer = build(5, is_sharded)
    assert paceline.Checkpointer(folder, every=100, model=model, optimizer=optimizer).resume() == 2
    return values_of(model), train(model, optimizer, 2)


@pytest.mark.slow
def test_a_sharded_run_goes_on_bit_for_bit_sharded_or_whole_on_any_number_of_ranks(tmp_path):
    folder = str(tmp_path / "a")
    (kept, before, after), _ = run_ranks(2, train_and_save, folder, True, backend="gloo")
    assert [name.partition(".shards-")[0] for name in kept] == ["step-0000000002.pt"] * 2
    weights = paceline.load(f"{folder}.safetensors")
    assert [weights[name].tolist() for name in ("0.weight", "0.bias", "2.weight", "2.bias")] == before
    for world_size, is_sharded in ((2, True), (1, True), (1, False)):
        resumed = run_ranks(world_size, resume, folder, is_sharded, backend="gloo")
        assert resumed == [(before, after)] * world_size


@pytest.mark.slow
def test_a_run_that_was_whole_goes_on_sharded(tmp_path):
    folder = str(tmp_path / "a")
    ((kept, before, after),) = run_ranks(1, train_and_save, folder, False, backend="gloo")
    assert kept == ["step-0000000002.pt"]
    assert run_ranks(2, resume, folder, True, backend="gloo") == [(before, after)] * 2


# -- what goes wrong ----------------------------------------------------------------------------------------------


class Touch:
    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path("touched"),)


def test_no_code_of_a_folder_of_shards_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Touch()))
    with pytest.raises(
        CheckpointError, match=r"could not be read: UnpicklingError: it holds an object of pathlib\..*, wh"
    ):
        paceline.load(tmp_path)
    assert os.listdir(tmp_path) == [".metadata"]


class Odd:
    def __init__(self, weight):
        self.weight = weight

    def state_dict(self):
        return {"weight": self.weight, "path": pathlib.Path("a")}

    def load_state_dict(self, state):
        raise NotImplementedError


def fail(world, folder):
    """What the ranks say where a state would need trust, where they have no folder in common, and of a full disk."""
    path, state, listdir = f"{folder}/a.pt", {"net": {"weight": distributed(torch.ones(4096))}}, os.listdir
    checkpoints = paceline.Checkpointer(f"{folder}/run", every=1, async_=False, odd=Odd(state["net"]["weight"]))
    messages = []

    def save_where_rank_1_sees_nothing():
        if world.rank == 1:
            os.listdir = lambda folder: []
        try:
            paceline.save(state, path)
        finally:
            os.listdir = listdir

    def save_where_rank_1_has_no_room():
        if world.rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        paceline.save(state, path)

    def save_alone():
        paceline.save(state, path, alone=True)

    for work in (checkpoints.step, save_alone, save_where_rank_1_sees_nothing, save_where_rank_1_has_no_room):
        try:
            work()
        except CheckpointError as error:
            messages.append(str(error))
    return messages


@pytest.mark.slow
def test_what_goes_wrong_on_a_rank_is_told_on_all_and_leaves_nothing(tmp_path):
    path = tmp_path / "a.pt"
    for needs_trust, is_alone, nothing_in_common, is_full in run_ranks(2, fail, str(tmp_path)):
        assert needs_trust.startswith("a part's state holds objects of pathlib.")
        assert is_alone.startswith(f"{path}: the state is sharded, and alone=True would save this rank's part only.")
        assert nothing_in_common.startswith(f"{path}: rank 1 does not see the shards that rank 0 sees: ")
        assert nothing_in_common.endswith("Save sharded state to a file system that all hosts share.")
        assert is_full.startswith(f"{path}: the shards could not be written: rank 1: ")
    assert os.listdir(tmp_path) == ["run"]
    assert os.listdir(tmp_path / "run") == []
