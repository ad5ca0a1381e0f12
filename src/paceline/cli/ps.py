"""``paceline ps``: what is running, and what should not be any more."""

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.launch.runs.look import Findings, Process, Run
    from paceline.launch.runs.usage import Usage


@click.command(short_help="List runs, and what launchers that have died left behind.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def ps(as_json: bool) -> None:
    """List your runs on this host, and what launchers that have died left behind.

    Memory is each process's share: a page that n processes use counts as 1/n of it in each. What descends from a
    launcher is known by PACELINE_LAUNCHER in its environment, and is left over once that launcher runs no more:
    `paceline clean` ends it.
    """
    from paceline.launch.runs.look import look
    from paceline.launch.runs.usage import measure

    findings = look()
    shown = [*findings.orphans, *(process for run in findings.runs for process in run.processes)]
    usage = measure({process.pid for process in shown})
    if as_json:
        import json

        click.echo(json.dumps(_document(findings, usage), indent=2))
    else:
        click.echo(_text(findings, usage))


def _text(findings: "Findings", usage: "Mapping[int, Usage]") -> str:
    from paceline.cli.listing import align, list_orphans, spell_usage

    parts = []
    if findings.runs:
        rows = [
            [
                str(run.launcher.pid),
                _started(run.launcher).replace("T", " ")[:19],
                str(len(run.ranks)),
                str(len(run.processes)),
                *spell_usage(_total(run, usage)),
                run.launcher.command,
            ]
            for run in findings.runs
        ]
        parts.append(align(["launcher", "started", "ranks", "processes", "memory", "on devices", "command"], rows))
    if findings.orphans:
        listed = list_orphans(findings.orphans, usage)
        parts.append(f"left behind by launchers that have died (`paceline clean` ends it):\n{listed}")
    return "\n\n".join(parts) or "nothing of yours is running, and nothing was left behind"


def _document(findings: "Findings", usage: "Mapping[int, Usage]") -> dict[str, Any]:
    runs = [
        {
            **_entry(run.launcher, _total(run, usage)),
            "ranks": [process.pid for process in run.ranks],
            "processes": [_entry(process, usage[process.pid]) for process in run.processes],
        }
        for run in findings.runs
    ]
    orphans = [
        {**_entry(orphan, usage[orphan.pid]), "launcher": orphan.launcher.pid if orphan.launcher else None}
        for orphan in findings.orphans
    ]
    return {"runs": runs, "orphans": orphans}


def _entry(process: "Process", usage: "Usage") -> dict[str, Any]:
    return {
        "pid": process.pid,
        "started": _started(process),
        "age_s": round(process.age_s, 1),
        "command": process.command,
        "pss_bytes": usage.pss_bytes,
        "device_bytes": usage.device_bytes,
    }


def _total(run: "Run", usage: "Mapping[int, Usage]") -> "Usage":
    from paceline.launch.runs.usage import Usage

    return sum((usage[process.pid] for process in run.processes), Usage())


def _started(process: "Process") -> str:
    from datetime import datetime, timedelta

    return (datetime.now().astimezone() - timedelta(seconds=process.age_s)).isoformat(timespec="seconds")
