"""Reports say what was found, no better than it is, and draw it. Values are made by hand."""

import dataclasses
import html.parser
import itertools
import re
import sys

import pytest

from paceline.bench import report
from paceline.bench.report import units
from paceline.bench.report.answer import answer, headlines, more, warnings
from paceline.bench.report.drawing import Line, Mark, Text, spread, width_of
from paceline.bench.report.figures import figures_of
from paceline.bench.report.figures.timeline import cut
from paceline.bench.report.page import WIDTHS, page_of
from paceline.bench.report.scales import from_zero, of_powers, until, within
from paceline.bench.results import DATA_PARALLEL, MORE_THREADS, ONE_PROCESS, OURS, TORCHS, Bench, Run, Span
from paceline.errors import BenchError
from support.benches import ALONE_S, HOSTILE, MACHINE, MIB, SUBJECT, at_random, bench_on, hostile, on_gpus

ALONE = Run(ONE_PROCESS, None, 1, (0.04,) * 4)


def bench_of(*runs, **fields):
    return Bench(MACHINE, SUBJECT, runs, **fields)


def run_of(way, num_devices, *step_s, alone_s=(0.04,) * 4, **fields):
    backend = {OURS: "shm", TORCHS: "gloo"}.get(way)
    return Run(way, backend, num_devices, step_s, alone_s=alone_s[: len(step_s)], **fields)


@pytest.mark.parametrize(
    ("runs", "sentence"),
    [
        ([], "Nothing was measured"),
        ([run_of(OURS, 2, error="it died")], "Nothing was measured"),
        ([ALONE], "One process trains 1,600 samples a second"),
        (
            [ALONE, run_of(OURS, 2, *(0.04,) * 4), run_of(TORCHS, 2, *(0.05,) * 4)],
            "On 2 ranks paceline trains 2.0 times as many samples a second as one process; torch's DDP 1.6 times",
        ),
        (  # the most devices count
            [ALONE, run_of(OURS, 2, *(0.04,) * 4), run_of(OURS, 4, *(0.064,) * 4)],
            "On 4 ranks paceline trains 2.5 times as many samples a second as one process",
        ),
        (  # slower than alone
            [ALONE, run_of(OURS, 2, *(0.1,) * 4)],
            "On 2 ranks paceline trains fewer samples a second than one process: 0.80 times as many",
        ),
        (  # the quartiles of 0.92, 0.98, 1.03 and 1.08 times have 1 between them
            [ALONE, run_of(OURS, 2, 0.087, 0.082, 0.078, 0.074)],
            "On 2 ranks paceline trains about as many samples a second as one process (1.00 times)",
        ),
        (
            [ALONE, run_of(OURS, 2, *(0.05,) * 4), run_of(TORCHS, 2, *(0.04,) * 4)],
            "On 2 ranks paceline trains 1.6 times as many samples a second as one process; torch's DDP 2.0 times, "
            "which is more",
        ),
        (  # 2.04 times against 2.00 and 2.08: not more
            [ALONE, run_of(OURS, 2, *(0.0385, 0.04) * 2), run_of(TORCHS, 2, *(0.0392,) * 4)],
            "On 2 ranks paceline trains 2.0 times as many samples a second as one process; torch's DDP 2.0 times",
        ),
        ([run_of(OURS, 2, 0.04, alone_s=())], "On 2 ranks paceline trains 3,200 samples a second"),
        (
            [ALONE, run_of(DATA_PARALLEL, 2, *(0.05,) * 4)],
            "On 2 replicas paceline DataParallel trains 1.6 times as many samples a second as one process",
        ),
        (
            [ALONE, run_of(TORCHS, 2, *(0.05,) * 4), run_of(MORE_THREADS, 2, *(0.05,) * 4)],
            "On 2 ranks torch DDP trains 1.6 times as many samples a second as one process",
        ),
    ],
)
def test_it_answers_in_words_and_no_better_than_it_is(runs, sentence):
    assert answer(bench_of(*runs)) == sentence


def test_what_else_could_be_done_with_the_same_devices_is_said():
    assert list(more(bench_on(2))) == [
        "paceline DataParallel on 2 replicas trains 1.4 times as many.",
        "One process with 2 times the threads trains 1.8 times as many.",
        "Of a step, 2 % waits for communication that nothing hides.",
    ]
    assert list(more(bench_on(1))) == []


def test_headlines_are_about_the_answers_run():
    found = [(headline.number, headline.says) for headline in headlines(bench_on(2))]
    assert found == [
        ("2,963", "samples a second, paceline DDP, 2 ranks"),
        ("1.9 ×", "one process; 93 % of the most possible"),
        ("43.2 ms", "a step, the median"),
        ("960 µs", "of it waiting for communication"),
        ("118 MiB", "memory, on the fullest device"),
        ("4.58 MiB", "sent by a rank in a step"),
    ]


