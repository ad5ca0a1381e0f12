"""A bench as JSON, and back.

The invariant: what is read is what was written; a file never holds half of one.
"""

import dataclasses
import json
import pathlib
from typing import Any

from paceline.bench.results import Bench, Collective, Machine, Phases, Run, Span, Subject
from paceline.checkpoint.atomic import replacing
from paceline.errors import BenchError

_FORMAT = "paceline bench 1"


def save(bench: Bench, path: pathlib.Path) -> None:
    """Write ``bench`` to ``path``.

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    with replacing(path) as draft:
        draft.write(json.dumps({"format": _FORMAT, **dataclasses.asdict(bench)}).encode())


def load(path: pathlib.Path) -> Bench:
    """Read what ``save`` has written.

    Raises:
        BenchError: there is no such file, or it holds something else.
    """
    try:
        told = json.loads(path.read_text())
        if told.pop("format") != _FORMAT:
            raise ValueError(_FORMAT)
        return _bench(told)
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise BenchError(f"{path}: expected a bench as `paceline bench --json` writes it, but it is none.") from error


def _bench(told: dict[str, Any]) -> Bench:
    machine = told["machine"]
    parts = {
        "machine": Machine(**{**machine, "devices": tuple(machine["devices"])}),
        "subject": Subject(**told["subject"]),
        "runs": tuple(_run(run) for run in told["runs"]),
        "step": tuple(Span(**span) for span in told["step"]),
        "collectives": tuple(Collective(**collective) for collective in told["collectives"]),
    }
    return Bench(**{**told, **parts})


def _run(told: dict[str, Any]) -> Run:
    tuples = {name: tuple(told[name]) for name in ("step_s", "peak_bytes", "alone_s")}
    phases = None if told["phases"] is None else Phases(**told["phases"])
    return Run(**{**told, **tuples, "phases": phases})
