"""The backends are known to torch.distributed however paceline and torch were imported."""

import subprocess
import sys

import pytest
import torch.distributed as dist

LIST = "import torch.distributed as dist; print({'shm', 'hier'} <= set(dist.Backend.backend_list))"


def output_of(code, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={"PATH": "", **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    ).stdout


@pytest.mark.parametrize(
    "imports", ["import torch, paceline", "import paceline, torch", "import torch"], ids=lambda text: text
)
def test_torch_knows_the_backends_whichever_was_imported_first(imports):
    assert output_of(f"{imports}; {LIST}") == "True\n"


def test_with_torchs_plugins_switched_off_an_import_of_torch_first_or_a_use_of_paceline_is_enough():
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert output_of(f"import torch, paceline; {LIST}", **off) == "True\n"
    assert output_of(f"import paceline, torch; paceline.init; {LIST}", **off) == "True\n"


def test_torchs_import_brings_in_nothing_of_ours_but_the_names():
    code = "import sys, torch; print(sorted(name for name in sys.modules if name.startswith('paceline')))"
    expected = ["paceline", "paceline.comm", "paceline.comm.register", "paceline.environment", "paceline.errors"]
    assert output_of(code) == f"{expected}\n"


def test_what_torch_chooses_by_itself_stays():
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
    assert dist.Backend.backend_capability["shm"] == ["cpu"]


def test_off_linux_shared_memory_is_not_offered():
    code = f"import sys, torch.distributed; sys.platform = 'darwin'; import paceline; {LIST}"
    assert output_of(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "False\n"
