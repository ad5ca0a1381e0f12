"""Bearing ranks: what leads out of each, and what it is born with."""

import os

from paceline.launch.layout import rank_environment, virtual_local_rank
from paceline.launch.lives.life import Life
from paceline.launch.output.files import Logs
from paceline.launch.output.forwarding import Channel
from paceline.launch.output.plumbing import Outlet, open_channel
from paceline.launch.ranks.local_rank import declared_spelling, local_rank_args
from paceline.launch.server.client import Birth, ForkServer
from paceline.launch.spec.launch import LaunchSpec
from paceline.launch.spec.logs import STREAMS
from paceline.waits import Page


class Nursery:
    """Has ``server`` fork the ranks of ``spec``."""

    def __init__(self, spec: LaunchSpec, server: ForkServer, outlets: list[Outlet], logs: Logs) -> None:
        self._spec = spec
        self._server = server
        self._outlets = outlets
        self._logs = logs
        is_script = not (spec.is_module or spec.is_command)
        self._option = declared_spelling(spec.target) if is_script else None

    def bear(self, life: Life, local_rank: int) -> None:
        """Listen to a rank of ``life``, and have it forked."""
        spec, layout = self._spec, life.layout
        environment = rank_environment(layout, local_rank, role=spec.role, max_restarts=spec.max_restarts)
        if spec.has_virtual_local_rank:
            environment = virtual_local_rank(environment, local_rank, os.environ)
        channels, writers = self._open_channels(life, local_rank)
        reader, report = os.pipe()
        os.set_blocking(reader, False)
        page = Page.make()
        life.attach(local_rank, channels, reader, page)
        args = local_rank_args(
            self._option, spec.args, 0 if spec.has_virtual_local_rank else layout.first_local_rank + local_rank
        )
        self._server.bear(
            Birth(
                local_rank,
                args,
                environment,
                spec.numa_binding,
                writers["stdout"],
                writers["stderr"],
                report,
                page.fd,
            )
        )
        for fd in {*writers.values(), report}:
            os.close(fd)

    def _open_channels(self, life: Life, local_rank: int) -> tuple[list[Channel], dict[str, int]]:
        """The channels of a rank, and its writing end of each stream."""
        channels: list[Channel] = []
        writers: dict[str, int] = {}
        rank = life.layout.first_rank + local_rank
        if self._spec.logs.is_plain:
            for outlet in self._outlets:
                reader, writer = open_channel(outlet)
                channels.append(Channel(reader, rank, outlet))
                writers.update(dict.fromkeys(outlet.streams, writer))
            return channels, writers
        on_host = life.layout.first_local_rank + local_rank
        for stream in STREAMS:
            is_shown = self._spec.logs.is_shown(on_host, stream)
            shown_by = next((outlet for outlet in self._outlets if is_shown and stream in outlet.streams), None)
            reader, writers[stream] = open_channel(shown_by)
            file = self._logs.open(life.layout.life, on_host, rank, stream)
            channels.append(Channel(reader, rank, shown_by, file))
        return channels, writers
