"""Whatever interrupts a writer, the file is the one before or the new one, whole."""

import errno
import functools
import multiprocessing
import os
import random
import resource
import signal
import time

import pytest
import torch

import paceline
from paceline.checkpoint import atomic
from paceline.errors import CheckpointError


def state(number):
    return {"weight": torch.full((16,), float(number))}


class Crash:
    """A process that dies once it has written ``place`` bytes, or at one of the calls that follow.

    From then on no call of it has an effect, which for the file is what a kill is.
    """

    def __init__(self, monkeypatch, place):
        self.left = place
        self.is_dead = False
        for name in ("write", "fsync", "replace", "unlink"):
            monkeypatch.setattr(os, name, functools.partial(getattr(self, name, self.step), getattr(os, name)))

    def write(self, real, fd, data):
        if not self.is_dead:
            self.is_dead = self.left <= len(data)
            real(fd, data[: self.left])
            self.left -= len(data)
        return len(data)

    def unlink(self, real, path):
        if not self.is_dead:
            real(path)

    def step(self, real, *args):
        self.left -= 1
        self.is_dead = self.is_dead or self.left <= 0
        if not self.is_dead:
            real(*args)


def test_a_thousand_crashes_at_random_bytes_and_steps_leave_a_whole_file(tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    paceline.save(state(0), path)
    size = path.stat().st_size
    draw = random.Random(0)
    places = [draw.randint(0, size) for _ in range(992)] + [size + step for step in range(1, 5)] * 2
    current = 0
    for number, place in enumerate(places, 1):
        with monkeypatch.context() as patches:
            crash = Crash(patches, place)
            paceline.save(state(number), path)
        is_replaced = place > size + 2  # after the draft's fsync, and the renaming itself
        assert crash.is_dead == (place < size + 4)
        current = number if is_replaced else current
        assert torch.equal(paceline.load(path)["weight"], state(current)["weight"])
        assert len(os.listdir(tmp_path)) == (1 if is_replaced else 2)  # the draft of the last one who died, at most
    assert current == 1000
    assert os.listdir(tmp_path) == ["a.pt"]


def save_for_ever(path, begun):
    while True:
        for number in (1, 2):
            paceline.save({"weight": torch.full((100_000,), float(number))}, path)
            begun.set()


def test_writers_that_are_killed_leave_a_whole_file(tmp_path):
    path = tmp_path / "a.pt"
    context = multiprocessing.get_context("fork")
    draw = random.Random(0)
    for _ in range(8):
        begun = context.Event()
        writer = context.Process(target=save_for_ever, args=(path, begun))
        writer.start()
        assert begun.wait(60)
        time.sleep(draw.uniform(0, 0.02))
        writer.kill()
        writer.join()
        assert set(paceline.load(path)["weight"].tolist()) in ({1.0}, {2.0})
        assert len(os.listdir(tmp_path)) <= 2
    paceline.save(1, path)
    assert os.listdir(tmp_path) == ["a.pt"]


def in_a_child(work, *args):
    """The exit status of a forked process that does ``work``."""
    pid = os.fork()
    if pid == 0:
        try:
            work(*args)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_what_is_written_is_durable_before_it_has_the_name_and_the_name_before_save_returns(tmp_path, monkeypatch):
    calls = []
    for name in ("write", "fsync", "replace"):
        real = getattr(os, name)

        def noted(*args, name=name, real=real):
            is_folder = name == "fsync" and os.path.isdir(f"/proc/self/fd/{args[0]}")
            calls.append(f"{name} folder" if is_folder else name)
            return real(*args)

        monkeypatch.setattr(os, name, noted)
    paceline.save(state(1), tmp_path / "a.pt")
    assert calls[0] == "write"
    assert [call for call in calls if call != "write"] == ["fsync", "replace", "fsync folder"]
    assert calls[-4] == "write"


def save_often(path, number, count):
    for _ in range(count):
        paceline.save({"number": number, "weight": torch.full((40_000,), float(number))}, path)


def test_writers_of_one_file_never_tear_it(tmp_path):
    path = tmp_path / "a.pt"
    paceline.save(state(0), path)
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=save_often, args=(path, number, 20)) for number in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        found = paceline.load(path)
        assert set(found["weight"].tolist()) == {float(found["number"])}
        writers[0].join(0.01)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert os.listdir(tmp_path) == ["a.pt"]


