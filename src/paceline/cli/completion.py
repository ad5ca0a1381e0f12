"""``paceline completion``: what a shell reads to complete paceline's command line, and what options complete to."""

import signal
from collections.abc import Callable

import click
from click.shell_completion import CompletionItem, get_completion_class

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

_VARIABLE = "_PACELINE_COMPLETE"  # by which the shell asks; click reads it


@click.command(short_help="Print what has your shell complete paceline's command line.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print what has SHELL complete paceline's commands, options and their values.

    \b
        eval "$(paceline completion bash)"        in ~/.bashrc (bash 4.4 or newer)
        eval "$(paceline completion zsh)"         in ~/.zshrc
        paceline completion fish | source         in ~/.config/fish/config.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(context.find_root().command, {}, "paceline", _VARIABLE).source())


def words(*choices: str) -> Complete:
    """Complete to one of ``choices``; other values are allowed."""
    return lambda _context, _parameter, begun: [CompletionItem(each) for each in choices if each.startswith(begun)]


def files(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Leave it to the shell, which completes names of files."""
    return [CompletionItem(begun, type="file")]


def folders(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """The same of folders alone."""
    return [CompletionItem(begun, type="dir")]


def signal_names(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete the last of several names between commas."""
    before, comma, last = begun.rpartition(",")
    names = (each.name for each in signal.Signals if each not in (signal.SIGKILL, signal.SIGSTOP))
    return [CompletionItem(f"{before}{comma}{name}") for name in names if name.startswith(last)]
