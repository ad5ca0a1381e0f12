import json
import os
import signal

import pytest

from paceline.launch.failures.ending import Ending, Report, first_failure
from paceline.launch.failures.oom_kills import OomKills
from paceline.launch.failures.words import as_json, describe, describe_interrupt, in_red

TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\nValueError: boom\n'


def raised(rank: int, at_s: float, *, was_stopped: bool = False) -> Ending:
    return Ending(rank, 1, at_s + 0.1, Report("raised", 1, at_s, "ValueError: boom", TRACEBACK), was_stopped)


def died(rank: int, at_s: float, signum: int = signal.SIGKILL, *, was_stopped: bool = False) -> Ending:
    return Ending(rank, -signum, at_s, None, was_stopped)


def test_no_failure_is_none():
    assert first_failure([Ending(0, 0, 1.0), Ending(1, 0, 2.0)]) is None


def test_the_earliest_failure_is_first():
    early = raised(1, 1.0)
    assert first_failure([raised(0, 2.0), early, Ending(2, 0, 0.5)]) is early


def test_a_silent_death_comes_before_exceptions_of_the_same_moment():
    death = died(2, 1.1)
    assert first_failure([raised(0, 1.0), raised(1, 1.05), death]) is death


def test_a_silent_death_much_later_is_a_consequence():
    cause = raised(0, 1.0)
    assert first_failure([cause, died(1, 1.3)]) is cause


def test_what_the_launcher_stopped_is_never_first():
    cause = raised(1, 1.0)
    assert first_failure([died(0, 1.01, signal.SIGTERM, was_stopped=True), cause]) is cause


def test_the_status_is_the_exit_code_or_128_plus_the_signal():
    assert Ending(0, 42, 1.0).exit_status == 42
    assert died(0, 1.0).exit_status == 137
    assert Ending(0, 0, 1.0, Report("raised", 1, 1.0, "ValueError", TRACEBACK)).exit_status == 1


def test_collateral_is_one_line_each_and_the_first_traceback_last():
    first = raised(1, 1.0)
    others = [died(n, 2.0, signal.SIGTERM, was_stopped=True) for n in (0, 3, 4)]
    assert describe([*others, first, raised(2, 1.1)], first) == (
        "paceline: rank 2 failed in the same way\n"
        "paceline: ranks 0, 3-4 stopped by the launcher (collateral)\n"
        "paceline: rank 1 failed first, exit code 1:\n" + TRACEBACK
    )


def test_an_exception_after_the_stop_is_shown_but_collateral():
    first = died(1, 1.0, signal.SIGSEGV)
    text = describe([raised(0, 1.1, was_stopped=True), first], first)
    assert text == (
        "paceline: rank 0 failed too (collateral), exit code 1: ValueError: boom\n"
        "paceline: rank 1 failed first, killed by SIGSEGV\n"
    )


def test_an_exit_says_its_code_and_its_message():
    silent = Ending(0, 42, 1.1, Report("exit", 42, 1.0, "SystemExit: 42", ""))
    assert describe([silent], silent) == "paceline: rank 0 failed first, exit code 42\n"
    wordy = Ending(0, 1, 1.1, Report("exit", 1, 1.0, "SystemExit: no data", "no data\n"))
    assert describe([wordy], wordy) == "paceline: rank 0 failed first, exit code 1:\nno data\n"


@pytest.mark.parametrize(
    ("kills", "why", "cause"),
    [
        (OomKills(1, 1, 8 << 30), ": memory ran out (the limit of its cgroup is 8.0 GiB)", "oom"),
        (OomKills(2, 2, 512 << 20), ": memory ran out (the limit of its cgroup is 512 MiB)", "oom"),
        (
            OomKills(1, 1),
            ": memory ran out (of this host, or of a container around it: no limit of its cgroup was reached)",
            "oom",
        ),
        (
            OomKills(None, 1),
            ": memory probably ran out (this host has counted an OOM kill meanwhile, but not of whom)",
            "oom",
        ),
        (OomKills(0, 1), ", by whom is not known (no OOM kill was counted)", "signal"),
        (OomKills(None, 0), ", by whom is not known (no OOM kill was counted)", "signal"),
        (OomKills(), " (whether memory ran out cannot be told here)", "signal"),
    ],
)
def test_of_sigkill_is_told_what_the_kernel_has_counted(kills, why, cause):
    first = Ending(0, -signal.SIGKILL, 1.0, oom_kills=kills)
    assert describe([first], first) == f"paceline: rank 0 failed first, killed by SIGKILL{why}\n"
    assert first.cause == cause


def test_a_failure_while_another_process_was_killed_for_want_of_memory_says_so():
    report = Report("raised", 1, 1.0, "RuntimeError: a worker died", "RuntimeError: a worker died\n")
    first = Ending(0, 1, 1.1, report, oom_kills=OomKills(1, 1, 8 << 30))
    assert describe([first], first) == (
        "paceline: meanwhile memory ran out (the limit of its cgroup is 8.0 GiB), and the kernel killed a process\n"
        "paceline: rank 0 failed first, exit code 1:\nRuntimeError: a worker died\n"
    )


def test_the_cause_of_each_ending_is_one_word():
    endings = [
        Ending(0, 0, 1.0),
        raised(1, 1.0),
        died(2, 1.0, signal.SIGSEGV),
        died(3, 1.0, signal.SIGTERM, was_stopped=True),
        raised(4, 2.0, was_stopped=True),
        Ending(5, 3, 1.0),
        Ending(6, 42, 1.1, Report("exit", 42, 1.0, "SystemExit: 42", "")),
        Ending(7, -signal.SIGSEGV, 1.0, oom_kills=OomKills(1, 1, 8 << 30)),
    ]
    text = as_json(endings, 1, host="h", logs="", num_restarts=0)
    causes = [rank["cause"] for rank in json.loads(text)["ranks"]]
    assert causes == [None, "raised", "signal", "stopped", "raised", "exit", "exit", "signal"]


def test_an_interrupted_rank_is_found_at_the_innermost_line_of_the_users_own():
    def interrupted(*frames: tuple[str, int, str]) -> Report:
        places = "".join(f'  File "{path}", line {line}, in {name}\n    code\n' for path, line, name in frames)
        return Report("interrupt", -2, 1.0, "KeyboardInterrupt", f"Traceback:\n{places}KeyboardInterrupt\n")

    library = os.path.join(os.path.dirname(os.__file__), "threading.py")
    reports = {
        2: interrupted((library, 7, "wait")),
        0: interrupted(("/a/train.py", 3, "<module>"), ("/a/model.py", 9, "step"), (library, 7, "wait")),
        1: Report("raised", 1, 1.0, "ValueError: boom", TRACEBACK),
    }
    assert describe_interrupt(reports) == (
        "paceline: rank 0 was at model.py:9, in step\npaceline: rank 2 was at threading.py:7, in wait\n"
    )


def test_red_ends_before_the_line_does():
    assert in_red("a\nb\n") == "\x1b[31ma\nb\x1b[0m\n"
