"""A process that has imported the tests that ship with torch, and forks their ranks.

The import freezes torch's flags, and the tests want other classes and devices in torch's places. So it happens in a
process of its own, once; pytest's asks that process for one test after the other.

The invariant: a test that does not run to its end is a failure, also one that skips itself.
"""

import importlib
import multiprocessing
import os
import pathlib
import tempfile
import unittest
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any
from unittest import mock

import torch.distributed as dist

from paceline.parallel import patch_torch
from support.ranks import RankError, run_ranks
from torch_suite import placement

TIME_LIMIT_S = 90  # below pytest's own
_INTERNAL = "torch.testing._internal"
_FORK = multiprocessing.get_context("fork")


class Host:
    """The process, as seen by those who ask it."""

    def __init__(self) -> None:
        self._pipe, theirs = _FORK.Pipe()
        self._process = _FORK.Process(target=_serve, args=(self._pipe, theirs), name="host of torch's tests")
        self._process.start()
        theirs.close()

    def names(self) -> list[str]:
        """All tests that there are."""
        return self._ask(_names)

    def run(self, name: str, world_size: int, backend: str) -> str | None:
        """Run a test on ranks of its own, with ``backend`` in Gloo's place; return what went wrong, if anything did."""
        return self._ask(_run, name, world_size, backend)

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()
        self._process.close()

    def _ask(self, *request: Any) -> Any:
        self._pipe.send(request)
        return self._pipe.recv()


def _serve(askers_end: Connection, pipe: Connection) -> None:
    askers_end.close()  # else nobody would notice here that the asker has died
    warnings.resetwarnings()  # pytest has made errors of them, and the import warns
    tests = _import_tests()
    while True:
        try:
            function, *args = pipe.recv()
        except EOFError:
            return
        pipe.send(function(tests, *args))


def _import_tests() -> ModuleType:
    """The tests' module, with paceline's classes in torch's places, and nothing skipped for want of GPUs."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE="4", MASTER_ADDR="127.0.0.1")  # what the tests' decorators look at
    patch_torch()
    placement.put_wrapper_in_place()

    def always(test: Any) -> Any:
        return test

    common = importlib.import_module(f"{_INTERNAL}.common_distributed")
    skips = {"skip_if_no_gpu": always, "skip_if_small_worldsize": always, "skip_if_lt_x_gpu": lambda *_, **__: always}
    with (
        mock.patch.multiple(common, **skips),
        mock.patch.multiple(unittest, skip=lambda _: always, skipIf=lambda *_: always),
    ):
        tests = importlib.import_module(f"{_INTERNAL}.distributed.distributed_test")
    placement.adapt(tests)
    importlib.import_module("paceline.comm.make")  # else every rank would
    return tests


def _names(tests: ModuleType) -> list[str]:
    return [name for name in vars(tests.DistributedTest._DistTestBase) if name.startswith("test_")]


def _run(tests: ModuleType, name: str, world_size: int, backend: str) -> str | None:
    try:
        run_ranks(world_size, _run_rank, tests, name, backend, join=False, timeout_s=TIME_LIMIT_S)
    except RankError as error:
        return str(error)
    return None


def _run_rank(rank: int, world_size: int, directory: str, tests: ModuleType, name: str, backend: str) -> None:
    """What ``TestDistBackend._run`` does, without its threads and pipes."""
    placement.rename_backend(tests, backend)
    for folder in ("barrier", "test_dir"):
        pathlib.Path(directory, folder).mkdir(exist_ok=True)
    os.environ.update(WORLD_SIZE=str(world_size), TEMP_DIR=directory)
    tempfile.tempdir = directory
    tests.INIT_METHOD = pathlib.Path(directory, "again").as_uri()  # where tests that leave their group meet again
    test = type("Test", (tests.TestDistBackend, tests.DistributedTest._DistTestBase), {})(name)
    test.rank, test.file_name = rank, f"{directory}/store"
    dist.init_process_group(
        backend, f"file://{directory}/group", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    importlib.import_module(f"{_INTERNAL}.common_utils").set_rng_seed()
    with placement.OnCPU():
        getattr(test, name)()
    tests.Barrier.sync()
    dist.destroy_process_group()
