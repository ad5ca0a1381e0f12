"""The figures of a report: each knows what it shows, how it is drawn at any width, and the same as a table."""

from collections.abc import Iterator

from paceline.bench.report.figures.collectives import bandwidth, latency
from paceline.bench.report.figures.figure import Figure, Table
from paceline.bench.report.figures.memory import memory
from paceline.bench.report.figures.step import step
from paceline.bench.report.figures.throughput import efficiency, throughput
from paceline.bench.report.figures.timeline import timeline
from paceline.bench.results import Bench

__all__ = ["Figure", "Table", "figures_of"]

_ALL = (throughput, efficiency, step, timeline, memory, latency, bandwidth)


def figures_of(bench: Bench) -> Iterator[Figure]:
    """Those for which something was measured."""
    return (figure for make in _ALL if (figure := make(bench)) is not None)
