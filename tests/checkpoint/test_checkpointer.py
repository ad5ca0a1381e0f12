"""A run that goes on from a checkpoint is the run that was never interrupted."""

import logging
import os
import pathlib
import random
import signal
import threading

import numpy as np
import pytest
import torch
import torch._dynamo  # the first optimizer imports it: once here, rather than in each rank
from torch import nn

import paceline
from paceline import amp
from paceline.checkpoint import files, retention
from paceline.checkpoint.snapshot import HostMemory
from paceline.checkpoint.writer import Writer
from paceline.errors import CheckpointDamagedError, CheckpointError
from support.ranks import RankError, expect_errors, run_ranks

NAN = float("nan")


class Number:
    """The smallest thing that has a state."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def steps_in(folder):
    return sorted(retention.steps_among(os.listdir(folder)))


# -- what stays ---------------------------------------------------------------------------------------------------


def test_the_last_ones_and_the_best_stay():
    assert retention.surplus([1, 2, 3, 4], keep=2, best=None) == [2, 1]
    assert retention.surplus([4, 1, 3, 2], keep=2, best=1) == [2]
    assert retention.surplus([1], keep=2, best=None) == []
    names = [retention.name_of(5), retention.name_of(12_345_678_901), "step-5.pt", "step-0000000007.pt.damaged"]
    assert retention.steps_among(names) == [12_345_678_901, 5]


@pytest.mark.parametrize(("best", "metrics", "kept"), [("max", [NAN, 9, 3, NAN, 5], 2), ("min", [3, 4, 1, 2, NAN], 3)])
def test_a_run_keeps_the_last_ones_and_the_best_also_after_it_was_resumed(tmp_path, best, metrics, kept):
    for part in (metrics[:3], metrics[3:]):
        with paceline.Checkpointer(tmp_path, every=1, keep=1, best=best, number=Number()) as checkpoints:
            checkpoints.resume()
            for metric in part:
                assert not checkpoints.step(metric)
    assert steps_in(tmp_path) == [kept, 5]
    assert checkpoints.best == f"{tmp_path}/step-000000000{kept}.pt"


# -- resuming -----------------------------------------------------------------------------------------------------


def test_a_run_goes_on_from_the_newest_good_checkpoint_and_puts_damaged_ones_aside(tmp_path, caplog):
    number = Number()
    with paceline.Checkpointer(tmp_path, every=2, number=number) as checkpoints:
        assert checkpoints.resume() == 0
        for number.value in range(10, 17):
            checkpoints.step()
    assert steps_in(tmp_path) == [2, 4, 6]
    newest = tmp_path / "step-0000000006.pt"
    newest.write_bytes(newest.read_bytes()[:-1])
    resumed = paceline.Checkpointer(tmp_path, every=2, number=number)
    with caplog.at_level(logging.WARNING, "paceline.checkpoint"):
        assert resumed.resume() == resumed.num_steps == 4
    assert number.value == 13
    assert "step-0000000006.pt is damaged" in caplog.text
    assert sorted(os.listdir(tmp_path))[2] == "step-0000000006.pt.damaged"


def test_what_a_run_that_was_killed_had_begun_to_write_is_removed(tmp_path):
    (tmp_path / ".step-0000000006.pt.0123456789abcdef.draft").touch()
    paceline.Checkpointer(tmp_path, every=1, number=Number())
    assert os.listdir(tmp_path) == []


def test_a_good_checkpoint_that_cannot_be_read_stays_what_it_is(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("can't allocate memory")

    with paceline.Checkpointer(tmp_path, every=1, number=Number()) as checkpoints:
        checkpoints.step()
    monkeypatch.setattr(torch, "load", refuse)
    with pytest.raises(CheckpointError, match=r"is as it was written, but could not be read: RuntimeError: can't"):
        checkpoints.resume()
    assert os.listdir(tmp_path) == ["step-0000000001.pt"]


def test_a_run_that_would_lose_its_checkpoints_to_those_of_another_is_told(tmp_path):
    with paceline.Checkpointer(tmp_path, every=1, keep=2, number=Number()) as checkpoints:
        for _ in range(3):
            checkpoints.step()
    anew = paceline.Checkpointer(tmp_path, every=1, keep=2, async_=False, number=Number())
    with pytest.raises(
        CheckpointError, match=r"^step 1 cannot be saved in .*, which has a checkpoint of step 3, of another run or of"
    ):
        anew.step()
    assert steps_in(tmp_path) == [2, 3]
    anew.resume()
    anew.step()
    assert steps_in(tmp_path) == [3, 4]


def test_the_folder_is_the_same_wherever_the_script_goes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with paceline.Checkpointer("runs", every=1, number=Number()) as checkpoints:
        monkeypatch.chdir("/")
        checkpoints.step()
    assert steps_in(tmp_path / "runs") == [1]


def test_where_none_is_good_the_run_does_not_start_anew_unasked(tmp_path):
    (tmp_path / retention.name_of(3)).write_bytes(b"PK")
    checkpoints = paceline.Checkpointer(tmp_path, every=1, number=Number())
    with pytest.raises(
        CheckpointDamagedError, match=r"^none of the 1 checkpoints in .* is good; they are renamed to \*"
    ):
        checkpoints.resume()
    assert checkpoints.resume() == 0


def test_all_random_generators_go_on(tmp_path):
    def draw():
        return [random.random(), np.random.rand(), torch.rand(1).item(), random.gauss(0, 1), np.random.randn()]

    draw()
    with paceline.Checkpointer(tmp_path, every=1, number=Number()) as checkpoints:
        checkpoints.step()
    expected = draw()
    draw()
    paceline.Checkpointer(tmp_path, every=1, number=Number()).resume()
    assert draw() == expected


def test_a_wrapped_model_is_saved_under_plain_names_and_exported(tmp_path):
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    wrapped = nn.DataParallel(net)
    with paceline.Checkpointer(tmp_path / "a", every=1, model=wrapped) as checkpoints:
        checkpoints.step()
        checkpoints.export(tmp_path / "weights.safetensors")
    assert list(paceline.load(tmp_path / "weights.safetensors")) == sorted(net.state_dict())
    found = torch.load(tmp_path / "a" / "step-0000000001.pt")["parts"]["model"]
    assert list(found) == list(net.state_dict())
    assert found._metadata == net.state_dict()._metadata
    for model in (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.DataParallel(net)):
        paceline.Checkpointer(tmp_path / "a", every=1, model=model).resume()
        assert all(map(torch.equal, model.state_dict().values(), net.state_dict().values()))


class Holder(nn.Module):
    """A model with a part that is called as wrappers call what they wrap."""

    def __init__(self):
        super().__init__()
        self.module = nn.DataParallel(nn.Linear(2, 1))


def test_only_what_wrappers_add_is_taken_out_of_names(tmp_path):
    with paceline.Checkpointer(tmp_path / "a", every=1, model=nn.DataParallel(Holder())) as checkpoints:
        checkpoints.step()
        checkpoints.export(tmp_path / "weights.safetensors")
    assert sorted(paceline.load(tmp_path / "weights.safetensors")) == ["module.bias", "module.weight"]
    model = Holder()
    paceline.Checkpointer(tmp_path / "a", every=1, model=model).resume()
    assert sorted(model.state_dict()) == ["module.module.bias", "module.module.weight"]


def test_a_part_that_the_checkpoint_lacks_is_named(tmp_path):
    with paceline.Checkpointer(tmp_path, every=1, a=Number(), b=Number()) as checkpoints:
        checkpoints.step()
    checkpoints = paceline.Checkpointer(tmp_path, every=1, a=Number(), c=Number())
    with pytest.raises(
        CheckpointError, match=r"^the checkpoint of step 1 in .* has no c; it has a, b\. Name the parts"
    ):
        checkpoints.resume()
    with pytest.raises(CheckpointError, match=r"^there is no part 'model' to export; there are a, c\.$"):
        checkpoints.export(tmp_path / "a.pt")


def test_a_part_that_the_run_lacks_is_logged_and_one_that_does_not_fit_is_named(tmp_path, caplog):
    with paceline.Checkpointer(tmp_path, every=1, a=Number(), model=nn.Linear(1, 1)) as checkpoints:
        checkpoints.step()
    with pytest.raises(RuntimeError, match="size mismatch for weight") as caught:
        paceline.Checkpointer(tmp_path, every=1, model=nn.Linear(2, 1)).resume()
    where = f"the checkpoint of step 1 in {tmp_path}"
    assert [record.getMessage() for record in caplog.records] == [f"{where} has a too, which this run does not load."]
    assert caught.value.__notes__ == [f"This came up while the part 'model' was loaded: {where}."]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0, "a": Number()}, r"^every=0 and keep=3: expected 1 or more of each\.$"),
        ({"every": 1, "best": "most", "a": Number()}, r"^best='most': expected 'max' or 'min', as the metric is to be"),
        ({"every": 1, "a": 3}, r"^a part needs state_dict\(\) and load_state_dict\(\), and a is a int\.$"),
        ({"every": 1}, r"^a part needs state_dict\(\) and load_state_dict\(\), and there is none\.$"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(tmp_path, arguments, message):
    with pytest.raises(CheckpointError, match=message):
        paceline.Checkpointer(tmp_path, **arguments)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        CheckpointError, match=r"^the folder .*/file/a for checkpoints could not be made: .*Not a direct"
    ):
        paceline.Checkpointer(tmp_path / "file" / "a", every=1, number=Number())


def test_a_state_that_could_not_be_loaded_without_trust_is_refused_when_it_is_saved(tmp_path):
    checkpoints = paceline.Checkpointer(tmp_path, every=1, async_=False, number=Number(pathlib.Path("a")))
    with pytest.raises(CheckpointError, match=r"^a part's state holds objects of pathlib.*, which would not be loaded"):
        checkpoints.step()
    assert os.listdir(tmp_path) == []
    for _ in range(2):
        number = Number(pathlib.Path("a"))
        with paceline.Checkpointer(tmp_path, every=1, weights_only=False, number=number) as checkpoints:
            checkpoints.resume()
            checkpoints.step()
    assert steps_in(tmp_path) == [1, 2]


# -- beside training ----------------------------------------------------------------------------------------------


def test_a_snapshot_does_not_change_with_what_it_is_of_and_its_memory_is_used_again():
    weight = torch.ones(1000)
    memory, state = HostMemory(), {"weight": weight, "tied": weight, "numbers": [1]}
    first = memory.take(state)
    weight.fill_(2)
    state["numbers"].append(2)
    found = first.unpack()
    assert torch.equal(found["weight"], torch.ones(1000))
    assert found["tied"].data_ptr() == found["weight"].data_ptr()
    assert found["numbers"] == [1]
    second = memory.take(state)
    assert second.unpack()["weight"].data_ptr() == found["weight"].data_ptr()
    assert torch.equal(second.unpack()["weight"], torch.full((1000,), 2.0))
    assert memory.take({"weight": torch.zeros(5)}).unpack()["weight"].tolist() == [0.0] * 5


@pytest.fixture
def gate(monkeypatch):
    """Lets writing begin only when it is set."""
    opened = threading.Event()
    real = files.write

    def write(obj, path):
        assert opened.wait(60)
        real(obj, path)

    monkeypatch.setattr(files, "write", write)
    return opened


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits(tmp_path, gate):
    number = Number()
    with paceline.Checkpointer(tmp_path, every=3, number=number) as checkpoints:
        for number.value in range(1, 6):
            checkpoints.step()
        assert steps_in(tmp_path) == []
        threading.Timer(0.05, gate.set).start()
        checkpoints.step()  # due again: only one is under way at any time
        assert 3 in steps_in(tmp_path)
    assert torch.load(tmp_path / retention.name_of(3))["parts"]["number"] == {"value": 3}
    assert steps_in(tmp_path) == [3, 6]


def test_without_async_a_step_returns_when_all_is_written(tmp_path):
    checkpoints = paceline.Checkpointer(tmp_path, every=1, async_=False, number=Number())
    checkpoints.step()
    assert steps_in(tmp_path) == [1]


def await_the_writer():
    for thread in threading.enumerate():
        if thread.name == "paceline checkpoint":
            thread.join(60)


def test_a_failure_of_the_writer_is_logged_and_raised_at_the_next_step_once(tmp_path, caplog):
    checkpoints = paceline.Checkpointer(tmp_path / "a", every=100, number=Number())
    os.rmdir(tmp_path / "a")
    checkpoints.save()
    await_the_writer()
    assert "step-0000000000.pt could not be written: No such file" in caplog.text  # there may be no next step
    with pytest.raises(CheckpointError, match=r"step-0000000000\.pt could not be written: No such file"):
        checkpoints.step()
    assert checkpoints.num_steps == 1
    checkpoints.step()
    checkpoints.wait()


def fail_twice(folder):
    with paceline.Checkpointer(folder, every=1, number=Number()) as checkpoints:
        os.rmdir(folder)
        checkpoints.save()
        raise ZeroDivisionError


def test_a_failure_while_an_error_is_under_way_is_logged(tmp_path, caplog):
    with pytest.raises(ZeroDivisionError):
        fail_twice(tmp_path / "a")
    assert f"a checkpoint in {tmp_path}/a could not be written" in caplog.text


def test_a_writer_keeps_a_failure_until_somebody_asks():
    writer = Writer()
    writer.check()
    writer.start(lambda: [].pop())
    with pytest.raises(IndexError):
        writer.wait()
    writer.wait()


def test_what_is_written_is_waited_for_after_an_interrupt_too_and_not_in_a_forked_child():
    writer, may_end, done = Writer(), threading.Event(), []
    writer.start(lambda: may_end.wait(60) and done.append(True))
    interrupt = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        writer.wait()
    interrupt.join()
    writer.check()
    assert not done
    pid = os.fork()
    if pid == 0:  # where there is no thread
        try:
            writer.wait()
            os._exit(3)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    may_end.set()
    writer.wait()
    assert done == [True]


class Broken(Number):
    def state_dict(self):
        raise ZeroDivisionError("on one rank")


def save_with_a_broken_part(world, folder):
    part = Broken() if world.rank == 0 else Number()
    paceline.Checkpointer(folder, every=1, part=part).step()


def test_all_ranks_hear_of_a_part_that_has_no_state_now(tmp_path):
    first, second = expect_errors(2, save_with_a_broken_part, str(tmp_path))
    assert first == "ZeroDivisionError: on one rank"
    assert second.startswith("CheckpointError: rank 0 failed:\nTraceback")
    assert second.endswith("ZeroDivisionError: on one rank\n")


# -- several ranks ------------------------------------------------------------------------------------------------


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((4,), index / 32), index


def train(world, folder, die_at=None, precision=None):
    """Three epochs with dropout; ranks may die within a step. What this one has seen, and what it has become."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    parts = {}
    if precision:
        net, optimizer = amp.initialize(net, optimizer, opt_level=precision, verbosity=0)
        parts = {"amp": amp}
    model = paceline.DistributedDataParallel(net)
    torch.manual_seed(100 + world.rank)
    loader = paceline.DataLoader(Samples(), batch_size=2, shuffle=True, seed=1)
    seen = []
    with paceline.Checkpointer(
        folder, every=3, keep=2, model=model, optimizer=optimizer, loader=loader, **parts
    ) as checkpoints:
        first = checkpoints.resume()
        while checkpoints.num_steps < 20:
            for x, index in loader:
                seen.extend(index.tolist())
                optimizer.zero_grad()
                loss = model(x).float().square().mean()
                if precision:
                    with amp.scale_loss(loss, optimizer) as scaled:
                        scaled.backward()
                else:
                    loss.backward()
                optimizer.step()
                if checkpoints.num_steps + 1 == die_at:
                    if first == 0 and world.rank == 0:  # later runs may die while they write
                        checkpoints._writer.wait()
                    os.kill(os.getpid(), signal.SIGKILL)
                checkpoints.step()
                if checkpoints.num_steps == 20:
                    break
    return first, seen, [p.tolist() for p in net.parameters()], torch.rand(1).item()


