"""The Python of the pages runs.

A page is one program: its blocks run in order in one namespace, in a world of one. What a page takes for granted, such
as ``model`` or ``dataset``, stands in ``preambles/<page>.py``, which is run anew before each block. A comment before a
block says otherwise:

    <!-- snippet: not run, since REASON -->
    <!-- snippet: on 2 ranks -->                 by itself, after the preamble
    <!-- snippet: on 2 ranks, raises -->         an error on each; the next block is what one of them says
    <!-- snippet: raises -->                     the same in a world of one

    <!-- snippet: file NAME -->                  a script, not run by itself; with ", run here too" it is

Other blocks are compared with what there is:

    <!-- snippet: prints -->                     what the block before it has printed
    <!-- snippet: run -->                        commands, run on the page's files, and what they print

``...`` in any of these stands for anything, and one number for another. GPUs that a block names are CPUs where there
are none.
"""

import contextlib
import doctest
import gc
import io
import os
import pathlib
import re
import shlex
import subprocess
import sys
import warnings

import pytest
import torch

import paceline
from support.commands import in_the_end, run_command
from support.pages import all_pages
from support.ranks import run_ranks

PREAMBLES = pathlib.Path(__file__).parent / "preambles"
PAGES = {
    page.name: page
    for page in all_pages()
    if any(block.language == "python" for block in page.blocks) and ".zh" not in page.name
}


def test_every_preamble_belongs_to_a_page():
    stems = {pathlib.PurePath(name).stem for name in PAGES}
    assert {path.stem for path in PREAMBLES.glob("*.py")} <= stems


@pytest.mark.parametrize("name", PAGES)
def test_the_python_of_the_page_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environment = dict(os.environ)
    state = torch.get_rng_state()
    blocks = PAGES[name].blocks
    namespace = {"__name__": "__main__"}
    printed = ""
    try:
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            where = f"{name}:{block.line}"
            if block.note == "prints":
                assert_says(printed, block.text, where)
            if block.language != "python" or not is_run_here(block):
                continue
            ranks = re.match(r"on (\d) ranks", block.note)
            if ranks:
                said = run_ranks(int(ranks[1]), run_on_rank, name, block, timeout_s=60)
            else:
                said = [run_block(name, block, namespace)]
            printed = "\n".join(out for out, _ in said)
            errors = [error for _, error in said]
            if block.note.endswith("raises"):
                assert all(errors), f"{where} raises nothing on some rank: {errors}"
                assert any(_matches(error, following.text) for error in errors), f"{where}: {errors}"
            else:
                assert not any(errors), f"{where}: {errors}"
    finally:
        namespace.clear()
        gc.collect()  # loaders with workers, wrappers
        paceline.shutdown()
        if torch.distributed.is_initialized():  # by torch's own call
            torch.distributed.destroy_process_group()
        torch.set_rng_state(state)
        os.environ.clear()
        os.environ.update(environment)


def is_run_here(block):
    is_file = block.note.startswith("file ") and not block.note.endswith("run here too")
    return not (is_file or block.note.startswith("not run, since "))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if any(b.note == "run" for b in page.blocks)])
def test_the_commands_of_the_page_print_what_it_says(name, tmp_path):
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    for block in PAGES[name].blocks:
        if block.note.startswith("file "):
            (tmp_path / block.note.removeprefix("file ").split(",")[0]).write_text(block.text)
        if block.note == "run":
            for call in block.text.removeprefix("$ ").split("\n$ "):
                command, _, expected = call.partition("\n")
                words = shlex.split(command, comments=True)
                done = run_command(words, cwd=tmp_path, env={"PATH": path}, stderr=subprocess.STDOUT)
                said = without_collateral(in_the_end(done.stdout))
                assert _matches(said, without_collateral(expected)), f"{name}: {command} printed\n{done.stdout}"


def without_collateral(said):
    """Whether the launcher stops a rank, or it has learnt of the failure before, depends on who is faster."""
    return re.sub(r"(?s)paceline: rank \d+ [^\n]*\(collateral\).*?(?=\npaceline:|\Z)", "", said)


def run_on_rank(world, name, block):
    return run_block(name, block, {"__name__": "__main__"})


def run_block(name, block, namespace):
    """What it has printed, and its error in words, or None."""
    stem = pathlib.PurePath(name).stem
    preamble = PREAMBLES / f"{stem}.py"
    out = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(out):
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than this machine has cores
        if preamble.exists():
            exec(compile(preamble.read_text(), str(preamble), "exec"), namespace)
        try:
            text = _on_devices_that_are_here(block.text)
            if text.startswith(">>> "):
                _run_doctest(text, namespace, name)
            else:
                lines = "\n" * (block.line - 1)  # so that a traceback names the page's own lines
                exec(compile(lines + text, name, "exec"), namespace)
        except Exception as error:
            if block.note.endswith("raises"):
                return out.getvalue(), f"{type(error).__name__}: {error}"
            raise
    return out.getvalue(), None


def _on_devices_that_are_here(text):
    if torch.cuda.device_count() >= 4:
        return text
    text = re.sub(r"device_ids=\[0(, \d)*\]", lambda found: found[0].replace("[0", '["cpu"'), text)
    text = re.sub(r'(?<=device_ids=\["cpu")(, \d)+', lambda found: ', "cpu"' * found[0].count(","), text)
    return re.sub(r'"cuda:\d"', '"cpu"', text)


def _run_doctest(text, namespace, name):
    test = doctest.DocTestParser().get_doctest(text, namespace, name, name, 0)
    test.globs = namespace
    doctest.DebugRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(test, clear_globs=False)


def assert_says(printed, expected, where):
    assert _matches(printed, expected), f"{where}: printed was {printed!r}"


def _matches(text, expected):
    """Whether ``text`` holds what the page shows, whatever the line breaks, and anything for ``...``."""
    text, expected = ("".join(re.sub(r"\d+(\.\d+)?(e-?\d+)?", "0", part).split()) for part in (text, expected))
    return re.search(".*?".join(map(re.escape, expected.split("..."))), text) is not None
