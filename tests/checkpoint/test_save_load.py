"""What is saved comes back, in every format, on every rank; what is not good, or not safe, is an error that says so."""

import collections
import io
import os
import pathlib
import sys

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.checkpoint import format
from paceline.checkpoint.packing import pack
from paceline.checkpoint.snapshot import HostMemory
from paceline.errors import CheckpointDamagedError, CheckpointError, CheckpointMissingError
from support.ranks import expect_errors, run_ranks


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


def some_state():
    torch.manual_seed(7)
    weight = torch.randn(300, 5)
    return {
        "weight": weight,
        "tied": weight,
        "row": weight[7],
        "bits": torch.tensor([True, False]),
        "half": torch.randn(3).bfloat16(),
        "nothing": torch.empty(0, 4),
        "number": torch.tensor(3),
        "step": 12,
        "nested": [(1.5, None), {"a": "b"}],
    }


# -- one process --------------------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded_and_tensors_that_shared_memory_share_it(tmp_path):
    paceline.save(some_state(), tmp_path / "a.pt")
    found = paceline.load(tmp_path / "a.pt")
    assert same(found, some_state())
    found["tied"][7, 0] = 100.0
    assert found["weight"][7, 0] == 100.0
    assert found["row"][0] == 100.0
    assert os.listdir(tmp_path) == ["a.pt"]


