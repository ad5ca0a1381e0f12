"""A process's place, from what launchers set. Each case is an environment and the literal placement."""

import re

import pytest

from paceline.environment import Placement, expand_nodelist, meeting_point, read_placement, shares_memory
from paceline.errors import EnvironmentVariableError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.5",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
AS_TORCHRUN_SAYS = Placement(3, 8, 1, 2, 1, 4, "10.0.0.5", 29400, True, "2", "torchrun")

BATCH_STEP = {
    "SLURM_JOB_ID": "1234",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "5",
    "SLURM_TASKS_PER_NODE": "3,2",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
}
SRUN = BATCH_STEP | {
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "7",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
}
ONE_HOST = {"SLURM_STEP_NODELIST": "gpu07", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
ONE_HOST |= {"SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_LOCALID": "4"}
# The CRC-32 of 1234.7 ends in 2701.
AS_SRUN_SAYS = Placement(4, 5, 1, 2, 1, 2, "gpu07", 22701, False, "1234.7.0", "slurm")

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "2",
    "PMIX_NAMESPACE": "prterun-host-1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "9"}


def message(environ):
    with pytest.raises(EnvironmentVariableError) as caught:
        read_placement(environ)
    return str(caught.value)


# -- one process --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environ",
    [{}, {"HOME": "/root", "PATH": "/bin"}, BATCH_STEP, {"LOCAL_WORLD_SIZE": "2"}],
    ids=["nothing", "unrelated", "a Slurm batch script without srun", "a remainder"],
)
def test_without_a_launcher_it_is_a_world_of_one(environ):
    assert read_placement(environ) == Placement(0, 1, None, None, None, None, None, None, False, "0", "none")


def test_an_address_alone_makes_no_job_but_is_kept_for_who_passes_rank_and_world_size():
    expected = Placement(rank=0, world_size=1, address="127.0.0.1", port=29500)
    assert read_placement({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}) == expected


