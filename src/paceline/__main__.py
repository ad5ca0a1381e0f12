"""``python -m paceline`` is the ``paceline`` command.

Its invariant: a key or a signal that comes while the command is still being imported leaves no traceback.
"""

import signal

# Ctrl-C ends the command at once, until `paceline run` has handlers of its own; SIGUSR2 asks for stacks that are not
# there yet.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
    signal.signal(signal.SIGUSR2, lambda *_: None)

from paceline.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
