"""Run a function on several ranks, as forked processes that share nothing but what they send."""

import multiprocessing
import os
import pathlib
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

import paceline

_FORK = multiprocessing.get_context("fork")


class RankError(AssertionError):
    """A rank raised, died or hung; the message holds what every rank had to say."""


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 30.0,
    join: bool = True,
    backend: str = "auto",
    device: str = "cpu",
) -> list[Any]:
    """Call ``fn(world, *args)`` on ``world_size`` forked ranks of one world.

    Args:
        backend, device: as for ``paceline.init``; over Gloo, nothing goes through shared memory.
        join: False calls ``fn(rank, world_size, directory, *args)`` instead, with a directory that the ranks share, for
            tests that start the world themselves.
    Returns:
        What ``fn`` returned, by rank; it must be picklable.
    Raises:
        RankError: a rank raised, died, or was not done after ``timeout_s``. No rank survives this call.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-test-") as directory:
        pipes = [_FORK.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            _FORK.Process(
                target=_run,
                args=(rank, world_size, directory, pipes[rank][1], join, backend, device, fn, args),
                name=f"rank {rank}",
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            for _, writer in pipes:
                writer.close()
            return _collect([reader for reader, _ in pipes], ranks, timeout_s)
        finally:
            for process in ranks:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
                process.join()
                process.close()
            for reader, _ in pipes:
                reader.close()


def expect_errors(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 30.0, join: bool = True, **options: Any
) -> list[str]:
    """The message of the exception that ``fn`` must raise on every rank, by rank, as ``Type: message``."""
    outcomes = run_ranks(world_size, _catch, fn, args, timeout_s=timeout_s, join=join, **options)
    silent = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
    assert not silent, f"no error on ranks {silent}; the others: {outcomes}"
    return outcomes


def _catch(*all_args: Any) -> str | None:
    *context, fn, args = all_args
    try:
        fn(*context, *args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _run(
    rank: int,
    world_size: int,
    directory: str,
    pipe: Connection,
    join: bool,
    backend: str,
    device: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.setpgid(0, 0)
    torch.set_num_threads(1)  # makes torch's pool of threads anew: several threads that come first would do so at once
    if backend == "gloo":  # and nothing else
        os.environ["PACELINE_SHARED_MEMORY"] = "0"
    try:
        if join:
            rendezvous = pathlib.Path(directory, "rendezvous").as_uri()
            with paceline.init(
                backend, rendezvous, rank=rank, world_size=world_size, timeout=20, device=device
            ) as world:
                result = fn(world, *args)
        else:
            result = fn(rank, world_size, directory, *args)
        answer = pickle.dumps((True, result))  # by value: torch would pass tensors through shared memory
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(answer)


def _collect(readers: list[Connection], ranks: list[Any], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    answers: dict[int, tuple[bool, Any]] = {}
    while len(answers) < len(readers):
        waiting = [reader for rank, reader in enumerate(readers) if rank not in answers]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for reader in ready:
            rank = readers.index(reader)  # type: ignore[arg-type]
            try:
                answers[rank] = pickle.loads(reader.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                ranks[rank].join(1.0)
                answers[rank] = False, f"died with exit code {ranks[rank].exitcode}"
        if any(not ok for ok, _ in answers.values()):
            deadline = min(deadline, time.monotonic() + 3.0)  # for the others to say what they have seen
    failed = {rank: text for rank, (ok, text) in answers.items() if not ok}
    failed |= {rank: f"was not done after {timeout_s} s" for rank in range(len(readers)) if rank not in answers}
    if failed:
        raise RankError("\n".join(f"--- rank {rank}: {text}" for rank, text in sorted(failed.items())))
    return [answers[rank][1] for rank in range(len(readers))]
