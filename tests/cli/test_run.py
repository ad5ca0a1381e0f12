import importlib.metadata
import platform
import subprocess
import sys

import pytest

import paceline
from paceline.cli.run import run
from support.commands import PACELINE, paceline_run, run_command, write_script

TORCH = importlib.metadata.version("torch")


def test_the_flags_are_these():
    flags = [[*parameter.opts, *parameter.secondary_opts] for parameter in run.params]
    assert flags == [
        ["-n", "--nproc-per-node", "--nproc_per_node"],
        ["--nnodes"],
        ["--node-rank", "--node_rank", "-nr"],
        ["-g", "--gpus"],
        ["--master-addr", "--master_addr"],
        ["--master-port", "--master_port"],
        ["--standalone"],
        ["--rdzv-backend", "--rdzv_backend"],
        ["--rdzv-endpoint", "--rdzv_endpoint"],
        ["--rdzv-id", "--rdzv_id"],
        ["--rdzv-conf", "--rdzv_conf"],
        ["--local-addr", "--local_addr"],
        ["--max-restarts", "--max_restarts"],
        ["--grace", "--shutdown-timeout", "--shutdown_timeout"],
        ["--hang-timeout"],
        ["--signals-to-handle", "--signals_to_handle"],
        ["--log-dir", "--log_dir"],
        ["--redirects", "-r"],
        ["--tee", "-t"],
        ["--local-ranks-filter", "--local_ranks_filter"],
        ["--duplicate-stdout-filters", "--duplicate_stdout_filters"],
        ["--duplicate-stderr-filters", "--duplicate_stderr_filters"],
        ["--role"],
        ["--virtual-local-rank", "--virtual_local_rank"],
        ["--numa-binding", "--numa_binding"],
        ["--module", "-m"],
        ["--no-python", "--no_python"],
        ["--run-path", "--run_path"],
        ["--monitor-interval", "--monitor_interval"],
        ["--start-method", "--start_method"],
        ["--event-log-handler", "--event_log_handler"],
        ["--logs-specs", "--logs_specs"],
        ["--use-env", "--use_env"],
        ["--report"],
        ["--hosts"],
        ["--hostfile"],
        ["--export"],
        ["--python"],
        ["--workdir"],
        ["script"],
        ["args"],
    ]


def test_every_flag_of_torchruns_is_known():
    from torch.distributed.run import get_args_parser

    ours = {name for parameter in run.params for name in parameter.opts}
    theirs = {name for action in get_args_parser()._actions for name in action.option_strings}
    assert theirs - ours - {"-h", "--help"} == set()


def test_help_and_version_import_no_torch():
    for arguments, first_line in (
        (["--help"], "Usage: paceline [OPTIONS] COMMAND [ARGS]..."),
        (
            ["--version"],
            f"paceline, version {paceline.__version__} (torch {TORCH}, Python {platform.python_version()})",
        ),
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
    code = "import sys, paceline.launch.conductor.conductor, paceline.launch.supervisor.supervisor\n"
    code += "print({'torch', 'numpy'} & set(sys.modules))"
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
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "[1]: ['-n', '9', '--module', '--', '--help']\n", "")


def test_the_grace_can_come_from_the_environment(tmp_path):
    ran = paceline_run(write_script(tmp_path, "pass"), env={"PACELINE_GRACE": "-2"})
    assert (ran.returncode, ran.stderr) == (2, "paceline: expected a grace of 0 seconds or more, but got -2\n")