def test_what_a_job_of_earlier_left_behind_does_not_count_without_a_launcher():
    assert read_placement({"TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}) == Placement()


def test_the_environment_is_only_read():
    environ = dict(SRUN)
    read_placement(environ)
    assert environ == SRUN


# -- torchrun -----------------------------------------------------------------------------------------------------


def test_torchruns_variables():
    assert read_placement(TORCHRUN) == AS_TORCHRUN_SAYS


def test_rank_and_world_size_alone_are_enough_for_a_place():
    assert read_placement({"RANK": "1", "WORLD_SIZE": "2"}) == Placement(1, 2, launcher="torchrun")


@pytest.mark.parametrize("around", [SRUN, OPEN_MPI, MPICH], ids=["srun", "open mpi", "mpich"])
def test_torchrun_within_a_schedulers_job_has_the_last_word_on_everything(around):
    assert read_placement(around | TORCHRUN) == AS_TORCHRUN_SAYS
    assert read_placement(around | {"RANK": "0", "WORLD_SIZE": "1"}) == Placement(0, 1, launcher="torchrun")


def test_an_argument_stands_in_for_the_other_half():
    assert read_placement({"RANK": "1"}, world_size=2) == Placement(1, 2, launcher="torchrun")
    assert read_placement({"WORLD_SIZE": "2"}, rank=1) == Placement(1, 2, launcher="torchrun")
    assert read_placement({"RANK": "1", "WORLD_SIZE": "2"}, rank=0, world_size=1).rank == 1
    assert read_placement({}, rank=1, world_size=2) == Placement()
    with pytest.raises(EnvironmentVariableError) as caught:
        read_placement({"WORLD_SIZE": "2"}, rank=2)
    assert str(caught.value) == "rank='2' is out of range: WORLD_SIZE is 2, so expected 0 to 1."


def test_spaces_around_a_number_do_no_harm():
    assert read_placement({"RANK": " 1", "WORLD_SIZE": "2\n"}).rank == 1


# -- Slurm --------------------------------------------------------------------------------------------------------


def test_a_slurm_step_on_two_hosts_meets_on_the_first():
    assert read_placement(SRUN) == AS_SRUN_SAYS


def test_a_slurm_step_on_one_host_meets_on_the_loopback():
    expected = Placement(4, 5, 4, 5, 0, 1, "127.0.0.1", 22701, False, "1234.7.0", "slurm")
    assert read_placement(SRUN | ONE_HOST) == expected


@pytest.mark.parametrize(
    ("node", "local_rank", "expected"), [("0", "1", 2), ("2", "1", 2), ("3", "0", 1), ("4", "11", 12)]
)
def test_tasks_per_node_are_counted_for_this_node(node, local_rank, expected):
    environ = SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1,12", "SLURM_STEP_NUM_NODES": "5"}
    environ |= {"SLURM_NODEID": node, "SLURM_LOCALID": local_rank, "SLURM_STEP_NUM_TASKS": "19"}
    assert read_placement(environ).local_world_size == expected


def test_two_steps_of_one_job_meet_at_different_ports():
    assert read_placement(SRUN).port != read_placement(SRUN | {"SLURM_STEP_ID": "8"}).port


def test_a_job_that_was_requeued_is_told_from_its_first_start_by_its_attempt():
    requeued = read_placement(SRUN | {"SLURM_RESTART_COUNT": "1"})
    assert (requeued.port, requeued.attempt) == (22701, "1234.7.1")


def test_an_exported_address_overrules_what_is_derived_from_the_job():
    exported = {"MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "12345", "WORLD_SIZE": "5"}
    placement = read_placement(SRUN | exported)
    assert (placement.address, placement.port, placement.rank) == ("10.1.1.1", 12345, 4)
    assert (placement.local_rank, placement.launcher, placement.attempt) == (1, "slurm", "0")


def test_the_jobs_hosts_stand_in_where_the_steps_are_not_told():
    environ = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_NODELIST"}
    assert read_placement(environ) == AS_SRUN_SAYS


def test_srun_that_sets_pmis_variables_too_is_still_slurm():
    assert read_placement(SRUN | {"PMI_RANK": "4", "PMI_SIZE": "5"}) == AS_SRUN_SAYS


# -- MPI ----------------------------------------------------------------------------------------------------------


def test_open_mpi_on_one_host():
    placement = read_placement(OPEN_MPI)
    assert placement == Placement(2, 4, 2, 4, None, None, "127.0.0.1", placement.port, launcher="open mpi")
    assert 20000 <= placement.port < 30000
    assert read_placement(OPEN_MPI | {"PMIX_NAMESPACE": "prterun-host-2"}).port != placement.port


def test_mpich_on_one_host_has_one_port_in_all_processes():
    placement = read_placement(MPICH)
    assert placement == Placement(1, 2, 1, 2, None, None, "127.0.0.1", placement.port, launcher="mpich")
    assert read_placement(MPICH | {"PMI_RANK": "0", "MPI_LOCALRANKID": "0", "PMI_FD": "6"}).port == placement.port


def test_cray_spells_local_ranks_in_its_own_way():
    environ = {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}
    assert read_placement(environ) == Placement(5, 8, 1, 4, launcher="mpich")


def test_mpirun_on_several_hosts_takes_the_address_from_the_user():
    environ = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert read_placement(environ) == Placement(2, 4, 0, 2, launcher="open mpi")
    exported = {"MASTER_ADDR": "n1", "MASTER_PORT": "4000"}
    assert read_placement(environ | exported) == Placement(2, 4, 0, 2, None, None, "n1", 4000, launcher="open mpi")


@pytest.mark.parametrize(("mpi", "launcher"), [(OPEN_MPI, "open mpi"), (MPICH, "mpich")])
def test_mpirun_in_a_slurm_job_counts_more_than_the_srun_that_started_its_daemons(mpi, launcher):
    daemon = SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert read_placement(daemon | mpi).launcher == launcher


# -- half set, contradicting, no numbers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "start"),
    [
        ({"RANK": "1"}, "WORLD_SIZE is not set, but RANK='1' is."),
        ({"WORLD_SIZE": "2"}, "RANK is not set, but WORLD_SIZE='2' is."),
        ({"LOCAL_RANK": "0"}, "RANK is not set, but LOCAL_RANK='0' is."),
        ({"LOCAL_RANK": "0", "RANK": "1"}, "WORLD_SIZE is not set, but RANK='1', LOCAL_RANK='0' is."),
        ({"WORLD_SIZE": "2"} | BATCH_STEP, "RANK is not set, but WORLD_SIZE='2' is."),
    ],
)
def test_half_set_variables_are_named_with_what_to_do(environ, start):
    text = message(environ)
    assert text.startswith(start)
    assert "`paceline run`, torchrun, srun or mpirun" in text
    assert "to run as one process" in text


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            SRUN | {"WORLD_SIZE": "2"},
            "WORLD_SIZE='2' contradicts SLURM_STEP_NUM_TASKS='5', which slurm has set. Unset WORLD_SIZE, or set RANK "
            "and WORLD_SIZE both to overrule the scheduler.",
        ),
        (SRUN | {"RANK": "0"}, "RANK='0' contradicts SLURM_PROCID='4', which slurm has set. Unset RANK, or"),
        (OPEN_MPI | {"LOCAL_RANK": "0"}, "LOCAL_RANK='0' contradicts OMPI_COMM_WORLD_LOCAL_RANK='2', which open mpi"),
        (MPICH | {"WORLD_SIZE": "4"}, "WORLD_SIZE='4' contradicts PMI_SIZE='2', which mpich has set."),
    ],
)
def test_contradictions_name_both_sides(environ, expected):
    assert message(environ).startswith(expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"RANK": "one"}, "RANK='one': expected an integer of at least 0. Correct or unset it."),
        ({"RANK": ""}, "RANK='': expected an integer of at least 0. Correct or unset it."),
        ({"RANK": "-1"}, "RANK='-1': expected an integer of at least 0. Correct or unset it."),
        ({"RANK": "1.0"}, "RANK='1.0': expected an integer of at least 0. Correct or unset it."),
        ({"RANK": "1_0"}, "RANK='1_0': expected an integer of at least 0. Correct or unset it."),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0': expected an integer of at least 1. Correct or unset it."),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE='': expected an integer of at least 1. Correct or unset it."),
        ({"RANK": "8"}, "RANK='8' is out of range: WORLD_SIZE is 8, so expected 0 to 7."),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK='x': expected an integer of at least 0. Correct or unset it."),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK='2' is out of range: LOCAL_WORLD_SIZE is 2, so expected 0 to 1."),
        ({"GROUP_RANK": "4"}, "GROUP_RANK='4' is out of range: GROUP_WORLD_SIZE is 4, so expected 0 to 3."),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http': expected an integer from 1 to 65535. Correct or unset it."),
        ({"MASTER_PORT": "0"}, "MASTER_PORT='0': expected an integer from 1 to 65535. Correct or unset it."),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT='65536': expected an integer from 1 to 65535. Correct or unset it."),
    ],
)
def test_what_is_no_number_in_range_is_named_with_its_value(changes, expected):
    assert message(TORCHRUN | changes) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID='x': expected an integer of at least 0. Correct or unset it."),
        ({"SLURM_PROCID": "5"}, "SLURM_PROCID='5' is out of range: SLURM_STEP_NUM_TASKS is 5, so expected 0 to 4."),
        (
            {"SLURM_LOCALID": "2"},
            "SLURM_LOCALID='2' is out of range: SLURM_STEP_TASKS_PER_NODE is 2, so expected 0 to 1.",
        ),
        (
            {"SLURM_NODEID": "2"},
            "SLURM_NODEID='2' is out of range: SLURM_STEP_TASKS_PER_NODE='3,2' lists 2 hosts.",
        ),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "3;2"},
            "SLURM_STEP_TASKS_PER_NODE='3;2': expected counts as Slurm writes them, such as '2(x3),1'.",
        ),
        (
            {"SLURM_STEP_NODELIST": "gpu[07-"},
            "SLURM_STEP_NODELIST='gpu[07-': expected a list of hosts as Slurm writes it, such as 'n[01-03,7],gpu'.",
        ),
    ],
)
def test_slurms_variables_are_named_by_slurms_names(changes, expected):
    assert message(SRUN | changes) == expected