def test_what_makes_figures_doubtful_is_said_first():
    assert list(warnings(bench_on(2))) == []
    assert list(warnings(hostile())) == [
        "It was interrupted: this is what had been measured until then.",
        "1 way could not be measured; what went wrong is said below.",
        "The machine was busy when this began: 7.5 runnable processes on 8 cores, so figures may be worse than they "
        "could be.",
    ]


def test_there_is_a_figure_for_whatever_was_measured():
    everything = ["throughput", "efficiency", "step", "timeline", "memory", "latency", "bandwidth"]
    assert [figure.name for figure in figures_of(bench_on(8))] == everything
    one = dataclasses.replace(bench_on(1), step=())
    assert [figure.name for figure in figures_of(one)] == ["throughput", "step", "memory"]
    assert list(figures_of(bench_of(run_of(OURS, 2, error="it died")))) == []


def test_tables_hold_the_figures():
    tables = {figure.name: figure.table for figure in figures_of(bench_on(2))}
    assert tables["throughput"].head == ("way", "on 1", "on 2")
    assert tables["throughput"].rows == (
        ("one process", "1,600", ""),
        ("one process, more threads", "", "2,902"),
        ("paceline DataParallel", "1,588", "2,319"),
        ("torch DDP", "1,565", "2,505"),
        ("paceline DDP", "1,592", "2,963"),
    )
    assert ("paceline DataParallel", "2 replicas", "183 MiB", "64 MiB", "1.48") in tables["memory"].rows
    assert ("gloo", "2", "64 MiB", "1.24 GB/s", "9.00 GB/s") in tables["bandwidth"].rows
    assert ("rank 0", "waiting for averages", "37.0 ms", "39.8 ms", "2.80 ms") in tables["timeline"].rows


def test_lines_begin_at_one_process_and_have_marks_where_something_was_measured():
    [throughput, *_] = figures_of(bench_of(ALONE, run_of(OURS, 2, 0.04), run_of(OURS, 4, 0.05)))
    drawing = throughput.draw(620)
    [line] = [part for part in drawing.parts if isinstance(part, Line) and part.colour == "ours"]
    [ideal] = [part for part in drawing.parts if isinstance(part, Line) and part.is_dashed]
    assert len(line.points) == 3
    assert line.points[0] == ideal.points[0]
    assert [part.says for part in drawing.parts if isinstance(part, Mark)] == [
        "one process: 1,600 samples/s",
        "paceline DDP, 2 ranks: 3,200 samples/s",
        "paceline DDP, 4 ranks: 5,120 samples/s",
    ]


def test_a_bucket_is_hidden_but_for_where_its_rank_waits():
    assert list(cut(1, 9, [(4, 6), (8, 12)])) == [
        (1, 4, "hidden"),
        (4, 6, "exposed"),
        (6, 8, "hidden"),
        (8, 9, "exposed"),
    ]
    assert list(cut(1, 3, [(4, 6)])) == [(1, 3, "hidden")]
    assert list(cut(5, 6, [(4, 7)])) == [(5, 6, "exposed")]


def test_a_step_says_which_rank_waited_longest():
    spans = (Span(0, "exposed", 0.01, 0.012), Span(1, "exposed", 0.01, 0.015), Span(0, "forward", 0, 0.02))
    [figure] = figures_of(Bench(MACHINE, SUBJECT, step=spans))
    assert "20.0 ms on all ranks together" in figure.says
    assert "rank 1 waited longest for the rest, 5.00 ms." in figure.says


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (units.digits(12345.6), "12,346"),
        (units.digits(99.96), "100"),
        (units.digits(9.996), "10.0"),
        (units.digits(1.234), "1.23"),
        (units.seconds(2.5), "2.50 s"),
        (units.seconds(0.9999), "1.00 s"),
        (units.seconds(0.0123), "12.3 ms"),
        (units.seconds(4.56e-6), "4.56 µs"),
        (units.size(512), "512 B"),
        (units.size(25 * MIB), "25 MiB"),
        (units.size(1.5 * 2**30), "1.50 GiB"),
        (units.rate(3.456e9), "3.46 GB/s"),
        (units.rate(2.5e7), "25.0 MB/s"),
        (units.rate(800), "0.80 kB/s"),
        (units.times(12.3), "12"),
        (units.times(1.84), "1.8"),
        (units.times(1.04), "1.04"),
        (units.times(0.873), "0.87"),
        (units.power_of_seconds(1e-4), "100 µs"),
        (units.power_of_seconds(1e-2), "10 ms"),
        (units.percent(0.934), "93 %"),
    ],
)
def test_figures_have_units_and_three_digits(text, words):
    assert text == words


