"""Turns as they come in, and the Bench that they make."""

from paceline.bench.findings import Findings
from paceline.bench.results import ONE_PROCESS, OURS, TORCHS, Machine, Phases, Span, Subject
from paceline.bench.times import Took

MACHINE = Machine("", 2, 0, (), "", "", "", "", "", 0.0)
SUBJECT = Subject("", 0, 0, 8, 1)


def phases(forward_s, exposed_s=0.0):
    return Phases(forward_s, 0.0, exposed_s, 0.0)


def turn(way, *step_s, phases=(), spans=(), sent=None):
    return Took(way, step_s, phases, spans, sent)


def findings(*numbers):
    found = Findings(MACHINE, SUBJECT)
    for number in numbers:
        for way, backend in ((ONE_PROCESS, None), (OURS, "shm"), (TORCHS, "gloo")):
            found.expect(number, way, backend)
    return found


def test_one_process_is_there_once_and_each_way_keeps_the_turns_that_were_beside_its_own():
    found = findings(2, 4)
    for number in (2, 4):
        for seconds in (1.0, 2.0):
            found.add(number, turn(ONE_PROCESS, number + seconds))
            found.add(number, turn(OURS, 10 * number + seconds))
    bench = found.bench(interrupted=False)
    assert [(run.way, run.num_devices, run.step_s) for run in bench.runs] == [
        (ONE_PROCESS, 1, (3.0, 4.0, 5.0, 6.0)),
        (OURS, 2, (21.0, 22.0)),
        (OURS, 4, (41.0, 42.0)),
    ]
    assert [run.alone_s for run in bench.runs] == [(), (3.0, 4.0), (5.0, 6.0)]
    assert [run.backend for run in bench.runs] == [None, "shm", "shm"]


def test_a_way_that_fails_takes_the_half_round_of_the_others_along_and_none_of_their_whole_ones():
    found = findings(2)
    for way in (ONE_PROCESS, OURS, TORCHS, ONE_PROCESS):
        found.add(2, turn(way, 1.0))
    found.fail(2, OURS, "rank 1: died")
    assert found.left(2) == (ONE_PROCESS, TORCHS)
    assert found.rounds_of(2) == 1
    bench = found.bench(interrupted=False)
    assert {run.way: (run.step_s, run.error) for run in bench.runs} == {
        ONE_PROCESS: ((1.0,), None),
        OURS: ((), "rank 1: died"),
        TORCHS: ((1.0,), None),
    }


def test_where_nothing_was_measured_the_bench_is_empty():
    bench = findings(2).bench(interrupted=True)
    assert (bench.runs, bench.step, bench.interrupted) == ((), (), True)


def test_phases_are_medians_of_the_ranks_that_the_others_waited_for():
    found = findings(2)
    for quick, slow, sent in ((1.0, 2.0, 1), (1.0, 4.0, 3), (2.0, 3.0, 5)):
        waits = slow - quick + 0.5
        found.add(2, turn(OURS, 1.0, phases=(phases(quick, waits), phases(slow, 0.5)), sent=sent))
    found.add(2, turn(TORCHS, 1.0))  # which could not be looked into
    ours, torchs = found.bench(interrupted=False).runs
    assert ours.phases == phases(3.0, 0.5)
    assert ours.bytes_sent == 3
    assert torchs.phases is None


def test_the_step_that_is_shown_is_the_median_one_on_most_ranks():
    found = findings(2, 4)
    for number, lengths in ((2, (1.0, 2.0, 3.0)), (4, (9.0, 7.0, 8.0))):
        for length in lengths:
            found.add(number, turn(OURS, 1.0, spans=(Span(0, "forward", 0.0, 1.0), Span(1, "backward", 1.0, length))))
    assert found.bench(interrupted=False).step[-1] == Span(1, "backward", 1.0, 8.0)


def test_a_peak_of_one_process_is_kept_beside_whichever_number_it_was_measured():
    found = findings(2, 4)
    found.add(4, turn(ONE_PROCESS, 1.0))
    found.keep_peak(2, ONE_PROCESS, (7,))
    (one,) = found.bench(interrupted=False).runs
    assert one.peak_bytes == (7,)
