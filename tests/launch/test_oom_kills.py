"""What is known of ranks that were killed: counters of the kernel's, of both versions, and a real limit."""

import contextlib
import json
import os
import pathlib
import secrets
import sys

import pytest

from paceline.launch.failures.oom_kills import OomCounters, OomKills
from support.commands import PACELINE, start

FIRST_VERSION = pathlib.Path("/sys/fs/cgroup/memory")
UNLIMITED = 9223372036854771712  # what version 1 says


class Machine:
    """A machine's /proc and /sys, in a folder."""

    def __init__(self, root: pathlib.Path, *, cgroup: str, mounts: str) -> None:
        self.root = root
        self.write("proc/self/cgroup", cgroup)
        self.write("proc/self/mountinfo", mounts)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def vmstat(self, kills: int) -> None:
        self.write("proc/vmstat", f"nr_free_pages 7\noom_kill {kills}\nswpin 9\n")

    def level(self, path: str, *, kills: int, shortages: int, limit: int | None) -> None:
        """A cgroup of version 2."""
        events = f"low 0\nhigh 0\nmax {shortages}\noom {shortages}\noom_kill {kills}\noom_group_kill 0\n"
        self.write(f"sys/fs/cgroup/{path}/memory.events", events)
        self.write(f"sys/fs/cgroup/{path}/memory.max", "max\n" if limit is None else f"{limit}\n")

    def old_level(self, path: str, *, kills: int, shortages: int, limit: int | None) -> None:
        """A cgroup of version 1."""
        folder = f"sys/fs/cgroup/memory/{path}"
        self.write(f"{folder}/memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        self.write(f"{folder}/memory.failcnt", f"{shortages}\n")
        self.write(f"{folder}/memory.limit_in_bytes", f"{UNLIMITED if limit is None else limit}\n")

    def counters(self) -> OomCounters:
        return OomCounters(str(self.root))


UNIFIED = "26 20 0:23 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
SPLIT = (
    "31 23 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "35 23 0:32 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "41 23 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)


def test_a_kill_in_the_cgroup_tells_the_limit_of_the_innermost_one_that_was_reached(tmp_path):
    machine = Machine(tmp_path, cgroup="0::/jobs/one/leaf\n", mounts=UNIFIED)
    machine.vmstat(5)
    machine.level("jobs", kills=4, shortages=9, limit=1 << 40)
    machine.level("jobs/one", kills=1, shortages=1, limit=8 << 30)
    (tmp_path / "sys/fs/cgroup/jobs/one/leaf").mkdir()  # where the controller is not in force
    counters = machine.counters()
    assert counters.since() == OomKills(0, 0, None)
    machine.vmstat(7)
    machine.level("jobs", kills=6, shortages=10, limit=1 << 40)
    machine.level("jobs/one", kills=3, shortages=2, limit=8 << 30)
    assert counters.since() == OomKills(in_cgroup=2, on_host=2, limit_bytes=8 << 30)


def test_a_kill_elsewhere_on_the_machine_is_none_of_the_cgroups(tmp_path):
    machine = Machine(tmp_path, cgroup="0::/one\n", mounts=UNIFIED)
    machine.vmstat(0)
    machine.level("one", kills=0, shortages=0, limit=8 << 30)
    counters = machine.counters()
    machine.vmstat(1)
    assert counters.since() == OomKills(in_cgroup=0, on_host=1, limit_bytes=None)
    assert not counters.since().were_likely


def test_a_kill_for_which_no_visible_limit_was_reached_tells_none(tmp_path):
    machine = Machine(tmp_path, cgroup="0::/\n", mounts=UNIFIED)  # as in a container
    machine.level("", kills=0, shortages=0, limit=8 << 30)
    counters = machine.counters()
    machine.level("", kills=1, shortages=0, limit=8 << 30)
    assert counters.since() == OomKills(in_cgroup=1, on_host=None, limit_bytes=None)


@pytest.mark.parametrize(
    ("top", "path"),
    [("/", "jobs/one"), ("/jobs", "one"), ("/jobs/one", "")],
    ids=["the whole tree", "a part of it", "as docker mounts it"],
)
def test_the_first_version_of_cgroups_tells_the_same(tmp_path, top, path):
    machine = Machine(tmp_path, cgroup="8:pids:/\n4:memory:/jobs/one\n0::/\n", mounts=SPLIT.format(top=top))
    machine.old_level("", kills=0, shortages=0, limit=None)
    machine.old_level(path, kills=1, shortages=70, limit=64 << 20)
    counters = machine.counters()
    machine.old_level(path, kills=2, shortages=90, limit=64 << 20)
    assert counters.since() == OomKills(in_cgroup=1, on_host=None, limit_bytes=64 << 20)


@pytest.mark.parametrize(
    ("cgroup", "mounts"),
    [
        ("", ""),
        ("0::/one\n", ""),
        ("0::/../one\n", UNIFIED),  # outside of this namespace
        ("4:memory:/elsewhere\n", SPLIT.format(top="/jobs")),
        ("0::/none/such\n", UNIFIED),
    ],
)
def test_without_a_counter_only_the_machines_is_known(tmp_path, cgroup, mounts):
    machine = Machine(tmp_path, cgroup=cgroup, mounts=mounts)
    assert machine.counters().since() == OomKills(None, None, None)
    machine.vmstat(3)
    counters = machine.counters()
    assert counters.since() == OomKills(None, 0, None)
    assert not counters.since().were_likely
    machine.vmstat(4)
    assert counters.since() == OomKills(None, 1, None)
    assert counters.since().were_likely


@contextlib.contextmanager
def memory_limit(limit_bytes: int):
    """A cgroup of version 1; the path of the file that takes pids in."""
    folder = FIRST_VERSION / f"paceline-{secrets.token_hex(4)}"
    if not os.access(FIRST_VERSION, os.W_OK):
        pytest.skip("no memory cgroup of version 1 may be made here")
    folder.mkdir()
    try:
        (folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


@pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")
def test_a_rank_that_outgrows_a_real_limit_is_told_to_have_run_out_of_memory(tmp_path):
    report = tmp_path / "report.json"
    grow = (
        "import os\n"
        "if os.environ['RANK'] == '0': os.read(0, 1)\n"
        "open('/proc/self/oom_score_adj', 'w').write('1000')\n"  # not its launcher, which is in that cgroup too
        "b'x' * (256 << 20)\n"
    )
    with memory_limit(128 << 20) as procs:
        launcher = [*PACELINE, "run", "-n", "2", "--report", str(report), "--no-python", sys.executable, "-c", grow]
        entered = ["sh", "-c", f'echo $$ > {procs} && exec "$@"', "sh", *launcher]
        reader, writer = os.pipe()  # what rank 0 waits for
        try:
            process = start(entered, stdin=reader)
            _, err = process.communicate(timeout=60)
        finally:
            os.close(reader)
            os.close(writer)
    assert process.returncode == 137
    assert err == (
        "paceline: rank 0 stopped by the launcher (collateral)\n"
        "paceline: rank 1 failed first, killed by SIGKILL: memory ran out (the limit of its cgroup is 128 MiB)\n"
    )
    assert [rank["cause"] for rank in json.loads(report.read_text())["ranks"]] == ["stopped", "oom"]
