"""What is shipped: the wheel has all of paceline and nothing else, and works where nothing of this checkout is."""

import email
import os
import pathlib
import subprocess
import sys
import sysconfig
import zipfile

import pytest

import paceline

PROJECT = pathlib.Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling", reason="hatchling builds the wheel")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, timeout=60)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_its_types_and_its_licence(wheel):
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src/paceline"],
        cwd=PROJECT,
        check=True,
        capture_output=True,
        text=True,
    )
    sources = {name.removeprefix("src/") for name in tracked.stdout.splitlines() if (PROJECT / name).exists()}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        told = email.message_from_bytes(archive.read(metadata))
    assert {name for name in names if ".dist-info/" not in name} == sources
    assert {"paceline/py.typed", "paceline/bench/report/page.html"} <= sources
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert (told["Name"], told["Version"]) == ("paceline", paceline.__version__)


def test_the_wheel_works_in_an_environment_that_has_only_what_it_depends_on(wheel, tmp_path):
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=60)
    install = [sys.executable, "-m", "pip", "--python", str(venv), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=60)
    # What is found by PYTHONPATH does not read .pth files, so the editable checkout is not among it.
    environ = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    script = tmp_path / "script.py"
    script.write_text("import paceline\nwith paceline.init() as world:\n    world.print(paceline.__file__)\n")
    command = [venv / "bin" / "paceline", "run", "-n", "2", script]
    done = subprocess.run(command, env=environ, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60)
    (told,) = [line for line in done.stdout.splitlines() if "paceline" in line]
    assert str(venv) in told
    version = [venv / "bin" / "paceline", "--version"]
    done = subprocess.run(version, env=environ, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(f"paceline, version {paceline.__version__} (torch ")
