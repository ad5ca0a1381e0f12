"""What befalls a launch, by which it is decided how it ends."""

import signal
from dataclasses import dataclass

from paceline.launch.wire import Message


@dataclass
class Course:
    """What has befallen it so far.

    Attributes:
        ending_signal: by which the user has ended it.
        had_failed: ranks were being stopped already when that came.
        is_hurried: the user has no more patience: output that nobody reads is given up.
        output_closed: nobody reads what ranks say.
        broken: why the launcher itself cannot go on.
        peer_failure: of another host, in this life.
        is_changing: hosts come or go, so the next life costs no restart.
    """

    ending_signal: signal.Signals | None = None
    had_failed: bool = False
    is_hurried: bool = False
    output_closed: bool = False
    broken: str | None = None
    peer_failure: Message | None = None
    is_changing: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether the user still wants it."""
        return self.ending_signal is None and not self.output_closed

    @property
    def may_go_on(self) -> bool:
        """Whether there may be another life."""
        return self.is_wanted and self.broken is None
