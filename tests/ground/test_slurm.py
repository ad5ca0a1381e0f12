"""Plain ``srun python script.py``, and ``srun paceline run script.py``, under real daemons of Slurm."""

import json
import pathlib
import re
import socket
import subprocess

import pytest

from paceline.rendezvous.slurm_nodes import address_of_node
from support.commands import PACELINE, start, wait_until, write_script
from support.slurm import slurm

BATCH_FILE = pathlib.Path(__file__).parents[2] / "examples" / "launching" / "train.sbatch"

ENDED = ("COMPLETED", "FAILED", "CANCELLED")

pytestmark = pytest.mark.slow

# Prints a line for each rank, once as many ranks as the second argument says are in their worlds.
MEET = """
import json, os, pathlib, sys, time
import torch, torch.distributed as dist
import paceline
with paceline.init(timeout=40) as world:
    total = torch.tensor([float(world.rank + 1)])
    dist.all_reduce(total)
    folder, num_ranks = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    (folder / f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}.{world.rank}").touch()
    while len(list(folder.iterdir())) < num_ranks:
        time.sleep(0.01)
    place = world.rank, world.world_size, world.local_rank, world.local_world_size, world.node_rank, world.num_nodes
    sys.stdout.write(json.dumps([*place, world.backend, total.item()]) + "\\n")
    sys.stdout.flush()
    world.barrier()
"""

# Writes down each rank's place in each life; rank 3 exits with 7 at its end if there is a second argument.
LAUNCHED = """
import json, os, pathlib, sys
import torch, torch.distributed as dist
import paceline
with paceline.init(timeout=40) as world:
    total = torch.tensor([float(world.rank + 1)])
    dist.all_reduce(total)
    place = world.rank, world.world_size, world.local_rank, world.local_world_size, world.node_rank, world.num_nodes
    life = os.environ["TORCHELASTIC_RESTART_COUNT"]
    pathlib.Path(sys.argv[1], f"{life} {world.rank}").write_text(json.dumps([*place, world.backend, total.item()]))
    world.barrier()
    if len(sys.argv) > 2 and world.rank == 3:
        sys.exit(7)
    world.barrier()
"""

