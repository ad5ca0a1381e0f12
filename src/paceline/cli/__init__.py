"""The ``paceline`` command.

Its invariant: what a command needs is imported when the command runs, so ``paceline --help`` is instant, and an error
of ours is one line and exit code 2, never a traceback.
"""

import sys
from collections.abc import Sequence

import click

import paceline
from paceline.cli.agent import agent
from paceline.cli.bench import bench
from paceline.cli.clean import clean
from paceline.cli.completion import completion
from paceline.cli.ps import ps
from paceline.cli.run import run
from paceline.errors import PacelineError

__all__ = ["main"]


def _show_versions(context: click.Context, _parameter: click.Parameter, is_asked: bool) -> None:
    if is_asked and not context.resilient_parsing:
        import importlib.metadata
        import platform

        try:
            torch = f"torch {importlib.metadata.version('torch')}"  # without its import, which takes seconds
        except importlib.metadata.PackageNotFoundError:
            torch = "no torch"
        click.echo(f"paceline, version {paceline.__version__} ({torch}, Python {platform.python_version()})")
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_versions,
    help="Show versions and exit.",
)
def command() -> None:
    """Train a PyTorch script on many devices."""


for subcommand in (run, bench, ps, clean, completion, agent):
    command.add_command(subcommand)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line ``args`` (by default the process's own), and exit with its code."""
    try:
        status = command.main(args, prog_name="paceline", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        status = error.exit_code
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx is not None else "paceline"
        status = _fail(f"{error.format_message()} (see `{where} --help`)")
    except click.Abort:
        status = 130
    except PacelineError as error:
        status = _fail(str(error))
    sys.exit(status)


def _fail(message: str) -> int:
    click.echo(f"paceline: {message}", err=True)
    return 2
