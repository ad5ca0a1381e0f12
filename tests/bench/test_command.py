"""``paceline bench`` as it is typed: what it refuses at once, and whole benches on two ranks."""

import contextlib
import io
import multiprocessing
import os
import signal
import sys

import pytest
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from paceline.bench import document
from paceline.bench.conduct import Wanted, _Plan, measure, numbers_of_devices
from paceline.bench.looking import Found, find_out
from paceline.bench.ranks import _spell
from paceline.bench.recipe import Recipe
from paceline.bench.results import DATA_PARALLEL, MORE_THREADS, ONE_PROCESS, OURS, TORCHS
from paceline.cli import main
from paceline.cli.bench import bench
from paceline.errors import BenchError
from support.commands import PACELINE, processes_with, run_command, start, wait_until, write_script


def refused(*arguments):
    """What is said, in one line, with exit code 2."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 2
    return said.getvalue().removesuffix("\n")


def test_the_flags_are_these():
    assert [parameter.opts for parameter in bench.params] == [
        ["--model"],
        ["-n", "--devices"],
        ["--batch-size"],
        ["--steps"],
        ["--ways"],
        ["--backend"],
        ["--device"],
        ["--threads"],
        ["--out"],
        ["--no-report"],
        ["--png"],
        ["--json"],
        ["--from"],
    ]


def test_what_cannot_be_run_is_refused_before_anything_starts(tmp_path):
    assert (
        refused("--ways", "ddp,fsdp,dp")
        == "paceline: --ways fsdp: expected some of threads, dp, ddp, torch, with commas between"
    )
    assert refused("--backend", "tin-cans").startswith("paceline: backend='tin-cans': ")
    assert refused("-n", "0").startswith("paceline: Invalid value for '-n' / '--devices': 0 is not in the range x>=1.")
    assert refused("--model", "resnet").startswith("paceline: --model resnet: expected mnist, unet, gpt, ")
    expected = "there is no such folder to write it in; make it, or name another"
    assert refused("--out", f"{tmp_path}/no/report.html") == f"paceline: {tmp_path}/no/report.html: {expected}"
    assert refused("--json", f"{tmp_path}/no/b.json", "--no-report") == f"paceline: {tmp_path}/no/b.json: {expected}"


def test_a_library_that_is_missing_is_named_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert refused() == "paceline: a bench needs rich: `pip install 'paceline[bench]'` installs it"


def test_a_rank_starts_no_ranks(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BenchError) as caught:
        measure(Wanted(Recipe("mnist")), None)
    assert str(caught.value) == "this process is rank 1 of 2, but a bench starts its own ranks; run it by itself"


def test_devices_are_powers_of_two_and_the_last():
    assert [numbers_of_devices(most) for most in (1, 2, 6, 8)] == [[1], [2], [2, 4, 6], [2, 4, 8]]


def plan(gpus=(), **options):
    return _Plan(Wanted(Recipe("mnist"), **options), Found(gpus, 1, 4, 32))


def test_on_gpus_each_rank_has_one_and_threads_are_no_rival():
    found = plan(("H200",) * 4)
    assert [(s.num_devices, s.device_type, s.backend) for s in found.settings] == [
        (2, "cuda", "nccl"),
        (4, "cuda", "nccl"),
    ]
    assert found.ways == (DATA_PARALLEL, OURS, TORCHS)
    assert found.backends == ("nccl",)
    assert plan(("H200",) * 4, device="cpu", most=2).ways == (MORE_THREADS, DATA_PARALLEL, OURS, TORCHS)


def test_more_gpus_than_there_are_are_refused():
    for gpus, options, said in (
        (("H200",) * 4, {"most": 8}, "8: torch finds 4"),
        ((), {"device": "cuda"}, "1: torch finds 0"),
    ):
        with pytest.raises(BenchError) as caught:
            plan(gpus, **options)
        assert str(caught.value) == f"--devices {said} CUDA devices here; ask for fewer, or for --device cpu"


def test_cores_are_shared_out_unless_threads_are_given(monkeypatch):
    monkeypatch.setattr("paceline.bench.conduct.usable_cores", lambda: 8)
    assert [plan(most=most).subject.threads for most in (1, 2, 3, 16)] == [8, 4, 2, 1]
    assert plan(most=2, threads=3).subject.threads == 3
    assert [s.num_devices for s in plan().settings] == [2, 4, 8]


def test_steps_are_rounds_of_four():
    for steps, rounds in ((1, (1, 1)), (4, (1, 4)), (10, (3, 4)), (40, (10, 4))):
        found = plan(steps=steps)
        assert (found.num_rounds, found.steps_a_turn) == rounds


def test_figures_are_shown_anew_from_a_file(tmp_path, capsys):
    from support.benches import bench_on

    document.save(bench_on(2), tmp_path / "b.json")
    with pytest.raises(SystemExit) as caught:
        main(["bench", "--from", f"{tmp_path}/b.json", "--out", f"{tmp_path}/report.html"])
    assert caught.value.code == 0
    shown = capsys.readouterr()
    assert "How fast" in shown.out
    assert shown.err == f"written: {tmp_path}/report.html\n"
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    folder = tmp_path / "folder"
    folder.mkdir()
    said = refused("--from", f"{tmp_path}/b.json", "--out", str(folder))
    assert said == f"paceline: {folder} could not be written: a folder has that name"


NET = """
import os, signal, threading
import torch, torch.distributed as dist
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 4)

    def forward(self, x):
        {forward}
        return self.net(x)

def make():
    print("what a model prints is not the command's to say")
    return Net(), (torch.randn(16, 8), torch.randint(4, (16,)))
