import os
import resource

import pytest

from paceline.errors import LaunchError
from paceline.launch.spec.launch import LaunchSpec
from paceline.launch.spec.nodes import NodesSpec


def test_a_good_spec_is_a_frozen_value(tmp_path):
    (tmp_path / "script.py").touch()
    spec = LaunchSpec(str(tmp_path / "script.py"), ("--lr", "1"), num_ranks=2)
    assert spec == LaunchSpec(str(tmp_path / "script.py"), ("--lr", "1"), num_ranks=2)
    with pytest.raises(AttributeError):
        spec.num_ranks = 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_ranks": 0}, "expected at least 1 rank, but got -n 0"),
        ({"num_ranks": -4}, "expected at least 1 rank, but got -n -4"),
        ({"master_port": 65536}, "expected a port from 1 to 65535, or 0 for any free one, but got 65536; leave"),
        ({"master_port": -1}, "expected a port from 1 to 65535, or 0 for any free one, but got -1; leave"),
        ({"grace_s": -1.0}, "expected a grace of 0 seconds or more, but got -1"),
        ({"grace_s": float("nan")}, "expected a grace of 0 seconds or more, but got nan"),
        ({"hang_timeout_s": -1.0}, "expected a hang timeout of at least 1 second, or 0 for none, but got -1"),
        ({"hang_timeout_s": 0.5}, "expected a hang timeout of at least 1 second, or 0 for none, but got 0.5"),
        ({"hang_timeout_s": float("nan")}, "expected a hang timeout of at least 1 second, or 0 for none, but got nan"),
        (
            {"hang_timeout_s": 1.0, "is_module": False, "is_command": True},
            "--hang-timeout looks at the stacks of Python, which a program that is started with --no-python need not",
        ),
    ],
)
def test_a_value_out_of_range_is_named(change, message):
    with pytest.raises(LaunchError) as caught:
        LaunchSpec("module", **{"is_module": True, **change})
    assert str(caught.value).startswith(message)


def test_a_program_that_cannot_be_started_is_an_error_before_anything_starts(tmp_path):
    (tmp_path / "data").write_text("no program")
    cases = {
        str(tmp_path / "data"): "may not be executed by this user; make it executable (chmod +x), or leave --no-python",
        str(tmp_path): "is a folder, so --no-python cannot start it",
    }
    for target, message in cases.items():
        with pytest.raises(LaunchError) as caught:
            LaunchSpec(target, is_command=True)
        assert str(caught.value).startswith(f"{target!r} {message}")
    with pytest.raises(LaunchError, match=r"^no such program: 'no-such' \(looked along PATH\)$"):
        LaunchSpec("no-such", is_command=True)


@pytest.mark.parametrize(
    ("nodes", "port", "where"),
    [
        ({}, 0, "127.0.0.1:29500"),
        ({"address": "host0"}, 7, "host0:7"),
        ({"address": "fd00::1"}, 7, "[fd00::1]:7"),
        ({"address": "[fd00::1]"}, 0, "[fd00::1]:29500"),
        ({"address": "host0", "endpoint": "[::1]:29400"}, 7, "[::1]:29400"),
    ],
)
def test_launchers_meet_at_the_endpoint_or_else_at_the_first_hosts_address(nodes, port, where):
    spec = LaunchSpec("module", is_module=True, master_port=port, nodes=NodesSpec(2, 2, **nodes))
    assert spec.meeting_point == where


def test_more_ranks_than_files_may_be_open_is_an_error():
    allowed = (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 64) // 7
    with pytest.raises(
        LaunchError, match=f"-n {allowed + 1} is more than this host can hold: .* allow {allowed} ranks"
    ):
        LaunchSpec("module", is_module=True, num_ranks=allowed + 1)


def test_a_target_that_cannot_run_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, message in {
        "missing.py": "no such script: ",
        "empty": "is a folder without a __main__.py",
        "pipe": "is neither a script nor a folder",
    }.items():
        with pytest.raises(LaunchError, match=message):
            LaunchSpec(str(tmp_path / name))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_script_is_named(tmp_path):
    (tmp_path / "secret.py").touch(mode=0)
    with pytest.raises(LaunchError, match=r"secret\.py' may not be read by this user"):
        LaunchSpec(str(tmp_path / "secret.py"))
