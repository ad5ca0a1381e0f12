"""The shell scripts of examples/launching start ranks; that of Slurm is run in tests/ground/test_slurm.py."""

import importlib.util
import os
import shutil

import pytest

from support.commands import write_script
from support.examples import BIN, run_as_typed

pytestmark = pytest.mark.slow

WHERE = """
import sys, torch, paceline
with paceline.init() as world:
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    sys.stdout.write(f"rank {world.rank} of {world.world_size}, {total.item():.0f} in all, told {sys.argv[1:]}\\n")
"""
HEARD = ["rank 0 of 2, 2 in all, told ['--lr', '0.1']", "rank 1 of 2, 2 in all, told ['--lr', '0.1']"]

# As root, with more ranks than cores, and without its TCP transport, whose start takes a second.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_btl": "self,sm",
}


def lines_of_ranks(out):
    """What each rank has said, without the launcher's mark of the rank."""
    return sorted(
        line.partition("rank ")[1] + line.partition("rank ")[2] for line in out.splitlines() if "told" in line
    )


def test_hosts_are_reached_from_one_terminal(tmp_path):
    script = write_script(tmp_path, WHERE)
    out = run_as_typed(f"examples/launching/hosts.sh localhost:2 {script} --lr 0.1")
    assert lines_of_ranks(out) == HEARD


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
@pytest.mark.skipif(shutil.which("mpirun", path=f"{BIN}{os.pathsep}{os.environ['PATH']}") is None, reason="no mpirun")
def test_each_process_of_mpirun_is_a_rank(tmp_path):
    script = write_script(tmp_path, WHERE)
    out = run_as_typed(f"examples/launching/mpirun.sh 2 {script} --lr 0.1", env=OPEN_MPI)
    assert lines_of_ranks(out) == HEARD
