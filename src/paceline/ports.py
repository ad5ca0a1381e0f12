"""Who holds a port, for errors that can be acted upon."""

import time


def describe_port_holder(port: int) -> str:
    """Who listens on ``port`` here, as far as this user may see: ``pid 12 ('python train.py', started ...)``."""
    import psutil  # when it is needed: the command line is to start at once

    try:
        for connection in psutil.net_connections(kind="tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if listens and connection.pid is not None:
                process = psutil.Process(connection.pid)
                command = " ".join(process.cmdline())[:120] or process.name()
                started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(process.create_time()))
                return f"pid {process.pid} ({command!r}, started {started})"
    except psutil.Error:
        pass
    return "a process that this user may not see"
