"""Pipelines: how much their lanes wait, and what they keep, beside what theory says.

    OMP_NUM_THREADS=1 python benchmarks/pipeline.py [--rounds 16] [--microbatches 4 8]  # a thread for each stage
    OMP_NUM_THREADS=1 paceline run -n 2 benchmarks/pipeline.py              # a rank for each stage
    OMP_NUM_THREADS=1 python benchmarks/pipeline.py --asleep [--rounds 8]   # both ways, too
    OMP_NUM_THREADS=1 python benchmarks/pipeline.py --bytes [--stages 4]
    OMP_NUM_THREADS=1 python benchmarks/pipeline.py --draw docs/figures

Waits: two stages of six layers of 768, with one thread each, on microbatches of 320 rows. A forward takes some 30 ms,
a backward 55, so that what a lane does between two actions, a tenth of a millisecond, hardly counts. The stages are
equal: the first computes the gradient of its input, too, as if there were a stage before it.

"measured" is the share of the lanes' time in which they wait, from the first action to the last. "equal" is the theory
for equal stages, (p - 1) / (m + p - 1). "priced" is that of the same schedule with the times that each stage's forward
and backward took here, on the median: what is above it is the runner's, or the machine's. What else runs on the machine
makes lanes wait for one another, so "measured" and "priced" are medians over the quarter of the rounds that were
fastest; "from - to" are the least and the most of "measured" there. "speed" is the time of the undivided model in one
thread, with gradients accumulated over the same microbatches, over that of the pipeline, both the median of their
fastest quarter: at best p times what theory leaves. All takes two minutes on a machine where nothing else runs.

Asleep: the same with stages that only sleep, 20 ms in forward and 40 in backward. They need no core, and take their
time whatever else the machine does, so what is measured beyond the theory is the runner's. There is no "speed".

Bytes: the most that each stage keeps from forward to backward, by ``Pipeline.measure_bytes``, in microbatches' worth.

The last results, with their machine, are in docs/performance.md.
"""

import argparse
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.pipeline import Action, draw, make_schedule
from paceline.pipeline.clock import Placed, bubble_fraction, place

WIDTH, ROWS = 768, 320


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(0.04)
        return grad.clone()


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x * self.weight)


class Entry(nn.Module):
    """Has the first stage compute the gradient of its input, as all others do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach().requires_grad_()


def stages_of(num_stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    stages = [
        nn.Sequential(*(layer for _ in range(6) for layer in (nn.Tanh(), nn.Linear(WIDTH, WIDTH))))
        for _ in range(num_stages)
    ]
    return [nn.Sequential(Entry(), *stages[0]), *stages[1:]]


def mean(output: torch.Tensor) -> torch.Tensor:
    return output.mean()


def seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def priced(pipeline: paceline.Pipeline, times: list[Placed]) -> float:
    """The bubble of the schedule, with the median times of each stage's forwards and backwards."""
    took: dict[tuple[str, int], list[float]] = {}
    for item in times:
        took.setdefault((item.action.kind, item.action.stage), []).append(item.end - item.begin)

    def duration(action: Action) -> float:
        return statistics.median(took[action.kind, action.stage])

    return bubble_fraction(place(pipeline.schedule(), duration), num_lanes=2)


def show_waits(rounds: int, counts: list[int], make: Callable[[int], list[nn.Module]]) -> None:
    is_over_ranks = dist.is_initialized() and dist.get_world_size() > 1
    lanes = {"ranks": [0, 1]} if is_over_ranks else {"devices": ["cpu", "cpu"]}
    speaks = not is_over_ranks or dist.get_rank() == 0
    if speaks:
        print(f"{'':24}{'measured':>10}{'from - to':>16}{'equal':>9}{'priced':>9}{'speed':>8}")
    alone = {count: seconds_alone(count, rounds // 4) for count in counts} if speaks and make is stages_of else {}
    for name in ("gpipe", "1f1b"):
        for count in counts:
            pipeline = paceline.Pipeline(make(2), microbatches=count, schedule=name, loss=mean, **lanes)
            x = torch.randn(count * ROWS, WIDTH)
            steps = []
            for _ in range(rounds):
                if is_over_ranks:
                    dist.barrier()
                took = seconds(lambda pipeline=pipeline, x=x: pipeline.forward_backward(x))
                steps.append((took, pipeline.measured_bubble(), priced(pipeline, pipeline.last_step())))
            fastest = sorted(steps)[: max(1, rounds // 4)]
            times, bubbles, prices = zip(*fastest, strict=True)
            if speaks:
                row = f"{name}, {count} microbatches"
                span = f"{min(bubbles):.1%} - {max(bubbles):.1%}"
                speed = f"{alone[count] / statistics.median(times):.2f}" if alone else ""
                print(
                    f"{row:24}{statistics.median(bubbles):10.1%}{span:>16}{1 / (count + 1):9.1%}"
                    f"{statistics.median(prices):9.1%}{speed:>8}",
                    flush=True,
                )


def seconds_alone(count: int, rounds: int) -> float:
    """Of the undivided model in one thread."""
    whole = nn.Sequential(*stages_of(2))
    x = torch.randn(count * ROWS, WIDTH)

    def accumulate() -> None:
        for part in x.chunk(count):
            (mean(whole(part)) / count).backward()

    took = sorted(seconds(accumulate) for _ in range(max(4, rounds)))
    return statistics.median(took[: max(1, len(took) // 4)])


def show_bytes(num_stages: int) -> None:
    count = 2 * num_stages
    print(f"{num_stages} stages, {count} microbatches, in microbatches' worth of one stage:")
    for name in ("gpipe", "1f1b"):
        pipeline = paceline.Pipeline(
            stages_of(num_stages), ["cpu"] * num_stages, microbatches=count, schedule=name, loss=mean
        )
        one = paceline.Pipeline(stages_of(1), ["cpu"], microbatches=1, loss=mean)
        kept: list[dict[int, int]] = []
        for model, size in ((pipeline, count), (one, 1)):
            with model.measure_bytes() as peaks:
                model.forward_backward(torch.randn(size * ROWS, WIDTH))
            kept.append(peaks)
        worth = kept[1][0]
        print(f"{name:8}" + "".join(f"{kept[0][stage] / worth:8.2f}" for stage in range(num_stages)))


def draw_all(folder: pathlib.Path) -> None:
    for name, num_stages in (("gpipe", 4), ("1f1b", 4), ("interleaved", 8)):
        draw(make_schedule(name, 4, num_stages, 8), folder / f"pipeline-{name}.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--asleep", action="store_true")
    parser.add_argument("--bytes", action="store_true")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--draw", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.bytes:
        show_bytes(arguments.stages)
    elif arguments.draw is not None:
        draw_all(arguments.draw)
    else:
        with paceline.init():
            make = (lambda num_stages: [Sleeper() for _ in range(num_stages)]) if arguments.asleep else stages_of
            show_waits(arguments.rounds, arguments.microbatches, make)


if __name__ == "__main__":
    main()
