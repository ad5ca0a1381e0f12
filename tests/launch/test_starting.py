"""Keys and signals that come before anybody has handlers for them: while python starts, in one process or another."""

import pathlib
import signal
import sys

import pytest

from support.commands import paceline_run, processes_with, start, wait_until, write_script


@pytest.mark.parametrize("module", ["paceline", "paceline.launch"])
def test_ctrl_c_while_the_command_is_imported_leaves_no_traceback(tmp_path, module):
    write_script(tmp_path, "import pathlib, time; pathlib.Path(__file__ + '.in').touch(); time.sleep(60)", "click.py")
    process = start([sys.executable, "-m", module, "run", "train.py"], env={"PYTHONPATH": str(tmp_path)})
    wait_until((tmp_path / "click.py.in").exists)
    process.send_signal(signal.SIGUSR2)  # which is harmless
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (-signal.SIGINT, "", "")  # 130, to a shell


def test_signals_while_the_fork_server_starts_are_the_launchers_affair(tmp_path):
    write_script(
        tmp_path,
        """
        import os, signal, sys
        if "forkserver" in " ".join(sys.orig_argv):
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
                os.kill(os.getpid(), signum)
        """,
        "sitecustomize.py",
    )
    script = write_script(tmp_path, "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))")
    ran = paceline_run(script, env={"PYTHONPATH": str(tmp_path)})
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "set()\n", "")


@pytest.mark.parametrize("flags", [[], ["--no-python", sys.executable]])
def test_ctrl_c_in_a_rank_that_has_not_begun_is_its_scripts(tmp_path, flags):
    write_script(
        tmp_path,
        """
        import os, signal, sys
        if "forkserver" in " ".join(sys.orig_argv):
            os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGINT))
        """,
        "sitecustomize.py",
    )
    ran = paceline_run(*flags, write_script(tmp_path, "print('ran')"), env={"PYTHONPATH": str(tmp_path)})
    assert (ran.returncode, ran.stdout) == (130, "")
    assert str(pathlib.Path("paceline", "launch")) not in ran.stderr
    assert ran.stderr.startswith("paceline: rank 0 failed first, killed by SIGINT")
    assert not processes_with(str(tmp_path))
