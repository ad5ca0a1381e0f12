"""One step, rank by rank and bucket by bucket: what communication lay beside the computation."""

from collections.abc import Iterator, Sequence

from paceline.bench.report import units
from paceline.bench.report.bars import Meaning
from paceline.bench.report.drawing import Drawing
from paceline.bench.report.figures.figure import Figure, Table
from paceline.bench.report.lanes import Lane, RankLanes, Stretch, lane_chart
from paceline.bench.results import Bench, Span

KEY = (
    Meaning("forward", "forward"),
    Meaning("backward", "backward"),
    Meaning("optimizer", "optimizer"),
    Meaning("an average under way, hidden", "hidden"),
    Meaning("waiting for averages", "exposed"),
)


def timeline(bench: Bench) -> Figure | None:
    """None where no step was looked into."""
    by_rank = {span.rank: [s for s in bench.step if s.rank == span.rank] for span in bench.step}
    ranks = [_lanes(rank, spans) for rank, spans in sorted(by_rank.items())]
    if not ranks:
        return None

    def draw(width: float) -> Drawing:
        return lane_chart(ranks, width, KEY)

    waited = {rank: sum(s.end_s - s.begin_s for s in spans if s.kind == "exposed") for rank, spans in by_rank.items()}
    slowest = max(waited, key=waited.__getitem__)
    whole_s = max(span.end_s for span in bench.step)
    says = (
        f"The step of median length, {units.seconds(whole_s)} on all ranks together. An average of gradients is hidden "
        f"where backward still computes beside it; rank {slowest} waited longest for the rest, "
        f"{units.seconds(waited[slowest])}."
    )
    return Figure("timeline", "One step, bucket by bucket", says, draw, _table(bench.step))


def cut(begin_s: float, end_s: float, exposed: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float, str]]:
    """The pieces of something under way, and the colour of each: hidden, or in one of the waits."""
    at = begin_s
    for low, high in sorted(exposed):
        low, high = max(low, at), min(high, end_s)
        if low < high:
            if at < low:
                yield at, low, "hidden"
            yield low, high, "exposed"
            at = high
    if at < end_s:
        yield at, end_s, "hidden"


def _lanes(rank: int, spans: Sequence[Span]) -> RankLanes:
    work = tuple(Stretch(s.begin_s, s.end_s, s.kind, _says(s)) for s in spans if s.kind != "bucket")
    exposed = [(s.begin_s, s.end_s) for s in spans if s.kind == "exposed"]
    buckets = sorted((s for s in spans if s.kind == "bucket"), key=lambda span: (span.begin_s, span.bucket or 0))
    lanes = [
        Lane(_label(s), tuple(Stretch(*piece, _says(s)) for piece in cut(s.begin_s, s.end_s, exposed))) for s in buckets
    ]
    over_s = min((begin_s for begin_s, _ in exposed), default=None)
    return RankLanes(f"rank {rank}", (Lane("step", work), *lanes), over_s)


def _label(span: Span) -> str:
    if span.kind != "bucket":
        return {"exposed": "waiting for averages"}.get(span.kind, span.kind)
    return f"bucket {span.bucket}" + (f", {units.size(span.size_bytes)}" if span.size_bytes is not None else "")


def _says(span: Span) -> str:
    return f"rank {span.rank}, {_label(span)}: {units.seconds(span.end_s - span.begin_s)}"


def _table(spans: Sequence[Span]) -> Table:
    rows = (
        (f"rank {s.rank}", _label(s), *map(units.milliseconds, (s.begin_s, s.end_s, s.end_s - s.begin_s)))
        for s in sorted(spans, key=lambda span: (span.rank, span.begin_s))
    )
    return Table(("rank", "what", "begins", "ends", "lasts"), tuple(rows))
