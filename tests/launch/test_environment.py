import pytest

from paceline.launch.environment import shared_environment


@pytest.mark.parametrize(("num_ranks", "num_cores", "threads"), [(1, 8, "8"), (3, 8, "2"), (8, 8, "1"), (9, 8, "1")])
def test_the_cores_are_shared_out_as_threads(num_ranks, num_cores, threads):
    assert shared_environment({}, num_ranks=num_ranks, num_cores=num_cores)["OMP_NUM_THREADS"] == threads


def test_what_the_user_set_stays():
    current = {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    assert shared_environment(current, num_ranks=2, num_cores=8) == {}