@pytest.mark.slow
@pytest.mark.parametrize("precision", [None, "O2"])
def test_a_run_of_two_ranks_that_is_killed_at_random_steps_ends_as_one_that_was_not_bit_for_bit(tmp_path, precision):
    whole = run_ranks(2, train, str(tmp_path / "whole"), None, precision)
    draw = random.Random(precision)
    folder, at = str(tmp_path / "killed"), 0
    while (at := at + draw.randint(4, 8)) < 20:
        with pytest.raises(RankError, match=r"died with exit code -9"):
            run_ranks(2, train, folder, at, precision)
    resumed = run_ranks(2, train, folder, None, precision)
    for one, other in zip(whole, resumed, strict=True):
        first, seen, parameters, number = other
        assert first > 0
        assert seen == one[1][2 * first :]
        assert (parameters, number) == (one[2], one[3])


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks_and_no_sample_is_lost_or_comes_twice(tmp_path):
    with pytest.raises(RankError, match="died with exit code -9"):
        run_ranks(2, train, str(tmp_path), 5)
    first, seen, _, _ = run_ranks(1, train, str(tmp_path))[0]
    assert first == 3
    order = paceline.DistributedSampler(Samples(), 1, 0, seed=1).indices().tolist()
    assert sorted(seen[:20]) == sorted(order[12:])


