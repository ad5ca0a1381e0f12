"""Fresh ranks for one measurement, and what rank 0 of them tells while they work.

They are forked from a server that has imported torch once, and torch's compiler, which comes with the first optimizer.

The invariant: when the messages have ended, for whatever reason, none of the ranks is left.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, TypeAlias

from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from torch.multiprocessing.spawn import ProcessException

from paceline.bench.joining import silence
from paceline.errors import BenchError
from paceline.launch.spawning.context import INTERRUPTED_S, Ranks
from paceline.launch.spawning.spawn import spawn

Tell: TypeAlias = Callable[[object], None]
Task: TypeAlias = Callable[[int, Any, Tell], None]  # (rank, job, tell): what a rank does


class RanksFailedError(Exception):
    """A rank has raised, or died; the message says which, and why.

    Attributes:
        is_refusal: it was a BenchError: what was asked for is wrong, whatever is measured.
    """

    def __init__(self, message: str, *, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal


@dataclass(frozen=True)
class _Failed:
    text: str
    is_refusal: bool


def messages_of(task: Task, job: object, num_ranks: int) -> Generator[Any, None, None]:
    """What ``task`` tells on rank 0 of ``num_ranks`` fresh ranks, until all have ended.

    Raises:
        RanksFailedError: a rank has raised or died; the others have been ended.
        LaunchError: this host cannot hold so many.
    """
    with ExitStack() as stack:
        pipes = [Pipe(duplex=False) for _ in range(num_ranks)]
        readers = {stack.enter_context(reader): rank for rank, (reader, _) in enumerate(pipes)}
        with ExitStack() as ours:
            writers = [ours.enter_context(writer) for _, writer in pipes]
            ranks = spawn(_run, (task, job, writers), num_ranks, join=False, start_method="forkserver")
        assert ranks is not None
        stack.callback(ranks.end, *INTERRUPTED_S)
        failures: dict[int, _Failed] = {}
        while ranks.sentinels:
            wait([*readers, *ranks.sentinels])
            yield from _heard(readers, failures)
            _look_after(ranks, readers, failures)


def _heard(readers: dict[Connection, int], failures: dict[int, _Failed]) -> Iterator[Any]:
    """All that has been told by now. Failures are noted, and ranks that will tell nothing more are forgotten."""
    while ready := wait(list(readers), 0):
        for reader in ready:
            assert isinstance(reader, Connection)
            try:
                message = reader.recv()
            except EOFError:
                del readers[reader]
                continue
            if isinstance(message, _Failed):
                failures[readers[reader]] = message
            else:
                yield message


def _look_after(ranks: Ranks, readers: dict[Connection, int], failures: dict[int, _Failed]) -> None:
    """Raise, if a rank has failed, what the first of them said."""
    try:
        ranks.join(0)
    except ProcessException as error:
        for _ in _heard(readers, failures):  # what they told before is of no use now
            pass
        first = failures.get(error.error_index)
        if first is not None:
            text = first.text if first.is_refusal else f"rank {error.error_index}: {first.text}"
            raise RanksFailedError(text, is_refusal=first.is_refusal) from None
        raise RanksFailedError(_spell(error)) from None


def _spell(error: ProcessException) -> str:
    if isinstance(error, ProcessExitedException) and error.signal_name:
        hint = ", as the kernel does when memory runs out" if error.signal_name == "SIGKILL" else ""
        return f"rank {error.error_index} was ended by {error.signal_name}{hint}"
    if isinstance(error, ProcessExitedException):
        return f"rank {error.error_index} ended with exit code {error.exit_code}"
    assert isinstance(error, ProcessRaisedException)
    return f"rank {error.error_index} raised an exception: {error.msg.strip().splitlines()[-1]}"


def _run(rank: int, task: Task, job: object, writers: list[Connection]) -> None:
    """In each rank."""
    for other, writer in enumerate(writers):
        if other != rank:
            writer.close()
    silence(1)  # Gloo says there whom it has met, each rank once; the figures are the command's to print
    with writers[rank] as writer:
        try:
            task(rank, job, writer.send if rank == 0 else _tell_nobody)
        except Exception as error:
            text = str(error) if isinstance(error, BenchError) else f"{type(error).__name__}: {error}"
            writer.send(_Failed(text, isinstance(error, BenchError)))
            raise


def _tell_nobody(message: object) -> None:
    pass