TRAIN = """
import json, os, pathlib, sys
import torch, torch.distributed as dist
import paceline
folder = pathlib.Path(sys.argv[1])
saved, life = folder / "saved", os.environ.get("SLURM_RESTART_COUNT", "0")
with paceline.init(timeout=40) as world:
    first = int(saved.read_text()) if saved.exists() else 0
    last = first + 5 if first else 10**9
    for step in range(first, last):
        dist.all_reduce(torch.ones(1))
        stopped = world.should_stop()
        (folder / f"stepped {life} {world.rank}").touch()
        if stopped:
            break
    if world.is_main:
        saved.write_text(str(step + 1))
    (folder / f"life {life} rank {world.rank}").write_text(json.dumps([first, step, stopped]))
sys.exit(75 if stopped else 0)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def lines_of(process):
    """What the ranks print, in order."""
    try:
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"not done: {process.communicate()}") from None
    assert process.returncode == 0, out + err
    return sorted(json.loads(line) for line in out.splitlines() if line.startswith("["))


def expect_ranks(num_nodes, per_node, backend):
    size = num_nodes * per_node
    return [
        [rank, size, rank % per_node, per_node, rank // per_node, num_nodes, backend, size * (size + 1) / 2]
        for rank in range(size)
    ]


def test_ranks_on_two_nodes_that_share_a_hosts_name_meet_and_are_told_apart(cluster, tmp_path):
    script = write_script(tmp_path, MEET)
    (tmp_path / "met").mkdir()
    command = ["srun", "-N2", "--ntasks-per-node=2", "python", script, str(tmp_path / "met"), "4"]
    assert lines_of(start(command, env=cluster.env)) == expect_ranks(2, 2, "hier")


def test_two_jobs_and_two_steps_of_a_job_run_beside_each_other_on_one_node(cluster, tmp_path):
    script = write_script(tmp_path, MEET)
    (tmp_path / "met").mkdir()
    step = f"srun -n2 --exact python {script} {tmp_path / 'met'} 6"
    jobs = [
        start(["salloc", "-N1", "-w", "n1", "-n4", "bash", "-c", f"{step} & {step} & wait"], env=cluster.env),
        start(step.replace("srun", "srun -N1 -w n1").split(), env=cluster.env),
    ]
    first, second = [lines_of(job) for job in jobs]
    assert second == expect_ranks(1, 2, "shm")
    assert first == sorted(expect_ranks(1, 2, "shm") * 2)


def written_in(folder, life=0):
    """What the ranks of a life have written, in order."""
    return sorted(json.loads(path.read_text()) for path in folder.glob(f"{life} *"))


def test_srun_paceline_run_is_a_launcher_a_host_or_where_a_host_has_several_tasks_a_rank_a_task(cluster, tmp_path):
    launch = [*PACELINE, "run", "-n2", "--max-restarts=1", write_script(tmp_path, LAUNCHED)]
    folders = {name: tmp_path / name for name in ("hosts", "tasks", "batch")}
    for folder in folders.values():
        folder.mkdir()
    batch = ["sbatch", "--wait", "-N2", "-n4", f"--output={tmp_path / 'said'}"]
    commands = {
        "hosts": ["srun", "-N2", "--ntasks-per-node=1", *launch, str(folders["hosts"]), "fail"],
        "tasks": ["srun", "-N2", "--ntasks-per-node=2", *launch, str(folders["tasks"])],
        "batch": [*batch, f"--wrap={' '.join(launch)} {folders['batch']}"],  # no step, so a launch of its host alone
    }
    processes = {name: start(command, env=cluster.env) for name, command in commands.items()}
    said = {name: process.communicate(timeout=90)[1] for name, process in processes.items()}
    assert {name: process.returncode for name, process in processes.items()} == {"hosts": 7, "tasks": 0, "batch": 0}, (
        said
    )
    assert written_in(folders["hosts"], life=0) == written_in(folders["hosts"], life=1) == expect_ranks(2, 2, "hier")
    assert written_in(folders["tasks"]) == expect_ranks(2, 2, "hier")
    assert written_in(folders["batch"]) == expect_ranks(1, 2, "shm")
    for line, (of_hosts, of_tasks) in {  # what all launchers know is said once in each life
        "paceline: 4 ranks on 2 hosts, which meet at 127.0.0.1 port ": (2, 1),
        f"paceline: on {socket.gethostname()}:\n": (2, 0),
        "paceline: rank 3 failed first, exit code 7\n": (2, 0),
        "paceline: all ranks start again (restart 1 of 1)\n": (1, 0),
    }.items():
        assert (said["hosts"].count(line), said["tasks"].count(line)) == (of_hosts, of_tasks), said


def cut_wait_short(cluster, job):
    """A requeued job waits for two minutes, here for two seconds.

    Not less: within the second in which its first life has ended Slurm refuses to start it again, and it has failed.
    """
    wait_until(
        lambda: (cluster.state_of(job), cluster.reason_of(job)) == ("PENDING", "BeginTime") and cluster.is_idle()
    )
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")


def test_a_batch_job_that_is_told_to_stop_saves_is_requeued_and_goes_on(cluster, tmp_path):
    write_script(tmp_path, TRAIN, "train.py")
    job = cluster.submit("-N2", "--ntasks-per-node=1", str(BATCH_FILE), "train.py", str(tmp_path), cwd=tmp_path)
    try:
        wait_until(lambda: len(list(tmp_path.glob("stepped 0 *"))) == 2)
        cluster.run("scancel", "--signal=USR1", job)
        cut_wait_short(cluster, job)
        wait_until(lambda: cluster.state_of(job) in ENDED, 60.0)
        before, after = ([json.loads((tmp_path / f"life {n} rank {r}").read_text()) for r in (0, 1)] for n in (0, 1))
    except (AssertionError, OSError) as error:
        raise AssertionError((tmp_path / f"slurm-{job}.out").read_text()) from error
    assert before[0] == before[1]
    (_, stopped_at, _) = before[0]
    assert before[0] == [0, stopped_at, True]
    assert after == [[stopped_at + 1, stopped_at + 5, False]] * 2


def test_a_name_that_leads_nowhere_and_that_slurm_does_not_know_stays_as_it_is(cluster, monkeypatch):
    assert address_of_node("n9.invalid") == "n9.invalid"  # no cluster is asked: its configuration is not set
    monkeypatch.setenv("SLURM_CONF", str(cluster.folder / "slurm.conf"))
    assert address_of_node("n9") == "n9"
    assert address_of_node("n2") == "127.0.0.1"
    assert address_of_node("localhost") == "localhost"


def test_the_batch_file_runs_the_example(cluster, tmp_path):
    output = tmp_path / "output"
    options = ["-N1", "--ntasks-per-node=2", "--cpus-per-task=1", f"--output={output}"]
    example = ["examples/digits.py", "--epochs", "1"]
    job = cluster.submit(*options, str(BATCH_FILE), *example, cwd=BATCH_FILE.parents[2])
    wait_until(lambda: cluster.state_of(job) in ENDED, 100.0)
    assert re.search(r"^epoch 0: [\d.]+% of 359 test digits right$", output.read_text(), re.MULTILINE)
    assert re.search(r"^[\d,]+ samples/s on 2 x (cpu|cuda)$", output.read_text(), re.MULTILINE)
