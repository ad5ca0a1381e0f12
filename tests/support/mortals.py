"""Ranks of a world of shared memory that may die, be stopped or become something else, heard one by one."""

import contextlib
import multiprocessing
import os
import pathlib
import re
import signal
import tempfile
import time
from dataclasses import dataclass

import paceline

BACKEND = "shm"
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Error:
    """An exception as the rank that raised it describes it; ``kinds`` are the names of its class and those above."""

    kinds: list[str]
    text: str
    at: float

    @classmethod
    def of(cls, error):
        names = [f"{kind.__module__}.{kind.__name__}".removeprefix("builtins.") for kind in type(error).__mro__]
        return cls(names, str(error), time.monotonic())

    def is_a(self, name):
        return name in self.kinds or f"paceline.errors.{name}" in self.kinds

    def names(self, rank):
        """Whether the text speaks of ``rank``, alone or in a list such as ``ranks 1, 2 and 3``."""
        return bool(re.search(rf"\branks? (\d+(, | and ))*{rank}\b", self.text))


class Ranks:
    """Forked ranks of one world, each of which runs ``fn(world, say, *args)``.

    Unlike ``run_ranks``, a rank may die. What each says, returns or raises is heard one by one. No rank survives the
    block.
    """

    def __init__(self, size, fn, *args):
        self.directory = tempfile.TemporaryDirectory(prefix="paceline-test-")
        uri = pathlib.Path(self.directory.name, "rendezvous").as_uri()
        pipes = [_FORK.Pipe(duplex=False) for _ in range(size)]
        self.readers = [reader for reader, _ in pipes]
        self.processes = [
            _FORK.Process(target=_live, args=(rank, size, uri, pipes[rank][1], fn, args), name=f"rank {rank}")
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()
        for _, writer in pipes:
            writer.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()
            process.close()
        for reader in self.readers:
            reader.close()
        self.directory.cleanup()

    def hear(self, rank, word, timeout_s=15.0):
        """What the rank says next, which must begin with ``word``."""
        assert self.readers[rank].poll(timeout_s), f"rank {rank} has not {word} within {timeout_s} s"
        said, *rest = self.readers[rank].recv()
        assert said == word, f"rank {rank} has not {word} but {said}: {rest}"
        return rest[0] if rest else None

    def hear_all(self, word):
        return [self.hear(rank, word) for rank in range(len(self.processes))]

    def pid(self, rank):
        return self.processes[rank].pid

    def kill(self, rank):
        """End a rank without a word; when that was."""
        at = time.monotonic()
        os.kill(self.pid(rank), signal.SIGKILL)
        return at

    def end(self, *, but):
        """Wait until all ranks have ended by themselves."""
        for rank, process in enumerate(self.processes):
            if rank != but:
                process.join(15)
                assert process.exitcode == 0, f"rank {rank} has exit code {process.exitcode}"


def _live(rank, size, uri, pipe, fn, args):
    os.setpgid(0, 0)

    def say(*words):
        pipe.send(words)

    with contextlib.suppress(Exception, SystemExit):
        with paceline.init(BACKEND, uri, rank=rank, world_size=size, timeout=20) as world:
            try:
                result = fn(world, say, *args)
            except BaseException as error:
                say("raised", Error.of(error))
                raise
        say("returned", result)
