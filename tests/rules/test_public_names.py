"""What ``import paceline`` offers, and what it must not do."""

import ast
import json
import pathlib
import subprocess
import sys

import pytest

import paceline

SOURCE = pathlib.Path(paceline.__file__).parent

PUBLIC = [
    "BatchSampler",
    "Checkpointer",
    "DataLoader",
    "DataParallel",
    "DistributedDataParallel",
    "DistributedSampler",
    "Pipeline",
    "SyncBatchNorm",
    "World",
    "amp",
    "errors",
    "fingerprint",
    "gather",
    "global_mean",
    "init",
    "load",
    "save",
    "shutdown",
    "spawn",
]

OBSERVE = """
import json, logging, os, random, sys, threading
state = lambda: [dict(os.environ), random.getstate() == start, logging.root.level, len(logging.root.handlers),
                 sorted(logging.root.manager.loggerDict), threading.active_count(), list(sys.path)]
start = random.getstate()
before = state()
import paceline
print(json.dumps([before == state(), sorted({"torch", "numpy", "click"} & set(sys.modules)), dir(paceline)]))
"""


def test_the_public_names_are_these():
    assert paceline.__all__ == PUBLIC
    assert sorted(paceline.__all__) == paceline.__all__
    for name in PUBLIC:
        assert getattr(paceline, name).__doc__


def test_import_changes_nothing_and_loads_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", OBSERVE], capture_output=True, text=True, check=True, timeout=60)
    unchanged, heavy, names = json.loads(done.stdout)
    assert unchanged
    assert heavy == []
    assert set(PUBLIC) <= set(names)
    assert done.stderr == ""


def test_loading_every_public_name_keeps_the_random_state_and_starts_no_process_group():
    code = (
        "import torch, numpy, random, paceline\n"
        "before = torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist(), random.getstate()\n"
        "[getattr(paceline, name) for name in paceline.__all__]\n"
        "after = torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist(), random.getstate()\n"
        "print(before == after, torch.distributed.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "True False\n"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'paceline' has no attribute 'nothing'$"):
        _ = paceline.nothing


@pytest.mark.parametrize("path", sorted(SOURCE.glob("*/__init__.py")), ids=lambda path: path.parent.name)
def test_what_a_room_exports_is_sorted_and_there(path):
    module = __import__(f"paceline.{path.parent.name}", fromlist=["_"])
    names = getattr(module, "__all__", None)
    assert names is not None
    assert names == sorted(names)
    for name in names:
        assert hasattr(module, name)


def _public_functions():
    for room in ("world", "data", "parallel", "plan"):
        for path in [SOURCE / f"{room}.py"] if (SOURCE / f"{room}.py").exists() else (SOURCE / room).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                    yield path.name, node


def test_public_functions_that_raise_say_so():
    exported = {name for name in PUBLIC if name[0].islower()} | {"barrier", "main_first", "seed", "plan_buckets"}
    for file, node in _public_functions():
        if node.name in exported and any(isinstance(part, ast.Raise) for part in ast.walk(node)):
            assert "Raises:" in (ast.get_docstring(node) or ""), f"{file}: {node.name}"
