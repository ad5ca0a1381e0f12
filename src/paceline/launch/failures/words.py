"""What is said of ranks: how they ended, the first failure last; who takes part; who is waited for. Pure functions."""

import json
import os
import re
import signal
import sysconfig
from collections.abc import Mapping, Sequence

from paceline.launch.failures.ending import Ending, Report, first_failure
from paceline.launch.failures.oom_kills import OomKills
from paceline.launch.layout import Layout

# Where code lies that is not the user's.
LIBRARIES = (
    *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")},
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),  # our own
)


def describe(endings: Sequence[Ending], first: Ending, *, logs: str = "") -> str:
    """The text that ends a life: what is collateral, one line each, then the first failure with its traceback.

    Args:
        logs: the folder in which the ranks' output was kept, if it was.
    """
    others = [
        ending
        for ending in sorted(endings, key=lambda e: e.rank)
        if ending.failed and ending is not first and not ending.is_mere_stop
    ]
    alike = [ending.rank for ending in others if first.report is not None and _cause(ending) == _cause(first)]
    lines = [
        f"paceline: {_name(ending)} failed too (collateral), {_cause(ending)}"
        for ending in others
        if ending.rank not in alike
    ]
    if alike:
        lines.append(f"paceline: {name_ranks(alike)} failed in the same way")
    stopped = [ending.rank for ending in endings if ending.failed and ending is not first and ending.is_mere_stop]
    if stopped:
        lines.append(f"paceline: {name_ranks(stopped)} stopped by the launcher (collateral)")
    if logs:
        lines.append(f"paceline: what the ranks said is in {logs}")
    if first.oom_kills.in_cgroup and first.code != -signal.SIGKILL:
        limit = _spell_limit(first.oom_kills)
        lines.append(f"paceline: meanwhile memory ran out ({limit}), and the kernel killed a process")
    if first.report is None or not first.report.text:
        lines.append(f"paceline: {_name(first)} failed first, {_cause(first)}")
    else:
        lines.append(f"paceline: {_name(first)} failed first, {_end(first)}:")
        lines.append(first.report.text.rstrip("\n"))
    return "\n".join(lines) + "\n"


def as_json(endings: Sequence[Ending], exit_status: int, *, host: str, logs: str, num_restarts: int) -> str:
    """The verdict for programs: one JSON document.

    Args:
        host: the name of this one, for ranks that tell no other.
        logs: the folder in which the ranks' output was kept, if it was.
        num_restarts: how often all ranks were started again.
    """
    first = first_failure(endings)
    ranks = [
        {
            "rank": ending.rank,
            "host": ending.host or host,
            "exit_code": ending.code if ending.code >= 0 else None,
            "signal": _signal_name(-ending.code) if ending.code < 0 else None,
            "is_root_cause": ending is first,
            "cause": ending.cause,
            "was_stopped": ending.was_stopped,
            "error": None if ending.report is None else ending.report.summary,
            "traceback": None if ending.report is None else ending.report.text,
        }
        for ending in endings
    ]
    root = None if first is None else first.rank
    document = {"exit_status": exit_status, "root_cause": root, "num_restarts": num_restarts, "logs": logs or None}
    return json.dumps(document | {"ranks": ranks}, indent=2) + "\n"


def describe_layout(layout: Layout, hosts: Sequence[str], *, own: int | None = None) -> str:
    """Who takes part, before anything starts: a line for each host.

    Args:
        own: the number of this one, if it takes part.
    """
    where = f"{layout.address} port {layout.port}"
    ranks, count = _count(layout.world_size, "rank"), _count(layout.num_nodes, "host")
    lines = [f"paceline: {ranks} on {count}, which meet at {where}"]
    lines += [f"paceline: {'*' if node == own else ' '} node {node} is {host}" for node, host in enumerate(hosts)]
    return "\n".join(lines) + "\n"


def describe_meeting(least: int, most: int, where: str) -> str:
    """What is said while other hosts take their time to come.

    Args:
        least, most: how many there are to be.
        where: they meet.
    """
    count = str(most) if least == most else f"{least} to {most}"
    return f"paceline: waiting for all of {count} hosts to come to {where}; each wants a launcher of its own\n"


def describe_wait(reports: Mapping[int, Report], waiting_for: Sequence[int], *, has_keys: bool) -> str:
    """What is said while ranks take their time to end.

    Args:
        reports: of those that have failed.
        waiting_for: the ranks that still run.
        has_keys: it is read on a terminal.
    """
    hint = "; Ctrl-C ends them at once" if has_keys else ""
    raised = [f"paceline: a rank failed, {report.summary}\n" for report in reports.values() if report.kind == "raised"]
    return f"{''.join(raised[:1])}paceline: waiting for {name_ranks(waiting_for)} to end{hint}\n"


def describe_early_stop(ranks: Sequence[int]) -> str:
    """That ranks have made room, which is no failure."""
    return f"paceline: {name_ranks(ranks)} stopped early (exit code {os.EX_TEMPFAIL}), to go on another time\n"


def describe_interrupt(reports: Mapping[int, Report]) -> str:
    """Where each rank was when it was interrupted, a line each: the innermost frame that is not a library's."""
    lines = []
    for rank, report in sorted(reports.items()):
        frames = re.findall(r'^  File "(.+)", line (\d+), in (.+)$', report.text, re.MULTILINE)
        own = [frame for frame in frames if not frame[0].startswith(LIBRARIES)]
        if report.kind == "interrupt" and frames:
            path, line, function = (own or frames)[-1]
            lines.append(f"paceline: rank {rank} was at {os.path.basename(path)}:{line}, in {function}\n")
    return "".join(lines)


def in_red(text: str) -> str:
    """``text`` as a terminal shows it in red."""
    return f"\x1b[31m{text.removesuffix(chr(10))}\x1b[0m\n"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _name(ending: Ending) -> str:
    return f"rank {ending.rank}{f' on {ending.host}' if ending.host else ''}"


def _cause(ending: Ending) -> str:
    if ending.report is None or ending.report.kind == "exit":
        return _end(ending)
    return f"{_end(ending)}: {ending.report.summary}"


def _end(ending: Ending) -> str:
    if ending.code >= 0:
        return f"exit code {ending.code}"
    why = explain_sigkill(ending.oom_kills) if ending.code == -signal.SIGKILL else ""
    return f"killed by {_signal_name(-ending.code)}{why}"


def explain_sigkill(kills: OomKills) -> str:
    """What follows ``killed by SIGKILL``: as much as the kernel's counters tell of who sent it."""
    if kills.in_cgroup:
        return f": memory ran out ({_spell_limit(kills)})"
    if kills.in_cgroup is None and kills.on_host is None:
        return " (whether memory ran out cannot be told here)"
    if kills.were_likely:
        return ": memory probably ran out (this host has counted an OOM kill meanwhile, but not of whom)"
    return ", by whom is not known (no OOM kill was counted)"


def _spell_limit(kills: OomKills) -> str:
    if kills.limit_bytes is None:
        return "of this host, or of a container around it: no limit of its cgroup was reached"
    gib = kills.limit_bytes / 2**30
    return f"the limit of its cgroup is {f'{gib:.1f} GiB' if gib >= 1 else f'{gib * 1024:.0f} MiB'}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 0, 2-5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    named = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"
