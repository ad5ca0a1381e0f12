"""Which hosts take part, how they are reached and what they get: pure functions."""

import os
import shutil
import socket
import subprocess

import pytest

from paceline.errors import LaunchError
from paceline.launch.conductor.exports import exported, of_interpreter
from paceline.launch.conductor.hostfile import HostSpec, parse_hosts, read_hostfile
from paceline.launch.conductor.ssh import (
    NO_FOLDER,
    NO_INTERPRETER,
    agent_script,
    current_folder,
    is_this_machine,
    spell_for_any_shell,
    ssh_command,
)


def test_hosts_are_read_with_users_counts_and_addresses():
    assert parse_hosts("a:4, ada@b,[fd00::1]:2,fd00::2,10.0.0.1:1") == (
        HostSpec("a", None, 4),
        HostSpec("b", "ada", None),
        HostSpec("fd00::1", None, 2),
        HostSpec("fd00::2", None, None),
        HostSpec("10.0.0.1", None, 1),
    )


def test_a_host_that_is_named_again_adds_its_ranks():
    assert parse_hosts("a:4,b,a:2,b") == (HostSpec("a", None, 6), HostSpec("b", None, 2))
    assert parse_hosts("a:4,ada@a:2") == (HostSpec("a", None, 4), HostSpec("a", "ada", 2))


@pytest.mark.parametrize("text", ["a:0", "a:x", "a:", "a:4:5", ",", "a,,b", "[a]:4", "[fd00::1", "-oProxy:1", "@a"])
def test_hosts_that_read_otherwise_are_an_error_that_says_what_was_expected(text):
    with pytest.raises(LaunchError, match=r"--hosts .*: expected (a number of ranks|HOST, HOST:RANKS)"):
        parse_hosts(text)


def test_hostfiles_of_deepspeed_and_of_mpi(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text(
        "# a cluster\n\nworker-1 slots=4\nada@worker-2 slots=2 max_slots=8  # more\nworker-3:2\n[fd00::4]:1\nworker-5\n"
        "worker-1 slots=1\n"
    )
    assert read_hostfile(str(path)) == (
        HostSpec("worker-1", None, 5),
        HostSpec("worker-2", "ada", 2),
        HostSpec("worker-3", None, 2),
        HostSpec("fd00::4", None, 1),
        HostSpec("worker-5", None, None),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nb slots", "line 2: expected slots=N or max_slots=N after the host, but got 'slots'"),
        ("a cores=3", "line 1: expected slots=N or max_slots=N after the host, but got 'cores=3'"),
        ("a slots=many", "line 1: expected a number of ranks from 1, but got 'many'"),
        ("a:2 slots=3", "line 1: 'a:2' and 'slots=3' name different numbers of ranks"),
        ("# nobody", "names no host; expected a line for each, such as 'worker-1 slots=4'"),
    ],
)
def test_a_hostfile_that_reads_otherwise_is_an_error_with_its_line(tmp_path, text, message):
    path = tmp_path / "hostfile"
    path.write_text(text)
    with pytest.raises(LaunchError) as caught:
        read_hostfile(str(path))
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_hostfile_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(LaunchError, match=r"the hostfile .*absent cannot be read: No such file or directory"):
        read_hostfile(str(tmp_path / "absent"))
    (tmp_path / "image").write_bytes(b"\xff\xfe")
    with pytest.raises(LaunchError, match=r"the hostfile .*image cannot be read: it is no text"):
        read_hostfile(str(tmp_path / "image"))


def test_the_users_own_options_of_ssh_come_first_and_so_win():
    command = ssh_command(HostSpec("b", "ada"), "echo 'a b'", {"PACELINE_SSH": "ssh -F 'my config' -p 2222"})
    assert command[:5] == ["ssh", "-F", "my config", "-p", "2222"]
    assert command[5:7] == ["-o", "BatchMode=yes"]
    assert command[-3:] == ["-T", "ada@b", spell_for_any_shell("echo 'a b'")]
    assert ssh_command(HostSpec("b"), "true", {})[0] == "ssh"


def test_an_ssh_that_no_shell_could_start_is_an_error():
    with pytest.raises(LaunchError, match='PACELINE_SSH="ssh \'" cannot be read as a shell reads it'):
        ssh_command(HostSpec("b"), "true", {"PACELINE_SSH": "ssh '"})
    with pytest.raises(LaunchError, match="begins with an option; expected a program first, as in 'ssh -p 2222'"):
        ssh_command(HostSpec("b"), "true", {"PACELINE_SSH": "-p 2222"})