def train_until_told(world, folder):
    number = Number()
    with paceline.Checkpointer(folder, every=100, number=number) as checkpoints:
        for number.value in range(1, 10**6):
            if world.rank == 1 and number.value == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            if checkpoints.step():
                break
        told = checkpoints.num_steps
        for _ in range(100):  # who goes on all the same is told again, and saved as ever
            assert checkpoints.step()
    return told


def test_when_the_job_is_told_to_end_all_ranks_stop_at_one_step_and_it_is_saved(tmp_path):
    first, second = run_ranks(2, train_until_told, str(tmp_path))
    assert first == second >= 5
    assert steps_in(tmp_path)[-2:] == sorted({first, (first + 100) // 100 * 100})
    assert torch.load(tmp_path / retention.name_of(first))["parts"]["number"] == {"value": first}


def fail_to_write(world, folder):
    checkpoints = paceline.Checkpointer(folder, every=1, async_=False, number=Number())
    world.barrier()
    if world.rank == 0:
        os.rmdir(folder)
    try:
        checkpoints.step()
    except CheckpointError as error:
        return str(error)


def test_all_ranks_hear_of_a_checkpoint_that_could_not_be_written(tmp_path):
    first, second = run_ranks(2, fail_to_write, str(tmp_path / "a"))
    assert first == second
    assert "step-0000000001.pt could not be written: No such file or directory" in first
