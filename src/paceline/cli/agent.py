"""``paceline agent``: what ``paceline run --hosts`` starts on each host. Not for people."""

import click


@click.command(hidden=True)
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def agent(program: tuple[str, ...]) -> int:  # noqa: ARG001
    """Serve a conductor at the other end of stdin and stdout. PROGRAM is for those who look for its processes."""
    from paceline.cli.options import spec_of
    from paceline.launch.hosts.agent import serve

    return serve(spec_of)
