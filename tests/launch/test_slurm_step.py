"""What Slurm's variables come to in ``srun paceline run``, and which flags overrule them."""

import pytest

from paceline.cli.options import spec_of
from paceline.cli.run import run
from paceline.environment import read_placement
from paceline.errors import LaunchError
from paceline.launch.hosts.slurm_step import read_step
from paceline.launch.spec.nodes import NodesSpec


def step_variables(tasks_per_node, *, task, node, gpus=None, visible=None):
    """What srun sets in a task of step 3 of job 17 on hosts a1, a2, ..."""
    num_tasks, num_nodes = sum(tasks_per_node), len(tasks_per_node)
    found = {
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_ID": "3",
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(task - sum(tasks_per_node[:node])),
        "SLURM_NODEID": str(node),
        "SLURM_NTASKS": str(num_tasks),
        "SLURM_STEP_NUM_TASKS": str(num_tasks),
        "SLURM_STEP_NUM_NODES": str(num_nodes),
        "SLURM_STEP_NODELIST": f"a[1-{num_nodes}]" if num_nodes > 1 else "a1",
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, tasks_per_node)),
    }
    if gpus is not None:
        found["SLURM_GPUS_ON_NODE"] = str(gpus)
    if visible is not None:
        found["CUDA_VISIBLE_DEVICES"] = visible
    return found


PORT = read_placement(step_variables([1, 1], task=0, node=0)).port  # where paceline.init would meet


@pytest.fixture
def spec(monkeypatch):
    """The launch that ``paceline run FLAGS`` would be in an environment that has these variables too."""

    def spec(flags, variables):
        for name in ("SLURM_STEP_NUM_TASKS", "SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        given = run.make_context("run", [*flags.split(), "-m", "module"]).params
        return spec_of(given.pop("script"), given.pop("args"), given)

    return spec


def test_a_task_a_host_is_a_launcher_a_host(spec):
    launch = spec("-n 4", step_variables([1, 1, 1], task=2, node=2))
    assert launch.nodes == NodesSpec(3, 3, node_rank=2, run_id="17.3.0", address="a1", shares_output=True)
    assert (launch.num_ranks, launch.master_port, launch.meeting_point) == (4, PORT, f"a1:{PORT}")


@pytest.mark.parametrize(("flags", "gpus", "ranks"), [("", None, 1), ("", 4, 4), ("-n 2", 4, 2), ("-n cpu", 4, 0)])
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_such_a_launcher_has_as_many_ranks_as_it_is_told_or_the_step_has_gpus(spec, flags, gpus, ranks, num_nodes):
    launch = spec(flags, step_variables([1] * num_nodes, task=0, node=0, gpus=gpus))
    assert launch.num_ranks == ranks or (ranks == 0 and launch.num_ranks >= 1)


def test_several_tasks_a_host_are_a_rank_each(spec):
    launch = spec("", step_variables([2, 1], task=1, node=0, gpus=8))
    host = "node 0"
    assert launch.nodes == NodesSpec(3, 3, node_rank=1, run_id="17.3.0", address="a1", host=host, shares_output=True)
    assert (launch.num_ranks, launch.has_virtual_local_rank) == (1, False)
    assert spec("-n 2", step_variables([2, 1], task=1, node=0)).num_ranks == 1
    assert spec("", step_variables([2, 1], task=2, node=1)).nodes.host == "node 1"


def test_on_one_host_they_meet_on_the_loopback(spec):
    launch = spec("", step_variables([2], task=1, node=0))
    assert (launch.nodes.address, launch.nodes.most, launch.master_port) == ("127.0.0.1", 2, PORT)


def test_tasks_that_are_bound_to_a_gpu_each_see_it_as_device_0(spec):
    assert spec("", step_variables([2, 2], task=3, node=1, visible="5")).has_virtual_local_rank
    assert not spec("", step_variables([2, 2], task=3, node=1, visible="4,5")).has_virtual_local_rank
    assert not spec("", step_variables([1, 1], task=1, node=1, visible="5")).has_virtual_local_rank


def test_another_number_of_ranks_than_of_tasks_on_a_host_is_an_error(spec):
    with pytest.raises(LaunchError) as caught:
        spec("-n 4", step_variables([2, 2], task=0, node=0))
    assert str(caught.value) == (
        "-n 4, but srun has started 2 tasks on this host, and each of them is one rank; leave -n out, or have one task "
        "a host: srun --ntasks-per-node=1 paceline run -n 4 ..."
    )


def test_an_address_or_a_port_that_is_given_overrules_what_is_derived(spec):
    variables = step_variables([1, 1], task=1, node=1)
    assert spec("--master-addr b7 --master-port 7", variables).meeting_point == "b7:7"
    assert spec("--master-port 7 --rdzv-id mine", variables).nodes.run_id == "mine"
    assert spec("", variables | {"MASTER_ADDR": "fd00::1", "MASTER_PORT": "9"}).meeting_point == "[fd00::1]:9"


@pytest.mark.parametrize(
    ("flags", "nodes"),
    [
        ("--standalone", NodesSpec()),
        ("--nnodes 1", NodesSpec()),
        ("--nnodes 4 --node-rank 2 --master-addr h", NodesSpec(4, 4, node_rank=2, address="h")),
        ("--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint h:1", NodesSpec(1, 4, backend="c10d", endpoint="h:1")),
        ("-n 2 -g 8", NodesSpec(2, 2)),
    ],
)
def test_flags_that_say_which_hosts_there_are_overrule_slurm(spec, flags, nodes):
    launch = spec(flags, step_variables([2, 2], task=1, node=0, visible="5"))
    assert (launch.nodes, launch.has_virtual_local_rank) == (nodes, False)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_NODEID": "0"},
        step_variables([1, 1], task=0, node=0) | {"RANK": "0", "WORLD_SIZE": "2"},
        step_variables([1, 1], task=0, node=0) | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"},
    ],
    ids=["no Slurm", "a batch script", "a rank", "a process of mpirun's"],
)
def test_where_there_is_no_step_a_launch_is_of_this_host_alone(spec, variables):
    launch = spec("-n 3", variables)
    assert (launch.nodes, launch.num_ranks, launch.master_port) == (NodesSpec(), 3, 0)
    assert read_step({}) is None
