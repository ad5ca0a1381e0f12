"""Draw one backward of a real run, rank by rank and bucket by bucket, as an SVG that reads in light and dark.

    OMP_NUM_THREADS=1 paceline run -n 2 benchmarks/draw_timeline.py [--out docs/figures/ddp-timeline.svg]
        [--model "MLP 6 x 1024"] [--backend shm] [--rounds 20] [--trace trace.json]

Of the rounds that were run, after five to warm up, the one of median length is drawn; the report of all is printed.
``--trace`` also saves them for https://ui.perfetto.dev. The models are those of ddp_step.py. It is drawn as the report
of ``paceline bench`` draws a step.
"""

import argparse
import math
import pathlib
import statistics
from collections.abc import Sequence

import torch.distributed as dist
from ddp_step import MODELS, paceline_over, step_of

import paceline
from paceline.bench.report.bars import Meaning
from paceline.bench.report.figures.timeline import cut
from paceline.bench.report.lanes import Lane, RankLanes, Stretch, lane_chart
from paceline.bench.report.svg import to_file
from paceline.bench.report.units import milliseconds, size
from paceline.timeline import Event, Timeline

WIDTH = 880
KEY = (
    Meaning("backward computes", "backward"),
    Meaning("average under way, hidden behind it", "hidden"),
    Meaning("exposed", "exposed"),
    Meaning("last gradient of a bucket", "ink", "diamond"),
)


def length_of(by_rank: Sequence[Sequence[Event]]) -> float:
    """From the first rank's beginning to the last rank's end."""
    return max(events[-1].time_s for events in by_rank) - min(events[0].time_s for events in by_rank)


def rounds_of(timeline: Timeline) -> dict[int, dict[int, list[Event]]]:
    """Events by round and rank."""
    rounds: dict[int, dict[int, list[Event]]] = {}
    for event in timeline:
        rounds.setdefault(event.round, {}).setdefault(event.rank, []).append(event)
    return rounds


def lanes_of(events: Sequence[Event], start_s: float) -> RankLanes:
    """One rank's backward, buckets and control message; moments are since ``start_s``."""
    at = {(event.kind, event.bucket): event for event in events}
    began, control, waited = at["round began", None], at["control", None], at["waited", None]
    over, averaged = waited.time_s - start_s, waited.end_s - start_s
    backward = (
        Stretch(began.time_s - start_s, over, "backward", f"backward computes: {milliseconds(over)}"),
        Stretch(over, averaged, "exposed", f"exposed wait: {milliseconds(averaged - over)}"),
    )
    lanes = [Lane("backward", backward)]
    for (kind, bucket), event in at.items():
        if kind == "launched":
            launched, done = event.time_s - start_s, at["done", bucket].time_s - start_s
            span = f"{event.params[0]} to {event.params[-1]}: {milliseconds(done - launched)} in flight"
            pieces = cut(launched, done, [(over, math.inf)])
            flight = tuple(Stretch(*piece, f"bucket {bucket}, {span}") for piece in pieces)
            ready = at.get(("bucket ready", bucket))
            marks = ((ready.time_s - start_s, f"bucket {bucket} is complete"),) if ready else ()
            lanes.append(Lane(f"bucket {bucket}, {size(event.size_bytes)}", flight, marks))
    message = Stretch(control.time_s - start_s, control.end_s - start_s, "exposed", f"{control.size_bytes} bytes")
    lanes.append(Lane("control message", (message,)))
    return RankLanes(f"rank {events[0].rank}", tuple(lanes), over)


def draw(by_rank: Sequence[Sequence[Event]], title: str) -> str:
    """The SVG of one round."""
    start_s = min(events[0].time_s for events in by_rank)
    drawing = lane_chart([lanes_of(events, start_s) for events in by_rank], WIDTH, KEY)
    says = "For each rank, when backward computes, when each bucket's average is under way, and how long is waited."
    return to_file(drawing, title, says)


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