# -- where to meet ------------------------------------------------------------------------------------------------


def test_the_meeting_point_is_address_and_port():
    assert meeting_point(AS_TORCHRUN_SAYS) == ("10.0.0.5", 29400)


@pytest.mark.parametrize(
    ("placement", "start", "end"),
    [
        (Placement(1, 4), "rank 1: MASTER_ADDR is not set, but the world has 4 processes", "127.0.0.1 on one machine"),
        (Placement(1, 4, address=""), "rank 1: MASTER_ADDR is empty, but", "127.0.0.1 on one machine"),
        (Placement(1, 4, address="n"), "rank 1: MASTER_PORT is not set, but", "such as 29500"),
    ],
)
def test_a_missing_meeting_point_says_what_to_set(placement, start, end):
    with pytest.raises(EnvironmentVariableError) as caught:
        meeting_point(placement)
    assert str(caught.value).startswith(start)
    assert f"{end}; `paceline run` and torchrun do that by themselves." in str(caught.value)


# -- node lists ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu07", ["gpu07"]),
        ("a,b-c,d.example.org", ["a", "b-c", "d.example.org"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[01-03,7],gpu", ["n01", "n02", "n03", "n7", "gpu"]),
        ("n[008-011]", ["n008", "n009", "n010", "n011"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[5]-ib", ["n5-ib"]),
        ("rack[1-2]node[08-09]", ["rack1node08", "rack1node09", "rack2node08", "rack2node09"]),
        ("r[1,3]n[0-1]x,s[2]", ["r1n0x", "r1n1x", "r3n0x", "r3n1x", "s2"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_node_lists(text, expected):
    assert expand_nodelist(text) == expected


@pytest.mark.parametrize(
    "text", ["", ",", "a,", "n[", "n]", "n[]", "n[1-]", "n[-1]", "n[a-b]", "n[1,]", "n[1-[2-3]]", "n[[1-2]]", "a b"]
)
def test_what_is_no_node_list_is_refused(text):
    with pytest.raises(EnvironmentVariableError) as caught:
        expand_nodelist(text)
    assert str(caught.value) == (
        f"node list={text!r}: expected a list of hosts as Slurm writes it, such as 'n[01-03,7],gpu'."
    )


def test_ranks_share_memory_unless_they_are_told_not_to():
    assert shares_memory({})
    assert shares_memory({"PACELINE_SHARED_MEMORY": "1"})
    assert not shares_memory({"PACELINE_SHARED_MEMORY": "0"})
    expected = "PACELINE_SHARED_MEMORY='no': expected an integer from 0 to 1. Correct or unset it."
    with pytest.raises(EnvironmentVariableError, match=re.escape(expected)):
        shares_memory({"PACELINE_SHARED_MEMORY": "no"})
