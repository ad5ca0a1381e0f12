"""Draw one backward of a real run, rank by rank and bucket by bucket, as an SVG that reads in light and dark.

    OMP_NUM_THREADS=1 paceline run -n 2 benchmarks/draw_timeline.py [--out docs/figures/ddp-timeline.svg]
        [--model "MLP 6 x 1024"] [--backend shm] [--rounds 20] [--trace trace.json]

Of the rounds that were run, after five to warm up, the one of median length is drawn; the report of all is printed.
``--trace`` also saves them for https://ui.perfetto.dev. The models are those of ddp_step.py. The SVG is written by
hand: it needs no library, and its colours follow the reader's.
"""

import argparse
import pathlib
import statistics
from collections.abc import Iterator, Sequence
from html import escape

import torch.distributed as dist
from ddp_step import MODELS, paceline_over, step_of

import paceline
from paceline.timeline import Event, Timeline

STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328 }
  .quiet { fill: #656d76 } .title { font-size: 14px; font-weight: 600 } .inside { fill: #ffffff; font-size: 11px }
  .grid { stroke: #d8dee4; stroke-width: 1 } .end { stroke: #1f2328; stroke-width: 1; stroke-dasharray: 3 3 }
  .backward { fill: #6e7781 } .hidden { fill: #2a78d6 } .exposed { fill: #d9572b } .ready { fill: #1f2328 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .quiet { fill: #9198a1 } .inside { fill: #ffffff }
    .grid { stroke: #3d444d } .end { stroke: #e6edf3 } .backward { fill: #656d76 } .hidden { fill: #3987e5 }
    .exposed { fill: #e8703f } .ready { fill: #e6edf3 }
  }
"""
WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 880, 150, 20, 66, 20, 13


def length_of(by_rank: Sequence[Sequence[Event]]) -> float:
    """From the first rank's beginning to the last rank's end."""
    return max(events[-1].time_s for events in by_rank) - min(events[0].time_s for events in by_rank)


def rounds_of(timeline: Timeline) -> dict[int, dict[int, list[Event]]]:
    """Events by round and rank."""
    rounds: dict[int, dict[int, list[Event]]] = {}
    for event in timeline:
        rounds.setdefault(event.round, {}).setdefault(event.rank, []).append(event)
    return rounds


def size_text(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


class Figure:
    """Bars and words over a common time axis."""

    def __init__(self, span_s: float) -> None:
        self.parts: list[str] = []
        self.y = TOP
        self._scale = (WIDTH - LEFT - RIGHT) / span_s

    def x(self, time_s: float) -> float:
        return LEFT + time_s * self._scale

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        self.parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>')

    def bar(self, begin_s: float, end_s: float, kind: str, says: str) -> None:
        if end_s > begin_s:
            width = max(1.0, self.x(end_s) - self.x(begin_s))
            place = f'x="{self.x(begin_s):.1f}" y="{self.y}" width="{width:.1f}" height="{BAR}" rx="2"'
            self.parts.append(f'<rect class="{kind}" {place}><title>{escape(says)}</title></rect>')

    def mark(self, time_s: float, says: str) -> None:
        x, middle = self.x(time_s), self.y + BAR / 2
        points = f"{x - 4:.1f},{middle} {x:.1f},{middle - 4} {x + 4:.1f},{middle} {x:.1f},{middle + 4}"
        self.parts.append(f'<polygon class="ready" points="{points}"><title>{escape(says)}</title></polygon>')

    def line(self, time_s: float, top: float, bottom: float, kind: str) -> None:
        x = self.x(time_s)
        self.parts.append(f'<line class="{kind}" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}"/>')


def draw_rank(figure: Figure, events: Sequence[Event], start_s: float) -> None:
    """One rank's backward, buckets and control message."""
    at = {(event.kind, event.bucket): event for event in events}
    began, waited = at["round began", None].time_s - start_s, at["waited", None]
    over, averaged = waited.time_s - start_s, waited.end_s - start_s
    top = figure.y
    figure.text(0, figure.y + 11, f"rank {events[0].rank}", "title")
    figure.text(LEFT - 8, figure.y + 11, "backward", "", "end")
    figure.bar(began, over, "backward", f"backward computes: {(over - began) * 1e3:.2f} ms")
    figure.bar(over, averaged, "exposed", f"exposed wait: {(averaged - over) * 1e3:.2f} ms")
    for (kind, bucket), event in at.items():
        if kind != "launched":
            continue
        figure.y += ROW
        launched, done = event.time_s - start_s, at["done", bucket].time_s - start_s
        figure.text(LEFT - 8, figure.y + 11, f"bucket {bucket}, {size_text(event.size_bytes)}", "quiet", "end")
        says = f"bucket {bucket}, {event.params[0]} to {event.params[-1]}: {(done - launched) * 1e3:.2f} ms in flight"
        figure.bar(launched, min(done, over), "hidden", says)
        figure.bar(max(launched, over), done, "exposed", says)
        if ("bucket ready", bucket) in at:
            figure.mark(at["bucket ready", bucket].time_s - start_s, f"bucket {bucket} is complete")
    figure.y += ROW
    control = at["control", None]
    figure.text(LEFT - 8, figure.y + 11, "control message", "quiet", "end")
    figure.bar(control.time_s - start_s, control.end_s - start_s, "exposed", f"{control.size_bytes} bytes")
    figure.line(over, top - 3, figure.y + BAR + 3, "end")
    figure.y += ROW + 14


def ticks(span_s: float) -> Iterator[float]:
    span_ms = span_s * 1e3
    step = next(step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 1e4) if span_ms / step <= 10)
    yield from (number * step / 1e3 for number in range(int(span_ms / step) + 1))


def draw(by_rank: Sequence[Sequence[Event]], title: str) -> str:
    """The SVG of one round."""
    start_s = min(events[0].time_s for events in by_rank)
    span_s = length_of(by_rank)
    figure = Figure(span_s)
    for events in by_rank:
        draw_rank(figure, events, start_s)
    bottom = figure.y - 6
    grid = Figure(span_s)
    for time_s in ticks(span_s):
        grid.line(time_s, TOP - 6, bottom, "grid")
        grid.text(grid.x(time_s), bottom + 16, f"{time_s * 1e3:g}", "quiet", "middle")
    grid.text(LEFT - 8, bottom + 16, "ms", "quiet", "end")
    grid.text(0, 16, title, "title")
    legend = [
        ("backward", "backward computes"),
        ("hidden", "average under way, hidden behind it"),
        ("exposed", "exposed"),
    ]
    x = 0.0
    for kind, words in legend:
        grid.parts.append(f'<rect class="{kind}" x="{x}" y="29" width="22" height="{BAR}" rx="2"/>')
        grid.text(x + 28, 40, words)
        x += 50 + 6.4 * len(words)
    grid.parts.append(f'<polygon class="ready" points="{x},35.5 {x + 4},31.5 {x + 8},35.5 {x + 4},39.5"/>')
    grid.text(x + 14, 40, "last gradient of a bucket")
    body = "\n".join((*grid.parts, *figure.parts))
    height = bottom + 26
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f'{head} role="img" aria-label="{escape(title)}">\n<style>{STYLE}</style>\n{body}\n</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/figures/ddp-timeline.svg"))
    parser.add_argument("--model", choices=MODELS, default="MLP 6 x 1024")
    parser.add_argument("--backend", default="shm")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--trace", type=pathlib.Path)
    options = parser.parse_args()
    with paceline.init("gloo", device="cpu") as world:
        model, x = MODELS[options.model]()
        wrapped = paceline_over(options.backend, model)
        step = step_of(wrapped, x)
        for _ in range(5):
            step()
        with wrapped.profile() as timeline:
            for _ in range(options.rounds):
                dist.barrier()
                step()
        world.print(wrapped.report())
        everyones: list[list[Event]] = [[] for _ in range(world.world_size)]
        dist.all_gather_object(everyones, list(timeline))
        if world.is_main:
            together = Timeline()
            for event in (event for events in everyones for event in events):
                together(event)
            rounds = [list(by_rank.values()) for by_rank in rounds_of(together).values()]
            middle = statistics.median_low(map(length_of, rounds))
            chosen = next(by_rank for by_rank in rounds if length_of(by_rank) == middle)
            title = f"One backward of {options.model} over {options.backend}, {world.world_size} ranks"
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(draw(chosen, title))
            if options.trace:
                together.save(options.trace)


if __name__ == "__main__":
    main()