"""


DIES_OR_RAISES = """
        if dist.get_rank() == 1: os.kill(os.getpid(), signal.SIGKILL)
        if threading.current_thread() is not threading.main_thread(): raise OSError("not in a thread")
"""


@pytest.mark.slow
def test_a_way_that_fails_is_named_and_the_others_go_on(tmp_path):
    script = write_script(tmp_path, NET.replace("{forward}", DIES_OR_RAISES.strip()))
    files = ["--json", f"{tmp_path}/b.json", "--out", f"{tmp_path}/r.html", "--png", f"{tmp_path}/png"]
    options = ["-n", "2", "--steps", "2", "--ways", "threads,dp,ddp"]
    ran = run_command([*PACELINE, "bench", "--model", f"{script}:make", *options, *files])
    assert ran.returncode == 1, ran.stderr
    died = "rank 1 was ended by SIGKILL, as the kernel does when memory runs out"
    raised = "rank 0: OSError: "
    assert f"DistributedDataParallel on 2 devices failed: {died}\n" in ran.stderr
    assert f"DataParallel on 2 devices failed: {raised}" in ran.stderr
    assert "what a model prints" not in ran.stdout
    assert "Broken pipe" not in ran.stderr  # nor what torch says of ranks that go
    found = document.load(tmp_path / "b.json")
    assert (found.subject.num_parameters, found.subject.batch_size, found.subject.threads) == (36, 16, 1)
    assert found.command.endswith(f"{' '.join([*options, *files])}")
    assert [(run.way, run.num_devices, len(run.step_s), len(run.peak_bytes)) for run in found.runs] == [
        (ONE_PROCESS, 1, 2, 1),
        (MORE_THREADS, 2, 2, 1),
        (DATA_PARALLEL, 2, 0, 0),
        (OURS, 2, 0, 0),
    ]
    assert found.runs[2].error.startswith(raised)
    assert found.runs[3].error == died
    assert {collective.size_bytes for collective in found.collectives} >= {4_000, 32_000_000}
    assert all(collective.seconds > 0 and collective.copy_s > 0 for collective in found.collectives)
    assert (tmp_path / "r.html").stat().st_size > 1000
    assert list((tmp_path / "png").glob("*.png"))


LINEAR = """
import torch

def make():
    return torch.nn.Linear(2048, 2048), (torch.randn(4, 2048), torch.zeros(4, 2048))
"""
LINEAR_BYTES = 4 * (2048 * 2048 + 2048)


@pytest.mark.slow
def test_both_kinds_of_ddp_are_measured_whole_and_ctrl_c_keeps_what_is_finished(tmp_path):
    script = write_script(tmp_path, LINEAR)
    said = tmp_path / "said"
    command = [
        *PACELINE,
        "bench",
        "--model",
        f"{script}:make",
        "-n",
        "2",
        "--steps",
        "2",
        "--ways",
        "ddp,torch",
        "--no-report",
    ]
    with said.open("w") as stderr:
        running = start([*command, "--json", f"{tmp_path}/b.json"], stderr=stderr, start_new_session=True)
        try:
            wait_until(lambda: "2 devices, all_reduce" in said.read_text(), 100)
            os.killpg(running.pid, signal.SIGINT)  # as a terminal does
            out, _ = running.communicate(timeout=30)
        finally:
            running.kill()
            running.wait()
    assert running.returncode == 130, said.read_text()
    assert "It was interrupted: this is what had been measured until then.\n" in out
    assert processes_with(script) == []
    found = document.load(tmp_path / "b.json")
    assert found.interrupted
    assert [(run.way, run.num_devices, len(run.step_s)) for run in found.runs] == [
        (ONE_PROCESS, 1, 2),
        (OURS, 2, 2),
        (TORCHS, 2, 2),
    ]
    for run in found.runs:
        assert len(run.peak_bytes) == run.num_devices
        # Parameters and gradients are in it, and not what torch itself takes.
        assert 2 * LINEAR_BYTES < min(run.peak_bytes) < 8 * LINEAR_BYTES
        assert run.phases is not None
    ours, torchs = found.runs[1:]
    assert torchs.bytes_sent == LINEAR_BYTES  # of two ranks each sends half of the gradients twice
    assert LINEAR_BYTES < ours.bytes_sent < LINEAR_BYTES + 1000  # and the control message
    assert [len(run.alone_s) for run in (ours, torchs)] == [2, 2]
    assert {span.rank for span in found.step} == {0, 1}
    assert min(span.begin_s for span in found.step) == 0.0


@pytest.fixture
def no_server_stays():
    yield
    multiprocessing.forkserver._forkserver._stop()


@pytest.mark.slow
def test_a_recipe_that_is_none_ends_the_bench_and_so_does_a_death_while_it_is_looked_at(tmp_path, no_server_stays):
    script = write_script(tmp_path, "import os\ndef make():\n    return 3\ndef leave():\n    os._exit(3)\n")
    with pytest.raises(BenchError) as caught:
        find_out(Recipe(f"{script}:make"))
    expected = "expected (model, (inputs, target)), and if you like a loss and an optimizer behind them"
    assert str(caught.value) == f"--model {script}:make: it returned a value of type int; {expected}"
    with pytest.raises(BenchError) as caught:
        find_out(Recipe(f"{script}:leave"))
    assert str(caught.value) == "the model could not be made: rank 0 ended with exit code 3"


def test_what_a_rank_died_of_is_said_in_a_line():
    raised = "\n\n-- Process 1 terminated with the following error:\nTraceback ...:\n  File ...\nOSError: no\n"
    assert _spell(ProcessRaisedException(raised, 1, 99)) == "rank 1 raised an exception: OSError: no"
    assert _spell(ProcessExitedException("", 1, 99, -11, "SIGSEGV")) == "rank 1 was ended by SIGSEGV"
