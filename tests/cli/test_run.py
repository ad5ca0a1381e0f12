import subprocess
import sys

import pytest

import paceline
from paceline.cli.run import run
from support.commands import PACELINE, paceline_run, run_command, write_script


def test_the_flags_are_these():
    flags = [[*parameter.opts, *parameter.secondary_opts] for parameter in run.params]
    assert flags == [
        ["-n", "--nproc-per-node", "--nproc_per_node"],
        ["--master-port", "--master_port"],
        ["--grace"],
        ["-m", "--module"],
        ["script"],
        ["args"],
    ]


def test_help_and_version_import_no_torch():
    for arguments, first_line in (
        (["--help"], "Usage: paceline [OPTIONS] COMMAND [ARGS]..."),
        (["--version"], f"paceline, version {paceline.__version__}"),
        (["run", "--help"], "Usage: paceline run [OPTIONS] SCRIPT [ARGS]..."),
    ):
        code = (
            "import sys\n"
            "from paceline.cli import main\n"
            "try:\n    main()\n"
            "finally:\n    print(sorted({'torch', 'numpy', 'psutil'} & set(sys.modules)), file=sys.stderr)\n"
        )
        ran = run_command([sys.executable, "-c", code, *arguments])
        assert (ran.returncode, ran.stdout.splitlines()[0], ran.stderr) == (0, first_line, "[]\n")


def test_the_launcher_itself_imports_no_torch():
    code = "import sys, paceline.launch; print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument 'SCRIPT'. (see `paceline run --help`)"),
        (["-n"], "Option '-n' requires an argument."),
        (["-n", "two", "x.py"], "expected a number, auto, cpu or gpu for -n, but got 'two'"),
        (["-n", "0", "x.py"], "expected at least 1 rank, but got -n 0"),
        (
            ["-n", "2", "missing.py"],
            "no such script: 'missing.py' (looked in {cwd}); a module wants -m before its name",
        ),
        (
            ["--master-port", "x", "x.py"],
            "Invalid value for '--master-port' / '--master_port': 'x' is not a valid integer",
        ),
        (["--nodes", "2", "x.py"], "No such option"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(tmp_path, arguments, message):
    ran = paceline_run(*arguments, cwd=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert ran.stderr.startswith("paceline: " + message.format(cwd=tmp_path))


def test_no_command_shows_the_help():
    ran = run_command([*PACELINE])
    assert ran.returncode == 2
    assert ran.stderr.startswith("Usage: paceline [OPTIONS] COMMAND [ARGS]...")


@pytest.mark.parametrize(
    "command",
    [
        [*PACELINE, "run", "--nproc_per_node=2"],
        [sys.executable, "-m", "paceline.launch", "--nproc-per-node", "2"],
    ],
)
def test_both_spellings_and_both_commands_launch(tmp_path, command):
    script = write_script(tmp_path, "import os, sys; os.environ['RANK'] == '1' and print(sys.argv[1:])")
    ran = run_command([*command, script, "-n", "9", "--module", "--", "--help"])
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "['-n', '9', '--module', '--', '--help']\n", "")


def test_the_grace_can_come_from_the_environment(tmp_path):
    ran = paceline_run(write_script(tmp_path, "pass"), env={"PACELINE_GRACE": "-2"})
    assert (ran.returncode, ran.stderr) == (2, "paceline: expected a grace of 0 seconds or more, but got -2\n")
