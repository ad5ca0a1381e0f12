"""Run the examples: as their docstrings say, or in forked processes, which have imported everything already."""

import io
import os
import pathlib
import runpy
import shlex
import socket
import sys
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout

import torch

from support.commands import run_command
from support.ranks import run_ranks

PROJECT = pathlib.Path(__file__).parents[2]
EXAMPLES = PROJECT / "examples"

BIN = pathlib.Path(sys.executable).parent
_STARTERS = ("python", "paceline", "torchrun", "patch")


def commands_of(path: pathlib.Path) -> list[str]:
    """The commands in an example's docstring, without what is said of them."""
    lines = path.read_text().split('"""')[1].splitlines()
    return [line.split("  ")[0] for line in lines if line.split(" ")[0] in _STARTERS]


def run_as_typed(command: str, *more: object, cwd: pathlib.Path = PROJECT, env: Mapping[str, str] | None = None) -> str:
    """What a command prints that is typed into a shell, with more arguments; it must end well."""
    words = [*shlex.split(command), *map(str, more)]
    shell = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    done = run_command(words, cwd=cwd, env={**shell, **(env or {})}, timeout_s=100.0)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_forked(command: str, *more: object, cwd: pathlib.Path = PROJECT) -> str:
    """What its script prints in forked processes: two that find torchrun's variables, if a launcher is named."""
    words = shlex.split(command)
    script = next(index for index, word in enumerate(words) if word.endswith(".py"))
    num_ranks = 1 if words[0] == "python" else 2
    with socket.socket() as keeper:  # of the port
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        args = [*words[script:], *map(str, more)], str(cwd), keeper.getsockname()[1]
        return "".join(run_ranks(num_ranks, _run_script, *args, join=False, timeout_s=100.0))


def _run_script(rank: int, world_size: int, _: str, argv: list[str], cwd: str, port: int) -> str:
    if world_size > 1:
        place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
        os.environ |= {name: str(value) for name, value in place.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.chdir(cwd)
    sys.argv = argv
    printed = io.StringIO()
    with warnings.catch_warnings(), redirect_stdout(printed):
        warnings.simplefilter("default")
        try:
            runpy.run_path(argv[0], run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
    return printed.getvalue()


def largest_difference(path: pathlib.Path, other: pathlib.Path) -> float:
    """Of two files of weights: the largest difference, relative to the largest value of its tensor."""
    ours, theirs = (torch.load(file, weights_only=True) for file in (path, other))
    assert list(ours) == list(theirs)
    return max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in theirs)