def echo(tmp_path):
    """An interpreter that says where it runs, with what variable, and what it was given last."""
    path = tmp_path / "an interpreter"
    path.write_text('#!/bin/sh\nfor last; do :; done\nprintf "%s\\n" "$(pwd) $PYTHONPATH $last"\n')
    path.chmod(0o755)
    return str(path)


def test_an_agent_runs_in_its_folder_with_the_interpreters_variables(tmp_path):
    folder = tmp_path / 'it\'s "$here"'
    folder.mkdir()
    script = agent_script([echo(tmp_path)], str(folder), {"PYTHONPATH": "a b"}, ["train.py", "--name=x y"])
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{folder} a b --name=x y\n"), done.stderr


@pytest.mark.parametrize("shell", ["sh", "bash", "zsh", "fish", "tcsh", "csh", "ksh", "busybox"])
def test_an_agent_is_started_alike_by_every_login_shell(tmp_path, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    folder = tmp_path / 'it\'s "$here"! \\ `x` %s {a,b} *é\n(2)'
    folder.mkdir()
    last = "--name=\\n \\' '!$ \\0101 \t%d#"
    script = agent_script([echo(tmp_path)], str(folder), {"PYTHONPATH": "a;b"}, ["train.py", last])
    login = [shell, "sh"] if shell == "busybox" else [shell]
    ran = subprocess.run([*login, "-c", spell_for_any_shell(script)], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, f"{folder} a;b {last}\n"), ran.stderr


def test_what_an_agent_lacks_is_told_apart(tmp_path):
    no_folder = agent_script([echo(tmp_path)], str(tmp_path / "absent"), {}, [])
    no_interpreter = agent_script([str(tmp_path / "absent")], str(tmp_path), {}, [])
    assert subprocess.run(["sh", "-c", no_folder], stderr=subprocess.DEVNULL).returncode == NO_FOLDER
    assert subprocess.run(["sh", "-c", no_interpreter]).returncode == NO_INTERPRETER


def test_this_machine_needs_no_ssh_unless_another_user_is_asked_for():
    for name in ("localhost", socket.gethostname(), "127.0.0.1", "10.0.0.1"):
        assert is_this_machine(HostSpec(name), ["10.0.0.1"])
    assert not is_this_machine(HostSpec("localhost", "ada"), [])
    assert not is_this_machine(HostSpec("elsewhere"), ["10.0.0.1"])


def test_the_current_folder_is_spelled_as_the_user_came_to_it(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "link")
    assert current_folder({"PWD": f"{tmp_path}/link"}) == f"{tmp_path}/link"
    assert current_folder({"PWD": str(tmp_path)}) == current_folder({}) == os.path.realpath(tmp_path / "real")


def test_a_current_folder_that_was_removed_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(LaunchError, match=r"^this folder has been removed; change to another, or name one with --wo"):
        current_folder({"PWD": f"{tmp_path}/gone"})


def test_hosts_get_the_variables_of_libraries_and_those_that_are_asked_for():
    environ = {
        "NCCL_DEBUG": "INFO",
        "PYTHONPATH": "src",
        "OMP_NUM_THREADS": "2",
        "CUDA_LAUNCH_BLOCKING": "1",
        "CUDA_VISIBLE_DEVICES": "0",
        "PACELINE_LAUNCHER": "1:2",
        "PACELINE_SSH": "ssh",
        "PATH": "/bin",
        "DATA": "/data",
        "HF_TOKEN": "hf_1",
        "WANDB_API_KEY": "w",
    }
    kept = {name: environ[name] for name in ("NCCL_DEBUG", "PYTHONPATH", "OMP_NUM_THREADS", "CUDA_LAUNCH_BLOCKING")}
    assert exported(environ, []) == kept
    asked = ["DATA", "SEED=1=2", "OMP_NUM_THREADS=", "CUDA_VISIBLE_DEVICES", "HF_TOKEN"]
    told = {"HF_TOKEN": "hf_1", "DATA": "/data", "SEED": "1=2", "OMP_NUM_THREADS": "", "CUDA_VISIBLE_DEVICES": "0"}
    assert exported(environ, asked) == {**kept, **told}
    assert of_interpreter(kept) == {"PYTHONPATH": "src"}


def test_a_variable_that_is_not_set_cannot_be_exported():
    with pytest.raises(LaunchError, match=r"--export DATA: it is not set here; set it, or write --export DATA=VALUE"):
        exported({}, ["DATA"])
    with pytest.raises(LaunchError, match=r"expected --export NAME or NAME=VALUE, but got '=1'"):
        exported({}, ["=1"])