def save_in_a_full_place(path, limit):
    """Save where files may have no more than ``limit`` bytes: what a full disk does to a write, without one."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        paceline.save({"weight": torch.zeros(64)}, path)
    except CheckpointError as error:
        is_said = str(error).startswith(f"{path} could not be written: ") and isinstance(error.__cause__, OSError)
        os._exit(0 if is_said else 2)


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_a_disk_that_is_full_at_any_byte_leaves_what_was_there_and_is_an_error(tmp_path, name):
    path = tmp_path / name
    saved = torch.ones(64)
    paceline.save({"weight": saved}, path)
    size = path.stat().st_size
    for limit in (0, 1, 64, size // 2, size - 100, size - 1):
        assert in_a_child(save_in_a_full_place, path, limit) == 0
        assert os.listdir(tmp_path) == [name]
        assert torch.equal(paceline.load(path)["weight"], saved)


def test_a_disk_without_room_is_told_with_what_is_free(tmp_path, monkeypatch):
    def refuse(fd, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(
        CheckpointError,
        match=r"a\.pt could not be written: No space left on device, where [\d,]+ bytes are free\. What was",
    ):
        paceline.save(state(1), tmp_path / "a.pt")
    assert os.listdir(tmp_path) == []


# -- drafts -------------------------------------------------------------------------------------------------------


def test_a_draft_that_is_being_written_is_left_alone_and_one_of_the_dead_is_removed(tmp_path):
    path = tmp_path / "a.pt"
    with atomic.replacing(path) as draft:
        draft.write(b"of one writer")
        with atomic.replacing(path) as other:
            assert len(os.listdir(tmp_path)) == 2
            other.write(b"of another")
        assert path.read_bytes() == b"of another"
    assert path.read_bytes() == b"of one writer"
    (tmp_path / ".a.pt.0123456789abcdef.draft").touch()
    others = [".a.pt.b.0123456789abcdef.draft", ".a.pt.letter.draft", ".b.pt.0123456789abcdef.draft"]
    for name in others:
        (tmp_path / name).touch()
    with atomic.replacing(path):
        pass
    assert sorted(os.listdir(tmp_path)) == [*others, "a.pt"]
    atomic.remove_abandoned(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == [".a.pt.letter.draft", "a.pt"]


def test_a_writer_whose_draft_was_taken_for_abandoned_begins_another(tmp_path, monkeypatch):
    flock, stolen = atomic.fcntl.flock, []

    def late(fd, operation):
        if not stolen:
            stolen.extend(os.listdir(tmp_path))
            monkeypatch.setattr(atomic.fcntl, "flock", flock)
            atomic.remove_abandoned(str(tmp_path), "a.pt")
        return flock(fd, operation)

    monkeypatch.setattr(atomic.fcntl, "flock", late)
    with atomic.replacing(tmp_path / "a.pt") as draft:
        draft.write(b"whole")
        assert len(os.listdir(tmp_path)) == 1
        assert os.path.basename(draft.path) not in stolen
    assert len(stolen) == 1
    assert (tmp_path / "a.pt").read_bytes() == b"whole"


def test_a_symbolic_link_stays_and_files_have_the_usual_permissions_or_those_that_they_had(tmp_path):
    (tmp_path / "link.pt").symlink_to("a.pt")
    paceline.save(1, tmp_path / "link.pt")
    (tmp_path / "plain").touch()
    assert (tmp_path / "link.pt").is_symlink()
    assert paceline.load(tmp_path / "a.pt") == 1
    assert (tmp_path / "a.pt").stat().st_mode == (tmp_path / "plain").stat().st_mode
    (tmp_path / "a.pt").chmod(0o600)
    paceline.save(2, tmp_path / "a.pt")
    assert (tmp_path / "a.pt").stat().st_mode & 0o777 == 0o600
