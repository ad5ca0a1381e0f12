import os
import subprocess
import sys

import pytest
import torch

from paceline.errors import LaunchError
from paceline.launch.counts import resolve_num_ranks


def test_a_number_is_itself():
    assert resolve_num_ranks("12") == 12


def test_what_is_no_count_is_named():
    with pytest.raises(LaunchError, match="expected a number, auto, cpu or gpu for -n, but got 'two'"):
        resolve_num_ranks("two")


def test_cpu_counts_the_cores_that_may_be_used():
    one_core = str(min(os.sched_getaffinity(0)))
    code = (
        f"import os; os.sched_setaffinity(0, [{one_core}])\n"
        "from paceline.launch.counts import resolve_num_ranks; print(resolve_num_ranks('cpu'))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"


def test_gpu_and_auto_count_what_torch_finds(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_num_ranks("auto") == len(os.sched_getaffinity(0))
    with pytest.raises(
        LaunchError, match="-n gpu wants a CUDA device, but torch finds none here; use -n cpu, or a num"
    ):
        resolve_num_ranks("gpu")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_each_device_gets_a_rank():
    assert resolve_num_ranks("gpu") == resolve_num_ranks("auto") == torch.cuda.device_count()


def test_a_torch_that_cannot_count_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise RuntimeError('half installed')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(LaunchError, match="torch could not count this host's devices: RuntimeError: half installed"):
        resolve_num_ranks("gpu")
