"""Imported by the standard library's fork server before it forks, so that each rank finds what scripts want.

The invariant: meanwhile the server dies with whoever started it and leaves Ctrl-C to them; afterwards it is as it was.
"""

import os
import signal

from paceline.launch.prctl import die_with_parent, outlive_parent
from paceline.launch.server.forkserver import preload

die_with_parent(os.getppid())
_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
preload("")
signal.signal(signal.SIGINT, _handler)
outlive_parent()
