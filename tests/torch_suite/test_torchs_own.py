"""The tests of distributed training that ship with torch, against paceline.

They are those of ``torch.testing._internal.distributed.distributed_test``; nothing of them is copied. ``names.json``
says which run, on how many ranks, and why the others are left out.
"""

import importlib.util
import json
import pathlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import paceline  # noqa: F401 - registers its backends
from torch_suite.host import Host

LISTS = json.loads(pathlib.Path(__file__).with_name("names.json").read_text())
TESTS = pathlib.Path(torch.__file__).parent / "testing" / "_internal" / "distributed" / "distributed_test.py"

pytestmark = pytest.mark.slow
if torch.__version__.split("+")[0] != LISTS["torch"]:
    pytest.skip(f"the lists are of torch {LISTS['torch']}; this is {torch.__version__}", allow_module_level=True)
if not TESTS.is_file():
    pytest.skip("this torch has come without its tests", allow_module_level=True)
if missing := [name for name in ("numpy", "expecttest", "hypothesis") if importlib.util.find_spec(name) is None]:
    pytest.skip(f"torch's tests need {' and '.join(missing)}", allow_module_level=True)


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    """Where the tests have been imported, once."""
    host = Host()
    yield host
    host.close()


def _cases(part: str) -> list[object]:
    return [pytest.param(name, int(ranks), id=name) for ranks, names in LISTS[part].items() for name in names]


def _check(host: Host, name: str, world_size: int, backend: str) -> None:
    if backend not in dist.Backend.backend_list:
        pytest.skip(f"no backend {backend} here")
    if failure := host.run(name, world_size, backend):
        pytest.fail(failure, pytrace=False)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize(("name", "world_size"), _cases("wrapper"))
def test_of_the_wrapper_passes(host, name, world_size, backend):
    _check(host, name, world_size, backend)


@pytest.mark.parametrize(("name", "world_size"), _cases("collectives"))
def test_of_collectives_passes_over_shared_memory(host, name, world_size):
    _check(host, name, world_size, "shm")


def test_each_shipped_test_runs_or_is_left_out_for_a_reason(host):
    listed = [*LISTS["wrapper"].values(), *LISTS["collectives"].values(), *LISTS["left out"].values()]
    assert sorted(name for names in listed for name in names) == sorted(host.names())


def test_a_test_that_fails_tells_what_its_ranks_raised(host):
    failure = host.run("test_ddp_join_model_equivalence", 2, "gloo")  # left out because it must fail
    assert failure.count("AssertionError: Tensor-likes are not close!") == 2


def test_a_test_that_skips_itself_is_a_failure(host):
    failure = host.run("test_post_localSGD_optimizer_parity_with_hierarchical_sgd", 3, "gloo")  # for even numbers
    assert failure.count("SystemExit: 87") == 3
