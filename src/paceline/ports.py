"""Ports: how they are spelt, and who holds one, for errors that can be acted upon."""

import time

from paceline.processes import is_left_over, spell_command


def describe_port_holder(port: int) -> str:
    """Who listens on ``port`` here, as far as this user may see: ``pid 12 ('python train.py', started ...)``.

    Of what an earlier launch has left behind it is said that it is that, and what ends it.
    """
    import psutil  # when it is needed: the command line is to start at once

    try:
        for connection in psutil.net_connections(kind="tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if listens and connection.pid is not None:
                process = psutil.Process(connection.pid)
                command = _shorten(spell_command(process.cmdline())) or process.name()
                started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(process.create_time()))
                left = "; an orphan of a launcher that has died: `paceline clean` ends it"
                return f"pid {process.pid} ({command!r}, started {started}{left if is_left_over(process.pid) else ''})"
    except psutil.Error:
        pass
    return "a process that this user may not see"


def spell_endpoint(host: str, port: int) -> str:
    """``host:port``, or ``[address]:port`` for IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _shorten(command: str, width: int = 120) -> str:
    """Both ends: which program it is, and what it was given last."""
    half = (width - 3) // 2
    return command if len(command) <= width else f"{command[:half]}...{command[-half:]}"
