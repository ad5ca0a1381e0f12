"""Examples are short, and say by what commands they are run: those that the tests in tests/examples run."""

import ast
import pathlib
import re

import pytest

from support.examples import EXAMPLES, commands_of

SCRIPTS = sorted(path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py"))
SHELL = sorted(
    path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*") if path.suffix in (".sh", ".sbatch")
)
TESTS = "".join(path.read_text() for path in sorted((EXAMPLES.parent / "tests" / "examples").glob("test_*.py")))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_short_and_its_docstring_alone_says_how_to_run_it(name):
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) <= 120
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    commands = commands_of(EXAMPLES / name)
    assert commands
    own = pathlib.PurePath(name).name
    path = own if name.startswith("from-torch/") else f"examples/{name}"  # those are copied, and changed, elsewhere
    assert all(path in command.split() for command in commands)


@pytest.mark.parametrize("name", SHELL)
def test_a_shell_script_is_short_and_says_how_to_run_it(name):
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) <= 40
    assert text.startswith("#!/bin/bash\n# A training ")
    assert re.search(rf"^#   .*\bexamples/{re.escape(name)}\b", text, re.MULTILINE)


def test_every_example_is_run_by_a_test():
    for name in SCRIPTS:
        assert re.search(rf"\b{pathlib.PurePath(name).stem}\b", TESTS), name


def test_every_example_is_in_the_page_about_them_and_one_change_in_full():
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    for name in (*SCRIPTS, *SHELL, *(name.replace(".py", ".diff") for name in SCRIPTS if "/" in name)):
        assert f"(../examples/{name})" in page, name
    assert f"```diff\n{(EXAMPLES / 'from-torch' / 'one_device.diff').read_text()}```\n" in page
