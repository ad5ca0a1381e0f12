"""What is computed from measurements, shown as text, and kept as JSON. Every Bench here is a literal."""

from dataclasses import replace

import pytest
from rich.console import Console

from paceline.bench import document
from paceline.bench.report.answer import answer
from paceline.bench.results import (
    DATA_PARALLEL,
    ONE_PROCESS,
    OURS,
    TORCHS,
    Bench,
    Collective,
    Machine,
    Phases,
    Run,
    Span,
    Subject,
)
from paceline.bench.table import size, tables_of
from paceline.errors import BenchError

ONE = Run(ONE_PROCESS, None, 1, (0.1, 0.1, 0.3, 0.1), Phases(0.04, 0.05, 0.0, 0.01), peak_bytes=(1 << 20,))
TWO = Run(
    OURS,
    "shm",
    2,
    (0.2, 0.1, 0.1),
    Phases(0.04, 0.05, 0.002, 0.01),
    bytes_sent=1536,
    peak_bytes=(1 << 20, 3 << 20),
    alone_s=(0.1, 0.1, 0.09, 0.5),
)
FAILED = Run(TORCHS, "gloo", 2, error="rank 1: RuntimeError: no")
BENCH = Bench(
    Machine("A processor", 2, 1 << 33, (), "Linux 6", "3.11", "2.13", "0.1", "2026-01-02T03:04:05+00:00", 0.25),
    Subject("mnist", 1_199_882, 4_799_528, 32, 1),
    (ONE, Run(DATA_PARALLEL, None, 2, (0.16,), alone_s=(0.1,)), TWO, FAILED),
    (Span(0, "forward", 0.0, 0.04), Span(0, "bucket", 0.05, 0.09, 0, 4096)),
    (Collective("shm", 2, 4000, 1e-4, 1e-6),),
    command="paceline bench",
)


def lines_of(bench):
    """Without the answer, of which the report's tests tell."""
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        console.print(tables_of(bench))
    lines = [line.rstrip() for line in captured.get().splitlines()]
    start = next(number for number, line in enumerate(lines) if line.startswith("mnist:"))
    assert " ".join(lines[:start]) == f"{answer(bench)}."
    return lines[start:]


def test_in_a_step_each_device_gets_a_batch():
    assert BENCH.samples_per_s(ONE) == pytest.approx(32 / 0.1)
    assert BENCH.samples_per_s(TWO) == pytest.approx(64 / 0.1)
    assert BENCH.samples_per_s(FAILED) is None


def test_a_gain_is_the_median_of_the_rounds_own_and_of_those_that_both_have():
    assert BENCH.gain(ONE) == 1.0
    assert BENCH.gain(TWO) == pytest.approx(1.8)  # of 1.0, 2.0 and 1.8
    assert BENCH.efficiency(TWO) == pytest.approx(0.9)
    assert BENCH.gain(replace(TWO, alone_s=())) is None
    assert BENCH.efficiency(FAILED) is None


def test_imbalance_is_the_largest_peak_over_the_mean():
    assert TWO.imbalance == 1.5
    assert FAILED.imbalance is None


def test_a_run_is_found_by_its_way_and_number():
    assert BENCH.run(OURS, 2) is TWO
    assert BENCH.run(OURS, 4) is None


def test_the_text_is_this_and_fits_a_terminal_of_80():
    assert lines_of(replace(BENCH, interrupted=True)) == [
        "mnist: 1,199,882 parameters (4.6 MiB), 32 samples and 1 thread a device",
        "2 cores of A processor, torch 2.13",
        "It was interrupted: this is what had been measured until then.",
        "1 way could not be measured; what went wrong is said below.",
        "",
        "How fast",
        "way                      devices  samples/s    gain  efficiency  step, ms",
        "one process                    1        320  1.00 x        100%     100.0",
        "DataParallel                   2        400  1.25 x         62%     160.0",
        "DistributedDataParallel        2        640  1.80 x         90%     100.0",
        "",
        "Where a step goes, in ms",
        "way                      devices  forward  backward  exposed  optimizer",
        "one process                    1     40.0      50.0      0.0       10.0",
        "DataParallel                   2        –         –        –          –",
        "DistributedDataParallel        2     40.0      50.0      2.0       10.0",
        "",
        "What it takes",
        "way                      devices  over     sent   memory  imbalance",
        "one process                    1     –        –  1.0 MiB          –",
        "DataParallel                   2     –        –        –          –",
        "DistributedDataParallel        2   shm  1.5 KiB  3.0 MiB       1.50",
        "",
        "torch DistributedDataParallel on 2 devices failed: rank 1: RuntimeError: no",
    ]


def test_gpus_are_counted_by_name_and_nothing_measured_is_no_table():
    machine = replace(BENCH.machine, devices=("H200", "H200"))
    assert lines_of(replace(BENCH, machine=machine, runs=()))[1:] == ["2 x H200, A processor, torch 2.13", ""]


def test_the_longest_names_fit_a_terminal_of_80():
    phases = Phases(10.0, 10.0, 10.0, 10.0)
    run = Run(TORCHS, "gloo", 64, (10.0,), phases, 1 << 39, (1 << 39,) * 64, alone_s=(8.0,))
    one = replace(ONE, step_s=(8.0,))
    text = lines_of(replace(BENCH, runs=(one, run)))
    assert not any("…" in line for line in text)
    assert max(map(len, text)) <= 80


def test_sizes_are_in_the_largest_unit_of_which_there_is_one():
    assert [size(n) for n in (0, 1023, 1024, 1536 << 10, 3 << 30)] == ["0 B", "1023 B", "1.0 KiB", "1.5 MiB", "3.0 GiB"]


def test_what_is_read_is_what_was_written(tmp_path):
    for bench in (BENCH, replace(BENCH, runs=(), step=(), collectives=(), interrupted=True)):
        document.save(bench, tmp_path / "bench.json")
        assert document.load(tmp_path / "bench.json") == bench


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "another"}', '{"format": "paceline bench 1", "runs": []}']
)
def test_a_file_that_holds_something_else_is_named(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(BenchError) as caught:
        document.load(path)
    assert str(caught.value) == f"{path}: expected a bench as `paceline bench --json` writes it, but it is none."


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(BenchError) as caught:
        document.load(tmp_path / "no.json")
    assert str(caught.value) == f"{tmp_path}/no.json: No such file or directory"
