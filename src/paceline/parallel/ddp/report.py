"""What a wrapper does and how well: its buckets, its rounds so far, and what a timeline has measured.

The invariant: a report is made of what this rank knows already. It talks to no other rank, and no device is waited for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from paceline.parallel.buckets.bucket import Bucket
from paceline.parallel.reducer.reducer import Reducer
from paceline.timeline import Measured


@dataclass(frozen=True)
class BucketReport:
    """A bucket of the plan.

    Attributes:
        first, last: names of parameters, in the order in which gradients arrive.
        kind: how it is averaged: "dense" (one all_reduce), "shared" (in memory that the ranks share), "sparse" (rows
            are gathered) or "hooked" (by a communication hook).
    """

    number: int
    first: str
    last: str
    num_params: int
    size_bytes: int
    dtype: str
    kind: str


@dataclass(frozen=True)
class Report:
    """How ``DistributedDataParallel`` averages a model's gradients, as seen by this rank.

    Attributes:
        backend: over which gradients travel.
        caps_bytes: largest buckets, in turn; the last counts for the rest.
        buckets: in the order of launches; empty where there is nothing to reduce.
        num_rounds: backwards that were averaged.
        num_replans: how often the buckets became others; once is as it should be, when the order has been learnt.
        num_late: buckets that were reduced once more, since gradients came after the launch.
        num_unplanned: rounds with gradients that the plan did not have.
        unused: planned parameters that no rank used in the last round.
        measured: by the timeline that observed the model last; None without one.
    """

    rank: int
    world_size: int
    backend: str
    caps_bytes: tuple[int, ...] = ()
    buckets: tuple[BucketReport, ...] = ()
    num_rounds: int = 0
    num_replans: int = 0
    num_late: int = 0
    num_unplanned: int = 0
    unused: tuple[str, ...] = ()
    detects_drift: bool = False
    measured: Measured | None = None

    def __str__(self) -> str:
        rows = list(self._rows())
        widths = [max(len(row[column]) for row in (_HEADS, *rows)) for column in range(len(_HEADS))]
        table = ["  ".join(map(_pad, row, widths, _IS_NUMBER)).rstrip() for row in (_HEADS, *rows)] if rows else []
        return "\n".join([self._title(), *table, *(f"{name}: {value}" for name, value in self._facts())])

    def __rich__(self) -> Any:
        from rich.console import Group  # only who prints with rich has it
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(self._title()), title_justify="left")
        for head, is_number in zip(_HEADS, _IS_NUMBER, strict=True):
            table.add_column(head, justify="right" if is_number else "left")
        for row in self._rows():
            table.add_row(*map(Text, row))
        facts = [Text.assemble((f"{name}: ", "bold"), value) for name, value in self._facts()]
        return Group(table, *facts) if self.buckets else Group(Text(self._title()), *facts)

    def _title(self) -> str:
        if self.world_size == 1 and not self.buckets:
            return "DistributedDataParallel in a world of one: there is nothing to reduce."
        return f"DistributedDataParallel, rank {self.rank} of {self.world_size}, gradients over {self.backend}"

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for bucket in self.buckets:
            span = bucket.first if bucket.num_params == 1 else f"{bucket.first} .. {bucket.last}"
            size = size_text(bucket.size_bytes)
            yield str(bucket.number), span, str(bucket.num_params), size, bucket.dtype, bucket.kind

    def _facts(self) -> Iterator[tuple[str, str]]:
        if not self.buckets:
            if self.world_size > 1:
                yield "buckets", "none yet; this copy joins the other ranks in its first training forward"
            return
        yield "caps", ", ".join(map(size_text, self.caps_bytes))
        yield (
            "rounds",
            f"{self.num_rounds}, new plans {self.num_replans}, buckets reduced again {self.num_late}, "
            f"rounds with unplanned gradients {self.num_unplanned}",
        )
        if self.num_rounds:
            yield "unused in the last round", _first_of(self.unused) if self.unused else "none"
        yield "drift detection", "on" if self.detects_drift else "off"
        if self.measured is None:
            yield "overlap", "not measured; use `with model.profile() as timeline: ...` around some steps"
            return
        measured = self.measured
        share = "nothing was in flight" if measured.overlap is None else f"{measured.overlap:.0%} of it hidden"
        yield (
            "overlap",
            f"communication {measured.in_flight_s * 1e3:.2f} ms a round, {share}; "
            f"exposed wait {measured.exposed_s * 1e3:.2f} ms (medians of {measured.num_rounds} rounds)",
        )


_HEADS = ("bucket", "parameters", "number", "size", "dtype", "kind")
_IS_NUMBER = (True, False, True, True, False, False)
_MOST_NAMES = 8


def report_of(reducer: Reducer, names: Sequence[str], backend: str, measured: Measured | None) -> Report:
    """What this rank knows.

    Args:
        names: of the parameters, in the agreed order.
        backend: over which gradients travel.
        measured: by a timeline that observed ``reducer``.
    """
    counts, planner, used = reducer.counts, reducer.planner, reducer.arrivals.used
    return Report(
        dist.get_rank(),
        reducer.averaging.world_size,
        backend,
        caps_bytes=planner.caps_bytes,
        buckets=_bucket_reports(planner.buckets, names),
        num_rounds=counts.rounds,
        num_replans=counts.replans,
        num_late=counts.late,
        num_unplanned=counts.unplanned,
        unused=tuple(names[index] for bucket in planner.buckets for index in bucket.indices if not used[index]),
        detects_drift=reducer.detects_drift,
        measured=measured,
    )


def _bucket_reports(buckets: Sequence[Bucket], names: Sequence[str]) -> tuple[BucketReport, ...]:
    reports = []
    for bucket in buckets:
        params = [member.param for member in bucket.members]
        first, last = names[bucket.indices[0]], names[bucket.indices[-1]]
        size_bytes = sum(param.numel() * param.element_size() for param in params)
        dtype = str(params[0].dtype).removeprefix("torch.")
        reports.append(BucketReport(bucket.number, first, last, len(params), size_bytes, dtype, bucket.kind))
    return tuple(reports)


def size_text(size_bytes: int) -> str:
    """In the largest unit of which there is one: "4 B", "1.5 KiB", "25 MiB"."""
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f}".removesuffix(".0") + f" {unit}"


def _first_of(names: Sequence[str]) -> str:
    rest = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _pad(text: str, width: int, is_number: bool) -> str:
    return text.rjust(width) if is_number else text.ljust(width)
