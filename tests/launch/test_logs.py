"""Where the ranks' output goes."""

import os

import pytest

from paceline.errors import LaunchError
from paceline.launch.loop import Loop
from paceline.launch.output.files import LogFile
from paceline.launch.output.forwarding import Channel, Forwarder
from paceline.launch.spec.logs import LogSpec, parse_filters, parse_ranks, parse_streams
from support.commands import in_the_end, paceline_run, write_script

BOTH = frozenset({"stdout", "stderr"})


def test_streams_as_torchrun_writes_them():
    assert parse_streams("0", "-r") == {-1: frozenset()}
    assert parse_streams("3", "-r") == {-1: BOTH}
    assert parse_streams("0:1,2:2", "-r") == {0: frozenset({"stdout"}), 2: frozenset({"stderr"})}
    for text in ("4", "x", "0:1,2", ":1", "", "1:"):
        with pytest.raises(LaunchError, match="expected -r 0"):
            parse_streams(text, "-r")


def test_ranks_and_filters():
    assert parse_ranks("", "-f") is None
    assert parse_ranks("0,2", "-f") == {0, 2}
    assert parse_filters("loss,,acc,epoch") == ("loss,acc", "epoch")
    assert parse_filters("") == ()


def test_what_is_written_and_what_is_shown():
    redirected = LogSpec("logs", redirects=parse_streams("0:3,1:1", ""), tee=parse_streams("1:2", ""))
    assert [redirected.is_written(0, stream) for stream in ("stdout", "stderr")] == [True, True]
    assert [redirected.is_shown(0, stream) for stream in ("stdout", "stderr")] == [False, False]
    assert [redirected.is_written(1, stream) for stream in ("stdout", "stderr")] == [True, True]
    assert [redirected.is_shown(1, stream) for stream in ("stdout", "stderr")] == [False, True]
    assert not redirected.is_written(2, "stdout")
    alone = LogSpec("logs")
    assert alone.is_written(5, "stderr")
    assert alone.is_shown(5, "stderr")
    assert LogSpec().is_plain
    assert not LogSpec(shown=frozenset({1})).is_shown(0, "stdout")


SAYS = """
import os, sys
rank = os.environ["RANK"]
print(f"out {rank} loss")
print(f"err {rank}", file=sys.stderr)
"""


def files_in(folder):
    """Text by path, without the launch's own folder."""
    (run,) = folder.iterdir()
    return {path.relative_to(run).as_posix(): path.read_text() for path in run.rglob("*.log")}


def test_a_directory_alone_keeps_all_and_all_is_shown(tmp_path):
    script = write_script(tmp_path, SAYS)
    ran = paceline_run("-n", "2", "--log-dir", str(tmp_path / "logs"), "--rdzv-id", "job", script)
    assert ran.stdout.count("loss") == 2
    assert ran.stderr.count("err") == 2
    assert os.listdir(tmp_path / "logs")[0].startswith("job_")
    assert files_in(tmp_path / "logs") == {
        f"attempt_0/{rank}/{stream}.log": text
        for rank in (0, 1)
        for stream, text in (("stdout", f"out {rank} loss\n"), ("stderr", f"err {rank}\n"))
    }


def test_redirected_streams_are_not_shown_and_teed_ones_are(tmp_path):
    script = write_script(tmp_path, SAYS)
    ran = paceline_run("-n", "2", "--log-dir", str(tmp_path / "logs"), "-r", "0:3", "-t", "1:1", script)
    assert ran.stdout.splitlines() == ["[1]: out 1 loss"]
    assert ran.stderr.splitlines() == ["[1]: err 1"]
    assert set(files_in(tmp_path / "logs")) == {
        "attempt_0/0/stdout.log",
        "attempt_0/0/stderr.log",
        "attempt_0/1/stdout.log",
    }


def test_only_some_ranks_are_shown_and_some_lines_kept_apart(tmp_path):
    script = write_script(tmp_path, SAYS)
    flags = ["--local-ranks-filter", "0", "--duplicate-stdout-filters", "loss,nan", "--log-dir", str(tmp_path / "logs")]
    ran = paceline_run("-n", "2", *flags, script)
    assert (ran.stdout, ran.stderr) == ("out 0 loss\n", "err 0\n")
    assert sorted(files_in(tmp_path / "logs")["attempt_0/filtered_stdout.log"].splitlines()) == [
        "[0]: out 0 loss",
        "[1]: out 1 loss",
    ]


def test_a_failure_says_where_the_logs_are(tmp_path):
    script = write_script(tmp_path, "raise ValueError('boom')")
    ran = paceline_run("--log-dir", str(tmp_path / "logs"), script)
    (run,) = os.listdir(tmp_path / "logs")
    assert in_the_end(ran.stderr).startswith(
        f"paceline: what the ranks said is in {tmp_path / 'logs' / run}\npaceline: rank 0 failed"
    )


def test_a_log_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    ran = paceline_run("--log-dir", str(tmp_path / "file"), write_script(tmp_path, SAYS))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith(f"paceline: the log {tmp_path}/file/")
    assert ran.stderr.endswith("cannot be written: Not a directory; choose another --log-dir\n")


def test_a_line_without_end_is_not_held_in_memory_without_end(tmp_path):
    log = LogFile(None, str(tmp_path / "filtered"), ["word"], b"[0]: ")
    for _ in range(40):
        log.write(b"word" * 16384)
    assert (tmp_path / "filtered").stat().st_size > 2 << 20
    log.write(b"\nthe next line\n")
    log.close()
    lines = (tmp_path / "filtered").read_bytes().splitlines()
    assert all(line.startswith(b"[0]: word") for line in lines)
    assert sum(map(len, lines)) == 40 * 65536 + len(lines) * len(b"[0]: ")


def test_a_last_line_that_cannot_be_kept_is_told():
    loop, told = Loop(), []
    reader, writer = os.pipe()
    forwarder = Forwarder(loop, [], lambda: None, lambda error: told.append(error.strerror))
    forwarder.attach(Channel(reader, 0, None, LogFile(None, "/dev/full", ["word"], b"[0]: ")))
    os.write(writer, b"a word, and no end of the line")
    os.close(writer)
    while not forwarder.is_drained:
        loop.turn()
    loop.close()
    assert told == ["No space left on device"]
