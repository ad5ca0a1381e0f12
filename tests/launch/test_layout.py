import pytest

from paceline.launch.hosts.layout import Layout, rank_environment, shared_environment, virtual_local_rank


@pytest.mark.parametrize(("num_ranks", "num_cores", "threads"), [(1, 8, "8"), (3, 8, "2"), (8, 8, "1"), (9, 8, "1")])
def test_the_cores_are_shared_out_as_threads(num_ranks, num_cores, threads):
    assert shared_environment({}, num_ranks=num_ranks, num_cores=num_cores, is_alone=True)["OMP_NUM_THREADS"] == threads


def test_what_the_user_set_stays():
    current = {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    assert shared_environment(current, num_ranks=2, num_cores=8, is_alone=True) == {}


def test_only_the_ranks_of_one_host_meet_on_the_loopback():
    assert shared_environment({}, num_ranks=1, num_cores=1, is_alone=True)["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in shared_environment({}, num_ranks=1, num_cores=1, is_alone=False)


def test_a_rank_finds_torchruns_variables():
    layout = Layout("job", 2, num_ranks=4, first_rank=3, world_size=7, node_rank=1, num_nodes=2, address="a", port=5)
    assert rank_environment(layout, 2, role="trainer", max_restarts=3) == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "7",
        "ROLE_NAME": "trainer",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "5",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


@pytest.mark.parametrize(("visible", "mine"), [("", "1"), ("6,4", "4"), ("GPU-a,GPU-b", "GPU-b")])
def test_under_a_virtual_local_rank_each_rank_sees_its_own_gpu_alone(visible, mine):
    environment = virtual_local_rank({"RANK": "5", "LOCAL_RANK": "1"}, {"CUDA_VISIBLE_DEVICES": visible})
    assert environment == {"RANK": "5", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": mine}
