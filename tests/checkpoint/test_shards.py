"""Sharded state: each rank writes its own part, and every rank gets the whole."""

import os
import pathlib
import pickle

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.errors import CheckpointDamagedError, CheckpointError
from support.ranks import expect_errors, run_ranks

WEIGHT = torch.arange(10.0).view(5, 2)


def sharded(factor):
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"net": {"weight": distribute_tensor(WEIGHT * factor, mesh, [Shard(0)])}, "step": 3 * factor}


def save_twice(world, path):
    for factor in (1, 2):
        paceline.save(sharded(factor), path)
    found = paceline.load(path)
    return torch.equal(found["net"]["weight"], WEIGHT * 2) and found["step"] == 6 and list(found) == ["net", "step"]


@pytest.mark.slow
def test_shards_are_replaced_as_a_whole_and_loaded_whole_also_by_torch_and_never_if_a_part_is_damaged(tmp_path):
    path = tmp_path / "a.pt"
    (tmp_path / "a.pt.shards-of-a-dead-writer").mkdir()
    assert run_ranks(2, save_twice, str(path), backend="gloo") == [True, True]
    folder, name = sorted(os.listdir(tmp_path), key=len, reverse=True)
    assert name == "a.pt"
    assert sorted(os.listdir(tmp_path / folder)) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert torch.equal(paceline.load(path)["net"]["weight"], WEIGHT * 2)  # on another number of ranks
    assert torch.equal(paceline.load(tmp_path / folder)["net"]["weight"], WEIGHT * 2)
    part = tmp_path / folder / "__1_0.distcp"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(
        CheckpointDamagedError, match=r"a\.pt is damaged: its part .*/__1_0\.distcp is missing, or has an"
    ):
        paceline.load(path)


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


def save_where_rank_1_cannot(world, path):
    if world.rank == 1:
        os.listdir = lambda folder: []
    paceline.save(sharded(1), path)


@pytest.mark.slow
def test_ranks_without_a_folder_in_common_are_told(tmp_path):
    messages = expect_errors(2, save_where_rank_1_cannot, str(tmp_path / "a.pt"))
    for message in messages:
        assert message.startswith(
            f"CheckpointError: {tmp_path}/a.pt: rank 1 does not see the shards that rank 0 sees: "
        )
        assert message.endswith("Save sharded state to a file system that all hosts share.")
    assert not (tmp_path / "a.pt").exists()
