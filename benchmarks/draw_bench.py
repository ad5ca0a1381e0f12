"""Draw figures of a bench as SVGs for the docs, which read in light and dark.

    paceline bench --model gpt --json bench.json
    python benchmarks/draw_bench.py bench.json throughput timeline [--folder docs/figures]

Each becomes ``bench-NAME.svg``; without names, all of them do.
"""

import argparse
import pathlib

from paceline.bench import document
from paceline.bench.report.figures import figures_of
from paceline.bench.report.svg import to_file

WIDTH = 880


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", type=pathlib.Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("docs/figures"))
    options = parser.parse_intermixed_args()
    bench = document.load(options.bench)
    for figure in figures_of(bench):
        if figure.name in (options.names or [figure.name]):
            path = options.folder / f"bench-{figure.name}.svg"
            path.write_text(to_file(figure.draw(WIDTH), f"{figure.title}: {bench.subject.name}", figure.says))
            print(path)


if __name__ == "__main__":
    main()
