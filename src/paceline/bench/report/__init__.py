"""The report of a bench: a page that answers first and shows then, and the same figures as PNG.

The invariant: a file is there whole or not at all, and a page needs nothing but itself.
"""

import importlib.util
import os
import pathlib

from paceline.bench.report.figures import figures_of
from paceline.bench.report.page import page_of
from paceline.bench.report.png import to_png
from paceline.bench.results import Bench
from paceline.checkpoint.atomic import replacing
from paceline.errors import BenchError

__all__ = ["check_png", "write", "write_pngs"]

PNG_WIDTH = 760


def write(bench: Bench, path: "str | os.PathLike[str]") -> None:
    """Write the report as one HTML page that fetches nothing and runs no script.

    Args:
        path: the file; one that is there is replaced. Its folder must exist.
    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    _put(path, page_of(bench).encode())


def write_pngs(bench: Bench, folder: "str | os.PathLike[str]") -> list[pathlib.Path]:
    """Write each of the report's figures as a PNG, and return their paths in the order of the page.

    Args:
        folder: made if it is not there.
    Raises:
        BenchError: matplotlib is not installed.
        OSError: a file cannot be written.
    """
    check_png()
    drawn = [
        (figure.name, to_png(figure.draw(PNG_WIDTH), f"{figure.title}: {bench.subject.name}"))
        for figure in figures_of(bench)
    ]
    os.makedirs(folder, exist_ok=True)
    paths = [pathlib.Path(folder, f"{name}.png") for name, _ in drawn]
    for path, (_, picture) in zip(paths, drawn, strict=True):
        _put(path, picture)
    return paths


def check_png() -> None:
    """Find out whether PNGs can be written at all, before it is worth a measurement.

    Raises:
        BenchError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("PNGs of a bench need matplotlib: `pip install 'paceline[bench]'` installs it.")


def _put(path: "str | os.PathLike[str]", data: bytes) -> None:
    with replacing(path) as draft:
        draft.write(data)