def test_axes_name_round_values():
    assert from_zero(369, str, "").ticks == (0, 100, 200, 300, 400)
    assert from_zero(1.0, str, "").ticks == (0, 0.2, 0.4, 0.6, 0.8, 1.0)
    assert from_zero(0.0, str, "").ticks == (0, 0.2, 0.4, 0.6, 0.8, 1.0)
    assert until(46.5, str, "", most=10).ticks == (0, 5, 10, 15, 20, 25, 30, 35, 40, 45)
    decades = of_powers(2.5e-5, 0.04, 10, str, "")
    assert decades.ticks == pytest.approx((1e-5, 1e-4, 1e-3, 1e-2, 1e-1))
    assert decades.place(1e-3, 0, 100) == pytest.approx(50)
    powers = within(2000, 70_000, 4, str, "")
    assert (powers.low, powers.high, powers.ticks) == (2000, 70_000, (4096, 16384, 65536))
    assert of_powers(1024, 1024, 4, str, "").ticks == (1024, 4096)


def test_names_that_would_overlap_move_apart_and_stay_within():
    assert spread([50, 51, 90], 16, 0, 100) == [50, 66, 90]
    assert spread([95, 99], 16, 0, 100) == [84, 100]
    assert spread([5, 5, 5], 16, 0, 20) == [0, 10, 20]
    assert spread([5], 16, 0, 20) == [5]


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_missing_a_page_is_made_in_which_words_stay_within_their_figure(seed):
    bench = at_random(seed)
    assert page_of(bench).count("<section") >= 2
    for figure, width in itertools.product(figures_of(bench), WIDTHS):
        drawing = figure.draw(width)
        for text in (part for part in drawing.parts if isinstance(part, Text)):
            before = {"start": 0.0, "middle": 0.5, "end": 1.0}[text.anchor] * width_of(text.words)
            assert text.x - before >= -1, f"{figure.name}, {width}: {text}"
            assert text.x - before + width_of(text.words) <= width + 1, f"{figure.name}, {width}: {text}"
            assert 0 < text.y <= drawing.height, f"{figure.name}, {width}: {text}"


class Seen(html.parser.HTMLParser):
    """Tags, attributes and words of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.words = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data):
        self.words.append(data)


def test_names_and_errors_are_shown_and_never_obeyed():
    seen = Seen(page_of(hostile()))
    assert "script" not in seen.tags
    assert HOSTILE in seen.words
    assert any(words.startswith(f"rank 1: RuntimeError: {HOSTILE}\n  File") for words in seen.words)


@pytest.mark.parametrize("bench", [bench_on(8), hostile(), on_gpus()])
def test_a_page_asks_for_nothing(bench):
    page = page_of(bench)
    assert not re.findall(r"@import|url\(|https?:|srcset|<script|<iframe|<object", page.replace(HOSTILE, ""))
    seen = Seen(page)
    links = [value for name, value in seen.attributes if name in ("src", "href", "xlink:href", "action")]
    assert links == ["data:,"]  # the icon, which a browser would ask for


def test_a_page_tells_of_the_machine_and_the_command():
    page = page_of(dataclasses.replace(on_gpus(), command="paceline bench --model gpt -n 8"))
    assert "8 × NVIDIA H100 80GB HBM3" in page
    assert "paceline 0.1.0, torch 2.13.0, Python 3.11.9" in page
    assert "paceline bench --model gpt -n 8" in page
    assert "30 November 2026, 20:15" in page


def test_a_report_replaces_the_one_before(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    report.write(bench_on(2), path)
    assert path.read_text().startswith("<!doctype html>")
    assert list(tmp_path.iterdir()) == [path]


def test_a_report_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=r"directory|folder"):
        report.write(bench_on(2), tmp_path / "folder")
    with pytest.raises(FileNotFoundError):
        report.write(bench_on(2), tmp_path / "nowhere" / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_each_figure_is_a_png_too(tmp_path):
    image = pytest.importorskip("matplotlib.image", reason="matplotlib is not installed")
    paths = report.write_pngs(hostile(), tmp_path / "figures")
    assert [path.name for path in paths] == [f"{figure.name}.png" for figure in figures_of(hostile())]
    pixels = image.imread(paths[0])  # (height, width, 4)
    assert pixels.shape[1] == 2 * (760 + 2 * 18)
    ours = abs(pixels[:, :, :3] * 255 - (0x1F, 0x6F, 0xD0)).max(axis=2) < 2
    assert ours.sum() > 500  # the line of paceline's ranks


def test_pngs_without_matplotlib_are_refused_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        BenchError, match=r"^PNGs of a bench need matplotlib: `pip install 'paceline\[bench\]'` installs it\.$"
    ):
        report.write_pngs(bench_on(2), tmp_path)


def test_an_unknown_way_is_drawn_all_the_same():
    bench = bench_of(ALONE, run_of("Horovod", 2, 0.05, peak_bytes=(MIB, MIB)), run_of(OURS, 2, ALONE_S))
    assert "Horovod" in page_of(bench)
