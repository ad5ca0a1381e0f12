"""Who may import whom: the picture in docs/architecture.md, held by a test."""

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

PROJECT = pathlib.Path(__file__).parents[2]
SOURCE = PROJECT / "src" / "paceline"

# The ground: what every room may use. Each piece of it uses only those before it.
GROUND = ["errors", "processes", "ports", "environment", "waits", "rendezvous", "devices", "world", "timeline"]

# What each room may import besides itself and the ground.
ROOMS: dict[str, set[str]] = {
    "plan": set(),
    "comm": set(),
    "parallel": {"plan", "comm"},
    "pipeline": {"plan", "comm", "parallel"},
    "data": set(),
    "amp": {"parallel"},
    "checkpoint": set(),
    "launch": set(),
    "bench": {"parallel", "checkpoint", "launch"},
    "cli": {"plan", "comm", "parallel", "pipeline", "data", "amp", "checkpoint", "launch", "bench"},
}

# Within a room that has folders: what all of it may use, and what each folder may use besides that and itself.
SHARED: dict[str, set[str]] = {
    "comm": {"calls", "explain", "reductions", "shares", "transport"},
    "parallel": {"compiling", "fields", "groups", "live", "naming"},
    "launch": {"counts", "dispositions", "layout", "loop", "ports", "prctl", "wire"},
}
FOLDERS: dict[str, dict[str, set[str]]] = {
    "comm": {
        "engine": set(),
        "memory": {"engine"},
        "hosts": {"engine", "memory"},
        "group": {"engine", "memory"},
        "mpi": {"engine", "group"},
    },
    "parallel": {
        "replicas": set(),
        "buckets": {"replicas"},
        "reducer": {"replicas", "buckets"},
        "ddp": {"replicas", "buckets", "reducer"},
        "data_parallel": set(),
    },
    "launch": {
        "spec": set(),
        "failures": set(),
        "output": {"spec"},
        "hosts": {"spec"},
        "ranks": set(),
        "server": {"spec", "hosts", "ranks"},
        "lives": {"spec", "failures", "output", "ranks", "server"},
        "hangs": {"spec", "failures", "lives"},
        "supervisor": {"spec", "failures", "output", "hosts", "server", "lives", "hangs"},
        "agent": {"spec", "failures", "output", "hosts", "supervisor"},
        "conductor": {"failures", "output", "hosts", "supervisor", "agent"},
        "spawning": {"spec", "failures", "ranks", "server"},
        "runs": set(),
    },
}


def imports_of(path: pathlib.Path, package: str = "paceline") -> Iterator[str]:
    """What the file imports of ``package``: the component after it, wherever in the file the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{name.name}" for name in node.names]
        else:
            continue
        yield from (name.removeprefix(f"{package}.").split(".")[0] for name in names if name.startswith(f"{package}."))


def files_of(name: str) -> list[pathlib.Path]:
    """The files of a room, or of a piece of the ground. Entry points (``__main__.py``) may import anything."""
    single = SOURCE / f"{name}.py"
    return [single] if single.exists() else [p for p in (SOURCE / name).rglob("*.py") if p.stem != "__main__"]


def test_every_file_and_folder_is_a_known_room():
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    files = {path.stem for path in SOURCE.glob("*.py")} - {"__init__", "__main__"}
    assert folders | files == {*ROOMS, *GROUND}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_itself_the_ground_and_what_its_row_names(room):
    allowed = {room, *GROUND, *ROOMS[room]}
    for path in files_of(room):
        assert set(imports_of(path)) <= allowed, f"{path.relative_to(PROJECT)} imports more than {sorted(allowed)}"


@pytest.mark.parametrize("piece", GROUND)
def test_a_piece_of_the_ground_imports_itself_and_pieces_before_it(piece):
    allowed = set(GROUND[: GROUND.index(piece) + 1])
    for path in files_of(piece):
        assert set(imports_of(path)) <= allowed, f"{path.relative_to(PROJECT)} imports more than {sorted(allowed)}"


@pytest.mark.parametrize("room", FOLDERS)
def test_the_folders_of_a_room_are_known(room):
    assert {path.parent.name for path in (SOURCE / room).glob("*/__init__.py")} <= set(FOLDERS[room])


@pytest.mark.parametrize(
    ("room", "folder"), [(room, folder) for room, folders in FOLDERS.items() for folder in folders]
)
def test_a_folder_imports_of_its_room_what_its_row_names(room, folder):
    allowed = {folder, *SHARED[room], *FOLDERS[room][folder]}
    for path in (SOURCE / room / folder).rglob("*.py"):
        imported = set(imports_of(path, f"paceline.{room}"))
        assert imported <= allowed, f"{path.relative_to(PROJECT)} imports more of {room} than {sorted(allowed)}"


@pytest.mark.parametrize(("room", "name"), [(room, name) for room, names in SHARED.items() for name in sorted(names)])
def test_what_all_of_a_room_uses_imports_none_of_its_folders(room, name):
    assert set(imports_of(SOURCE / room / f"{name}.py", f"paceline.{room}")) <= SHARED[room]


def test_plans_know_nothing_of_torch():
    for path in (SOURCE / "plan").rglob("*.py"):
        assert not re.search(r"^\s*(import|from) torch\b", path.read_text(), re.MULTILINE), path


def test_only_the_ground_and_the_launcher_read_the_variables_of_ranks():
    names = re.compile(r"""["'](RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)["']""")
    readers = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if names.search(path.read_text())}
    assert readers == {"environment.py", "launch/layout.py"}


def test_the_architecture_page_shows_every_room():
    page = (PROJECT / "docs" / "architecture.md").read_text()
    for name in [f"{name}.py" if (SOURCE / f"{name}.py").exists() else f"{name}/" for name in (*ROOMS, *GROUND)]:
        assert re.search(rf"^ +{re.escape(name)} ", page, re.MULTILINE), f"docs/architecture.md does not show {name}"


def test_no_module_is_a_catch_all():
    banned = {"utils", "util", "helpers", "helper", "manager", "misc", "common", "handle"}
    assert not banned & {path.stem for path in PROJECT.glob("src/**/*.py")}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_every_module_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text()))
