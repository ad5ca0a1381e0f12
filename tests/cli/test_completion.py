"""Completion in real shells, of the real command."""

import os
import shutil
import subprocess
import sys

import pytest

from support.commands import PACELINE, run_command


@pytest.fixture
def in_path(tmp_path):
    """An environment in which ``paceline`` is a command."""
    command = tmp_path / "paceline"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline "$@"\n')
    command.chmod(0o755)
    return {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}


def needs(shell):
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


@needs("bash")
def test_bash_completes_commands_options_and_values(in_path, tmp_path):
    cases = {
        "ru": "run",
        "run --max-r": "--max-restarts",
        "run --numa-binding so": "socket",
        "run -n a": "auto",
        "run --signals-to-handle SIGTERM,SIGUSR": "SIGTERM,SIGUSR1 SIGTERM,SIGUSR2",
        "completion f": "fish",
    }
    script = 'eval "$(paceline completion bash)"\n'
    for typed in cases:
        script += f"COMPREPLY=(); COMP_WORDS=(paceline {typed}); COMP_CWORD={len(typed.split())}\n"
        script += '_paceline_completion paceline; echo "${COMPREPLY[*]}"\n'
    ran = run_command(["bash", "-c", script], env=in_path)
    assert (ran.stdout.splitlines(), ran.stderr) == (list(cases.values()), "")


@needs("bash")
def test_a_script_is_left_to_the_shell_which_completes_files(in_path):
    env = {**in_path, "COMP_WORDS": "paceline run -n 2 tra", "COMP_CWORD": "4", "_PACELINE_COMPLETE": "bash_complete"}
    assert run_command(["paceline"], env=env).stdout == "file,tra\n"
    env |= {"COMP_WORDS": "paceline run --log-dir lo", "COMP_CWORD": "3"}
    assert run_command(["paceline"], env=env).stdout == "dir,lo\n"


@needs("fish")
def test_fish_completes_commands(in_path, tmp_path):
    script = 'paceline completion fish | source; complete --do-complete "paceline ru"'
    ran = run_command(["fish", "--no-config", "-c", script], env={**in_path, "HOME": str(tmp_path)})
    assert ran.stdout.split("\t")[0].strip() == "run", ran.stderr


@needs("zsh")
def test_zsh_reads_its_script(in_path):
    script = run_command([*PACELINE, "completion", "zsh"]).stdout
    assert "compdef _paceline_completion paceline" in script
    assert subprocess.run(["zsh", "-n"], input=script, text=True, capture_output=True).stderr == ""


def test_another_shell_is_an_error():
    ran = run_command([*PACELINE, "completion", "tcsh"])
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == (
        "paceline: Invalid value for '{bash|zsh|fish}': 'tcsh' is not one of 'bash', 'zsh', 'fish'. "
        "(see `paceline completion --help`)\n"
    )