def test_torch_load_reads_what_is_saved_and_load_reads_what_torch_save_wrote(tmp_path):
    paceline.save(some_state(), tmp_path / "ours.pt")
    torch.save(some_state(), tmp_path / "torchs.pt")
    torch.save(some_state(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert same(torch.load(tmp_path / "ours.pt"), some_state())
    assert same(paceline.load(tmp_path / "torchs.pt"), some_state())
    assert same(paceline.load(tmp_path / "old.pt"), some_state())


def test_safetensors_are_written_and_read_and_tied_weights_stay_tied(tmp_path):
    state = {"a": torch.arange(6.0).view(2, 3), "t": torch.arange(6.0).view(2, 3).t(), "empty": torch.empty(0)}
    state |= {"tied": state["a"], "row": state["a"][1]}
    paceline.save(state, tmp_path / "a.safetensors")
    theirs = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert set(theirs) == {"a", "t", "empty", "row"}
    found = paceline.load(tmp_path / "a.safetensors")
    assert set(found) == set(state)
    assert all(same(found[name], state[name]) for name in state)
    assert found["tied"] is found["a"]
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_safetensors_hold_tensors_by_name_and_nothing_else(tmp_path):
    expected = (
        r"^a file of safetensors holds a dict of dense tensors by name, and this is {}\. Give it model\.state_dict\(\)"
    )
    with pytest.raises(CheckpointError, match=expected.format("a dict in which 'step' is a int")):
        paceline.save({"a": torch.ones(1), "step": 3}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=expected.format("a list")):
        paceline.save([torch.ones(1)], tmp_path / "a.safetensors")
    sparse = "a dict in which 'a' is a Tensor of torch.float32, torch.sparse_coo, on cpu"
    with pytest.raises(CheckpointError, match=expected.format(sparse)):
        paceline.save({"a": torch.eye(2).to_sparse()}, tmp_path / "a.safetensors")
    assert os.listdir(tmp_path) == []


def test_the_format_of_safetensors_has_every_dtype_of_the_library_and_names_like_its_own(tmp_path):
    state = {
        "format": torch.ones(2, dtype=torch.bfloat16),
        "pt": torch.ones(3, dtype=torch.complex64).conj().imag,
        "bits": torch.tensor(True),
        "narrow": torch.ones(1).to(torch.float8_e4m3fn),
        "wide": torch.ones(1, dtype=torch.uint64),
    }
    paceline.save(state, tmp_path / "a.safetensors")
    theirs = safetensors.torch.load_file(tmp_path / "a.safetensors")
    ours = paceline.load(tmp_path / "a.safetensors")
    for found in (theirs, ours):
        assert set(found) == set(state)
        for name, tensor in state.items():
            assert found[name].dtype == tensor.dtype
            assert found[name].tolist() == tensor.tolist()


def test_a_file_of_safetensors_is_durable_and_a_change_of_any_byte_of_its_tensors_is_found(tmp_path, monkeypatch):
    path, synced = tmp_path / "a.safetensors", []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append((os.fstat(fd).st_ino, os.fstat(fd).st_size)) or real(fd))
    paceline.save({"a": torch.arange(4.0)}, path)
    good = path.read_bytes()
    assert synced[0] == (path.stat().st_ino, len(good))
    for place in range(len(good) - 16, len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(CheckpointDamagedError, match=r"a\.safetensors is damaged: its sha256 should be"):
            paceline.load(path)
    safetensors.torch.save_file({"a": torch.arange(4.0)}, path)  # which knows no checksum
    assert paceline.load(path)["a"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_without_the_package_of_safetensors_the_error_says_what_to_install(tmp_path, monkeypatch):
    paceline.save({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(CheckpointError, match=r"pip install 'paceline\[safetensors\]'\.$"):
        paceline.load(tmp_path / "a.safetensors")


KINDS = {
    "not contiguous": torch.arange(6.0).view(2, 3).t(),
    "expanded": torch.ones(1).expand(5),
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "sparse": torch.eye(3).to_sparse(),
    "float8": torch.ones(2).to(torch.float8_e4m3fn),
    "uint64": torch.ones(2, dtype=torch.uint64),
    "no data": torch.empty(3, device="meta"),
    "parameter": nn.Parameter(torch.ones(2)),
    "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
}


@pytest.mark.parametrize("tensor", KINDS.values(), ids=KINDS)
def test_tensors_of_every_kind_come_back_from_files_from_snapshots_and_from_other_ranks(tmp_path, tensor):
    paceline.save({"a": tensor}, tmp_path / "a.pt")
    for found in (paceline.load(tmp_path / "a.pt")["a"], HostMemory().take(tensor).unpack(), pack(tensor).unpack()):
        assert type(found) is type(tensor)
        assert (found.dtype, found.shape, found.layout) == (tensor.dtype, tensor.shape, tensor.layout)
        assert (found.device, found.requires_grad) == (tensor.device, tensor.requires_grad)
        if tensor.layout == torch.strided:
            assert found.stride() == tensor.stride()
        if not tensor.is_meta:
            assert found.to_dense().tolist() == tensor.to_dense().tolist() if tensor.is_sparse else True
            assert tensor.is_sparse or found.tolist() == tensor.tolist()


def test_what_is_no_file_is_not_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match=r"folder could not be written: a folder has that name\. What was there"):
        paceline.save(1, tmp_path / "folder")
    with pytest.raises(CheckpointError, match=r"pipe could not be written: no file, but a device or a pipe, has that"):
        paceline.save(1, tmp_path / "pipe")
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]
    assert (tmp_path / "pipe").is_fifo()


def test_paths_may_be_bytes_relative_and_of_any_letters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (b"a.pt", "b.pt", pathlib.Path("ä 日.pt")):
        paceline.save(3, path)
        assert paceline.load(path) == 3
    assert sorted(os.listdir()) == ["a.pt", "b.pt", "ä 日.pt"]


def test_a_good_file_that_cannot_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("can't allocate memory")

    paceline.save(3, tmp_path / "a.pt")
    monkeypatch.setattr(torch, "load", refuse)
    with pytest.raises(
        CheckpointError, match=r"a\.pt is as it was written, but could not be read: RuntimeError: can't allocate memory"
    ) as caught:
        paceline.load(tmp_path / "a.pt")
    assert not isinstance(caught.value, CheckpointDamagedError)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CheckpointMissingError, match=r"none\.pt: there is no such file\. None of this kind is besi"):
        paceline.load(tmp_path / "none.pt")
    (tmp_path / "a.pt").touch()  # not looked into: it may be large
    with pytest.raises(FileNotFoundError, match=r"The newest file of this kind beside it is .*/a\.pt\.$"):
        paceline.load(tmp_path / "none.pt")


def test_map_location_is_a_device(tmp_path):
    paceline.save(some_state(), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"^map_location=\{\}: expected a device, such as 'cpu' or 'cuda:0'\."):
        paceline.load(tmp_path / "a.pt", {})
    on_meta = paceline.load(tmp_path / "a.pt", "meta")
    assert {value.device.type for value in on_meta.values() if isinstance(value, torch.Tensor)} == {"meta"}


def test_an_object_that_cannot_be_pickled_leaves_what_was_there(tmp_path):
    paceline.save(1, tmp_path / "a.pt")
    with pytest.raises((AttributeError, TypeError), match=r"lambda|local"):
        paceline.save(lambda: None, tmp_path / "a.pt")
    assert paceline.load(tmp_path / "a.pt") == 1
    assert os.listdir(tmp_path) == ["a.pt"]


# -- code in files ------------------------------------------------------------------------------------------------


class Touch:
    """Unpickled, it leaves a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path(self.path),)


@pytest.mark.parametrize("write", [paceline.save, torch.save])
def test_no_code_of_a_file_is_run_unless_the_caller_says_so(tmp_path, write):
    write({"state": Touch(tmp_path / "touched")}, tmp_path / "a.pt")
    with pytest.raises(
        CheckpointError, match=r"a\.pt holds objects of .*If you trust it, say paceline\.load\(path, we"
    ):
        paceline.load(tmp_path / "a.pt")
    assert not (tmp_path / "touched").exists()
    paceline.load(tmp_path / "a.pt", weights_only=False)
    assert (tmp_path / "touched").exists()


def test_code_in_an_old_file_of_torch_save_is_not_called_damage(tmp_path):
    torch.save({"state": Touch(tmp_path / "touched")}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(
        CheckpointError, match=r"a\.pt holds objects of classes that this old format of torch\.save does"
    ):
        paceline.load(tmp_path / "a.pt")
    assert not (tmp_path / "touched").exists()


# -- damage -------------------------------------------------------------------------------------------------------


def test_a_change_of_any_byte_and_a_cut_at_any_byte_are_found(tmp_path):
    path = tmp_path / "a.pt"
    paceline.save({"a": torch.arange(4.0)}, path)
    good = path.read_bytes()
    for place in range(len(good)):
        for bad in (good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :], good[:place]):
            assert format.find_damage(io.BytesIO(bad))
    assert not format.find_damage(io.BytesIO(good))


def test_a_damaged_file_is_an_error_that_names_the_newest_good_one(tmp_path):
    for number, name in enumerate(["old.pt", "new.pt", "newest.pt", "a.pt"]):
        paceline.save(number, tmp_path / name)
        os.utime(tmp_path / name, (number, number))
    for name in ("newest.pt", "a.pt"):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content.replace(b"PK", b"QK", 1))
    with pytest.raises(
        CheckpointDamagedError,
        match=r"a\.pt is damaged: its sha256 should be \w{16}\.\.\., and is \w{16}\.{4} The newest good .*/new\.pt\.$",
    ):
        paceline.load(tmp_path / "a.pt")


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"\x80\x02}q", b"\x09" + 7 * b"\0" + b"{no json}"])
def test_what_is_no_checkpoint_is_a_damaged_file(tmp_path, content):
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match=r"a\.pt is damaged: .* There is no good file of this kind beside"):
        paceline.load(tmp_path / "a.pt")


def test_a_torch_save_that_was_cut_short_is_found(tmp_path):
    torch.save(some_state(), tmp_path / "a.pt")
    content = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(content[:-10])
    with pytest.raises(
        CheckpointDamagedError, match=rf"it has {len(content) - 10} bytes, and they end before the arch"
    ):
        paceline.load(tmp_path / "a.pt")


# -- names --------------------------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def test_module_prefixes_come_and_go_with_the_model_that_is_named(tmp_path):
    bare = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    wrapped = Wrapper(bare)
    inner = nn.Sequential(Wrapper(bare[0]), bare[1])
    for saved in (bare, wrapped, inner):
        state = {"net": saved.state_dict(), "optimizer": {"state": {0: torch.ones(1)}, "other": torch.ones(2)}}
        paceline.save(state, tmp_path / "a.pt")
        assert list(paceline.load(tmp_path / "a.pt")["net"]) == list(saved.state_dict())
        for model in (bare, wrapped, inner):
            found = paceline.load(tmp_path / "a.pt", model=model)
            assert model.load_state_dict(found["net"]).missing_keys == []
            assert list(found["net"]._metadata) == list(model.state_dict()._metadata) or saved is not model
            assert same(found["optimizer"], state["optimizer"])


def test_names_that_the_model_does_not_have_stay(tmp_path):
    paceline.save(
        collections.OrderedDict({"module.0.weight": torch.ones(2, 2), "module.9": torch.ones(1)}), tmp_path / "a"
    )
    found = paceline.load(tmp_path / "a", model=nn.Sequential(nn.Linear(2, 2)))
    assert list(found) == ["0.weight", "module.9"]


# -- several ranks ------------------------------------------------------------------------------------------------


def save_and_load(world, folder):
    state = some_state() if world.rank == 0 else None
    paceline.save(state, f"{folder}/a.pt")
    if world.rank == 1:  # it needs no disk in common
        os.chdir("/")
        os.environ["HOME"] = "/nowhere"
    outcomes = [same(paceline.load(f"{folder}/a.pt"), some_state())]
    paceline.save({"rank": world.rank}, f"{folder}/own-{world.rank}.pt", alone=True)
    outcomes.append(paceline.load(f"{folder}/own-{world.rank}.pt", alone=True))
    world.barrier()
    outcomes.append(paceline.load(f"{folder}/own-1.pt"))
    return outcomes


def refusals(world, folder):
    messages = []
    for call in (
        lambda: paceline.save(1, f"{folder}/none/a.pt"),
        lambda: paceline.load(f"{folder}/none.pt"),
        lambda: paceline.save(lambda: None, f"{folder}/a.pt"),
        lambda: paceline.save(1, f"{folder}/a.pt", alone=True, group=dist.group.WORLD),
    ):
        try:
            call()
        except Exception as error:
            messages.append((type(error).__name__, str(error).splitlines()[0]))
    return messages


@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_one_rank_writes_and_reads_for_all_and_each_for_itself_where_asked(tmp_path, backend):
    for rank, outcome in enumerate(run_ranks(2, save_and_load, str(tmp_path), backend=backend)):
        assert outcome == [True, {"rank": rank}, {"rank": 1}]


def test_all_ranks_hear_of_what_went_wrong_on_the_one_that_works(tmp_path):
    first, second = run_ranks(2, refusals, str(tmp_path))
    missing = f"{tmp_path}/none.pt: there is no such file. None of this kind is beside it."
    disk = f"{tmp_path}/none/a.pt could not be written: No such file or directory. What was there before is unchanged."
    assert first[:2] == second[:2] == [("CheckpointError", disk), ("CheckpointMissingError", missing)]
    assert first[2][0] in ("AttributeError", "PicklingError")
    assert second[2] == ("CheckpointError", "the first rank failed:")
    alone = "alone=True came with a group: this rank acts by itself, or with a group's. Give one."
    assert first[3] == second[3] == ("CheckpointError", alone)


def with_a_group_of_others(world, folder):
    group = dist.new_group([1])
    if world.rank == 1:
        paceline.save(5, f"{folder}/a.pt", group=group)
        assert paceline.load(f"{folder}/a.pt", group=group) == 5
        raise AssertionError("as expected on rank 1")
    paceline.load(f"{folder}/a.pt", group=group)


def test_a_group_saves_by_itself_and_others_are_told_that_they_are_not_in_it(tmp_path):
    first, second = expect_errors(2, with_a_group_of_others, str(tmp_path))
    assert first == (
        "CheckpointError: rank 0 is not in the group that it was to save or load with; call on members only."
    )
    assert second == "AssertionError: as expected on rank 1"
