"""``paceline clean``: end what launchers that have died left behind, after showing it."""

import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.launch.runs.look import Findings
    from paceline.launch.runs.sweep import Swept
    from paceline.launch.runs.usage import Usage


@click.command(short_help="End what launchers that have died left behind.")
@click.option("--yes", "is_agreed", is_flag=True, help="Do not ask.")
@click.option("--dry-run", "--dry_run", "is_dry", is_flag=True, help="Show what would be ended, and end nothing.")
@click.argument("launchers", metavar="[LAUNCHER]...", nargs=-1, type=int)
def clean(is_agreed: bool, is_dry: bool, launchers: tuple[int, ...]) -> int:
    """End what launchers that have died left behind on this host: all of it, or what descends from each LAUNCHER (a
    pid, as `paceline ps` shows it).

    It is shown first, then asked to end (SIGTERM), and killed after two seconds. Nothing else is touched: no run whose
    launcher lives, nobody else's process, and none that has taken over the pid of one that was shown. A service that a
    script has left running on purpose is left over too: look at the list.

    The exit code is 1 where something is left, or nobody could be asked.
    """
    from paceline.launch.runs.look import look
    from paceline.launch.runs.sweep import sweep
    from paceline.launch.runs.usage import measure

    findings = _of(look(), launchers)
    if not findings.orphans:
        click.echo("nothing was left behind")
        return 0
    usage = measure(orphan.pid for orphan in findings.orphans)
    _show(findings, usage)
    if is_dry:
        return 0
    if not is_agreed:
        if not sys.stdin.isatty():
            click.echo("nothing was ended: `paceline clean --yes` ends these without asking", err=True)
            return 1
        if not click.confirm(f"end {_count(len(findings.orphans))}?"):
            click.echo("nothing was ended")
            return 1
    # The answer may have taken its time: what is ended was shown, and is left over still.
    still = {(orphan.pid, orphan.started) for orphan in look().orphans}
    orphans = [orphan for orphan in findings.orphans if (orphan.pid, orphan.started) in still]
    usage = measure(orphan.pid for orphan in orphans)
    swept = sweep(orphans)
    click.echo(_ended(swept, usage))
    return _name_what_is_left(swept, _of(look(), launchers))


def _of(findings: "Findings", launchers: tuple[int, ...]) -> "Findings":
    from dataclasses import replace

    chosen = (o for o in findings.orphans if not launchers or (o.launcher and o.launcher.pid in launchers))
    return replace(findings, orphans=tuple(chosen))


def _show(findings: "Findings", usage: "Mapping[int, Usage]") -> None:
    from paceline.cli.listing import list_orphans

    click.echo(list_orphans(findings.orphans, usage))


def _ended(swept: "Swept", usage: "Mapping[int, Usage]") -> str:
    from paceline.cli.listing import spell_bytes
    from paceline.launch.runs.usage import Usage

    back = sum((usage[process.pid] for process in swept.ended), Usage())
    places = [(spell_bytes(back.pss_bytes), "of memory"), (spell_bytes(back.device_bytes), "on devices")]
    amounts = " and ".join(f"{amount} {where}" for amount, where in places if amount)
    return f"ended {_count(len(swept.ended))}" + (f"; {amounts} came back" if amounts else "")


def _name_what_is_left(swept: "Swept", now: "Findings") -> int:
    """Say it on stderr; the exit code."""
    from paceline.launch.runs.sweep import describe_survivor

    for process in swept.surviving:
        click.echo(describe_survivor(process), err=True)
    known = {(process.pid, process.started) for process in swept.surviving}
    new = [orphan for orphan in now.orphans if (orphan.pid, orphan.started) not in known]
    if new:
        click.echo(f"{_count(len(new))} appeared meanwhile; run `paceline clean` again", err=True)
    return 1 if swept.surviving or new else 0


def _count(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"
