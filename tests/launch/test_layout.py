import pytest

from paceline.launch.layout import (
    Layout,
    place_among,
    rank_environment,
    shared_environment,
    virtual_local_rank,
)


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
    layout = Layout("job", 2, address="a", port=5, **place_among([3, 4], ["", ""], 1))
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


def test_a_single_rank_serves_its_own_store():
    layout = Layout.of_one_host("job", 0, 1, 5)
    environment = rank_environment(layout, 0, role="default", max_restarts=0)
    assert environment["TORCHELASTIC_USE_AGENT_STORE"] == "False"  # said, since a launcher's own environment may differ


def places(counts, hosts):
    """Of each launcher: ranks from and to, local ranks from and of, node and of."""
    names = ("first_rank", "num_ranks", "first_local_rank", "local_world_size", "node_rank", "num_nodes")
    places = [place_among(counts, hosts, position) for position in range(len(counts))]
    assert all(place["world_size"] == sum(counts) for place in places)
    return [tuple(place[name] for name in names) for place in places]


def test_launchers_that_have_a_host_each():
    assert places([4], [""]) == [(0, 4, 0, 4, 0, 1)]
    assert places([1, 3, 2], ["", "", ""]) == [(0, 1, 0, 1, 0, 3), (1, 3, 0, 3, 1, 3), (4, 2, 0, 2, 2, 3)]


def test_launchers_that_share_hosts_share_their_local_ranks():
    assert places([1, 1, 1], ["a", "a", "b"]) == [(0, 1, 0, 2, 0, 2), (1, 1, 1, 2, 0, 2), (2, 1, 0, 1, 1, 2)]
    assert places([1, 1, 1, 1], ["a", "b", "a", "b"]) == [  # as Slurm's cyclic distribution places tasks
        (0, 1, 0, 2, 0, 2),
        (1, 1, 0, 2, 1, 2),
        (2, 1, 1, 2, 0, 2),
        (3, 1, 1, 2, 1, 2),
    ]


@pytest.mark.parametrize(("visible", "mine"), [("", "1"), ("6,4", "4"), ("GPU-a,GPU-b", "GPU-b")])
def test_under_a_virtual_local_rank_each_rank_sees_its_own_gpu_alone(visible, mine):
    environment = virtual_local_rank({"RANK": "5", "LOCAL_RANK": "3"}, 1, {"CUDA_VISIBLE_DEVICES": visible})
    assert environment == {"RANK": "5", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": mine}
