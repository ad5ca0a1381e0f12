"""Which rank failed first, and how that is told. Pure functions of what was seen.

The first failure is the one that explains the others, so a rank that died without a word comes before peers that
merely raised at about the same time: they raised because the connection to it broke.
"""

import json
import os
import re
import signal
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.launch.hosts.layout import Layout
from paceline.launch.oom_kills import OomKills

# How far apart a death and the exceptions that it causes in other ranks are seen.
SETTLE_S = 0.2

# Where code lies that is not the user's.
LIBRARIES = (
    *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")},
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),  # our own
)


@dataclass(frozen=True)
class Report:
    """What a rank told before it ended.

    Args:
        kind: "raised", "exit" (``sys.exit`` with other than success) or "interrupt" (KeyboardInterrupt).
        code: the exit code that follows from it, or minus the signal.
        at_s: when, on the clock that all processes of a host share.
        summary: one line.
        text: the traceback as python prints it, or the message given to ``sys.exit``.
    """

    kind: str
    code: int
    at_s: float
    summary: str
    text: str


@dataclass(frozen=True)
class Ending:
    """How a rank ended.

    Args:
        code: its exit code, or minus the signal that killed it.
        at_s: when it was seen to have ended.
        report: what it told before, if anything.
        was_stopped: the launcher had asked it to stop before its failure was known.
        oom_kills: what the kernel had counted by then of its life.
        host: where it ran, if that is to be told.
    """

    rank: int
    code: int
    at_s: float
    report: Report | None = None
    was_stopped: bool = False
    oom_kills: OomKills = field(default_factory=OomKills)
    host: str = ""

    @property
    def failed(self) -> bool:
        return self.code != 0 or self.report is not None

    @property
    def failed_at_s(self) -> float:
        return self.at_s if self.report is None else self.report.at_s

    @property
    def exit_status(self) -> int:
        """As a shell gives it: 128 plus the number of the signal."""
        return 128 - self.code if self.code < 0 else self.code or 1

    @property
    def cause(self) -> str | None:
        """In a word: "stopped" by the launcher, its report's kind, "oom", "signal" or "exit"; None: it succeeded."""
        if not self.failed or _is_mere_stop(self):
            return "stopped" if self.failed else None
        if self.report is not None:
            return self.report.kind
        if self.code >= 0:
            return "exit"
        return "oom" if self.code == -signal.SIGKILL and self.oom_kills.were_likely else "signal"


def first_failure(endings: Sequence[Ending]) -> Ending | None:
    """The failure to blame; None if no rank failed by itself."""
    own = sorted((e for e in endings if e.failed and not e.was_stopped), key=lambda e: e.failed_at_s)
    if not own:
        return None
    wordless = [e for e in own if e.report is None and e.failed_at_s - own[0].failed_at_s <= SETTLE_S]
    return (wordless or own)[0]


def describe(endings: Sequence[Ending], first: Ending, *, logs: str = "") -> str:
    """The text that ends a life: what is collateral, one line each, then the first failure with its traceback.

    Args:
        logs: the folder in which the ranks' output was kept, if it was.
    """
    others = [
        ending
        for ending in sorted(endings, key=lambda e: e.rank)
        if ending.failed and ending is not first and not _is_mere_stop(ending)
    ]
    alike = [ending.rank for ending in others if first.report is not None and _cause(ending) == _cause(first)]
    lines = [
        f"paceline: {_name(ending)} failed too (collateral), {_cause(ending)}"
        for ending in others
        if ending.rank not in alike
    ]
    if alike:
        lines.append(f"paceline: {name_ranks(alike)} failed in the same way")
    stopped = [ending.rank for ending in endings if ending.failed and ending is not first and _is_mere_stop(ending)]
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


def _is_mere_stop(ending: Ending) -> bool:
    return ending.was_stopped and (ending.report is None or ending.report.kind != "raised")


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
