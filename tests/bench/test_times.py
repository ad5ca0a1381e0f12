"""What ranks have seen of a turn, put together; and how far a bench is, as it is shown."""

import io

from rich.console import Console

from paceline.bench.progress import Bar, Lines, progress_on
from paceline.bench.results import OURS, Phases, Span
from paceline.bench.steps import Turn
from paceline.bench.times import Took, _together

PHASES = Phases(0.1, 0.2, 0.0, 0.1)


def test_a_steps_time_is_that_of_its_slowest_rank_and_moments_count_from_the_first_to_begin():
    turns = [
        Turn((0.1, 0.4), PHASES, (Span(0, "forward", 7.5, 8.0), Span(0, "bucket", 8.0, 9.0, 3, 40)), 100),
        Turn((0.2, 0.3), PHASES, (Span(1, "forward", 7.0, 8.0),), 201),
    ]
    assert _together(OURS, turns) == Took(
        OURS,
        (0.2, 0.4),
        (PHASES, PHASES),
        (Span(0, "forward", 0.5, 1.0), Span(0, "bucket", 1.0, 2.0, 3, 40), Span(1, "forward", 0.0, 1.0)),
        150,
    )


def test_what_one_rank_does_not_know_nobody_does():
    turns = [Turn((0.1,), PHASES, (), None), Turn((0.1,), None, (), None)]
    assert _together(OURS, turns) == Took(OURS, (0.1,), (), (), None)


def shown(console):
    with progress_on(console) as show:
        show.at("looking at [red]mnist")
        show.begin(2)
        show.at("2 devices, steps in turns: one process")
        show.advance()
        show.at("2 devices, steps in turns: DataParallel")
        show.note("DataParallel failed: [/nobody]")
        show.advance()
    return console.file.getvalue()


def test_in_a_file_there_is_a_line_for_each_thing_that_begins():
    console = Console(file=io.StringIO(), width=20)
    assert isinstance(progress_on(console), Lines)
    assert shown(console) == ("looking at [red]mnist\n2 devices, steps in turns\nDataParallel failed: [/nobody]\n")


def test_in_a_terminal_a_bar_goes_and_what_was_noted_stays():
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    assert isinstance(progress_on(console), Bar)
    text = shown(console)
    assert "DataParallel failed: [/nobody]" in text
    assert "100%" in text
    assert text.endswith("\x1b[2K")  # the bar's line is cleared
