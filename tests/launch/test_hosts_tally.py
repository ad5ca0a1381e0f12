"""How a life has ended on all hosts together."""

import json
import time
from dataclasses import asdict

from paceline.launch.conductor.tally import Tally
from paceline.launch.failures.ending import Ending, Report


def told(*endings):
    """As a host tells them."""
    return json.loads(json.dumps([asdict(ending) for ending in endings]))


def raised(rank, at_s):
    return Ending(rank, 1, at_s, Report("raised", 1, at_s, f"ValueError: {rank}", f"Traceback\nValueError: {rank}\n"))


def test_the_first_failure_is_found_by_one_clock_for_all_hosts():
    """a's clock is 1000 s ahead of this one and b's 500 s behind; b's rank failed 2 s before a's."""
    tally, now_s = Tally(["a", "b"]), time.monotonic()
    for late_s in (0.7, 0.0, 0.3):  # on its way: the least counts
        tally.note_clock(0, now_s + 1000 - late_s)
        tally.note_clock(1, now_s - 500 - late_s)
    tally.add(0, told(raised(0, now_s + 1000 - 1)), "")
    tally.add(1, told(raised(1, now_s - 500 - 3), Ending(2, -15, now_s - 500, was_stopped=True)), "/logs")
    assert tally.first().rank == 1
    assert tally.first().host == "b"
    assert tally.describe() == (
        "paceline: rank 0 on a failed too (collateral), exit code 1: ValueError: 0\n"
        "paceline: rank 2 stopped by the launcher (collateral)\n"
        "paceline: what the ranks said is in /logs on b\n"
        "paceline: rank 1 on b failed first, exit code 1:\n"
        "Traceback\nValueError: 1\n"
    )
    verdict = json.loads(tally.as_json(1, 2))
    assert (verdict["root_cause"], verdict["num_restarts"], verdict["logs"]) == (1, 2, "/logs on b")
    assert [each["host"] for each in verdict["ranks"]] == ["a", "b", "b"]


def test_a_life_without_failures_has_nothing_to_tell():
    tally = Tally(["a"])
    assert tally.is_empty
    tally.note_clock(0, 0.0)
    tally.add(0, told(Ending(0, 0, 1.0)), "/logs")
    assert (tally.is_empty, tally.first(), tally.describe()) == (False, None, None)
    assert json.loads(tally.as_json(0, 0))["logs"] == "/logs on a"
    tally.clear()
    assert tally.is_empty
