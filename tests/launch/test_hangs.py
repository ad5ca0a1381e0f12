"""A launch that hangs says where: real ranks, of which one does not come."""

import os
import pathlib
import re
import signal
from collections.abc import Callable

import pytest

from support.commands import PACELINE, start, wait_until, write_script

pytestmark = pytest.mark.slow

SETTING = """
import os, pathlib, signal, sys, time
rank = int(os.environ["RANK"])
here = pathlib.Path(__file__).parent

def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.01)

"""


class Launch:
    """A running ``paceline run``, and what it has said on stderr."""

    def __init__(self, folder: pathlib.Path, *arguments: str) -> None:
        self._stderr = folder / "stderr"
        with open(self._stderr, "w") as stderr:
            self.process = start([*PACELINE, "run", *arguments], stderr=stderr)

    @property
    def said(self) -> str:
        return self._stderr.read_text()

    def says(self, *patterns: str) -> None:
        """Wait until all of these are said."""

        def are_said() -> bool:
            assert self.process.poll() is None, self.said
            return all(re.search(pattern, self.said, re.MULTILINE) for pattern in patterns)

        wait_until(are_said, timeout_s=60)

    def ends(self) -> str:
        """Its output, once it has succeeded."""
        out, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, self.said
        return out


@pytest.fixture
def launch(tmp_path) -> "Callable[..., Launch]":
    launches = []

    def begin(*arguments: str, source: str = "") -> Launch:
        script = write_script(tmp_path, source)
        path = pathlib.Path(script)
        path.write_text(SETTING + path.read_text())
        launches.append(Launch(tmp_path, *arguments, *([script] if source else [])))
        return launches[-1]

    yield begin
    for each in launches:
        if each.process.poll() is None:
            each.process.terminate()
            each.process.communicate(timeout=30)


def test_a_hang_is_told_with_the_collective_and_with_the_rank_that_does_not_come(launch, tmp_path):
    running = launch(
        "-n", "3", "--hang-timeout", "1",
        source="""
        import torch
        import torch.distributed as dist
        import paceline

        def culprit(name):
            wait_for(name)

        world = paceline.init()
        dist.all_reduce(torch.ones(4)) if rank != 1 else culprit("first")
        if rank == 1:
            dist.all_reduce(torch.ones(4))
        group = dist.new_group(backend="gloo")
        dist.barrier(group) if rank != 1 else culprit("second")
        if rank == 1:
            dist.barrier(group)
        world.barrier() if rank != 1 else culprit("third")
        if rank == 1:
            world.barrier()
        paceline.shutdown()
        """,
    )  # fmt: skip
    running.says(
        r"^paceline: a wait of .* lasts for more than 1 s\. Where the ranks are:$",
        r"^paceline: ranks 0, 2 for \d+ s, in all_reduce\(sum, of 4 elements, float32\) at .*script\.py:\d+, "
        r"call number 1 of the group of ranks 0, 1 and 2: rank 1 has not come to it, the others have$",
        r"^paceline: rank 1 in no collective\n(?:  .* in wait_for\n)?  .*script\.py:\d+ in culprit\n  .* in <module>$",
    )
    (tmp_path / "first").touch()
    running.says(r"^paceline: ranks 0, 2 in torch\.distributed\.barrier\n  torch/.* in barrier\n  .* in <module>$")
    (tmp_path / "second").touch()
    running.says(r"^paceline: ranks 0, 2 for \d+ s, in barrier number 1 of 3 ranks: rank 1 has not come to it$")
    (tmp_path / "third").touch()
    assert running.ends() == ""


def test_sigusr2_finds_ranks_that_answer_it_themselves_and_workers_survive_it(launch, tmp_path):
    running = launch(
        "-n", "2",
        source="""
        import paceline
        from torch.utils.data import DataLoader

        if rank == 0:
            signal.signal(signal.SIGUSR2, lambda *_: (here / "heard").touch())
        assert rank == 0 or signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
        with paceline.init() as world:
            world.should_stop()  # from here on, SIGUSR1 does not end a rank
            batches = iter(DataLoader(range(8), num_workers=1, multiprocessing_context="fork"))
            total = int(next(batches))
            (here / f"pid{rank}").write_text(str(os.getpid()))
            wait_for("go")
            print(total + sum(map(int, batches)), flush=True)
        """,
    )  # fmt: skip
    wait_until(lambda: all((tmp_path / f"pid{rank}").exists() for rank in range(2)), timeout_s=60)
    running.process.send_signal(signal.SIGUSR2)
    running.says(r"^paceline: rank.* in no collective\n(?:  .*\n)*  .*script\.py:\d+ in <module>$")
    wait_until((tmp_path / "heard").exists)
    for rank in range(2):
        group = wait_until(lambda rank=rank: (tmp_path / f"pid{rank}").read_text())
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            os.killpg(int(group), signum)
    (tmp_path / "go").touch()
    assert re.sub(r"\[\d\]: ", "", running.ends()) == "28\n28\n"


def test_ranks_that_cannot_be_asked_say_why(launch, tmp_path):
    running = launch(
        "-n", "2",
        source="""
        import ctypes
        if rank == 0:
            os.closerange(3, 256)
            file = open(here / "own", "w")  # takes over a descriptor that was the launcher's
        (here / f"ready{rank}").touch()
        while rank == 1 and not (here / "go").exists():
            ctypes.PyDLL(None).usleep(200_000)  # keeps the interpreter to itself
        wait_for("go")
        """,
    )  # fmt: skip
    wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)), timeout_s=60)
    running.process.send_signal(signal.SIGUSR2)
    running.says(
        r"^paceline: rank 0 without a stack to be seen: it has closed files that it had not opened$",
        r"^paceline: rank 1 in no collective\n(?:  .*\n)*  .*script\.py:\d+ in <module>$",
    )
    (tmp_path / "go").touch()
    running.ends()
    assert (tmp_path / "own").read_text() == ""


def test_a_program_that_is_not_pythons_is_let_be(launch, tmp_path):
    source = f"cd {tmp_path}; : >ready$RANK; until [ -e go ]; do sleep 0.05; done"
    running = launch("-n", "2", "--no-python", "sh", "-c", source)
    wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)), timeout_s=60)
    running.process.send_signal(signal.SIGUSR2)
    running.says(r"^paceline: ranks 0-1 in a program that is not Python's, as far as can be seen: gdb may show where$")
    (tmp_path / "go").touch()
    assert running.ends() == ""
