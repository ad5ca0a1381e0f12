"""``paceline agent``: what ``paceline run --hosts`` starts on each host. Not for people."""

import click


@click.command(hidden=True)
def agent() -> int:
    """Serve a conductor at the other end of stdin and stdout."""
    from paceline.cli.options import spec_of
    from paceline.launch.agent.agent import serve

    return serve(spec_of)
