"""What happens in a backward, as events; timelines that keep them, traces to look at, and how much was overlapped."""

from paceline.timeline.events import Event, Kind, Observer
from paceline.timeline.overlap import Measured
from paceline.timeline.timeline import Timeline
from paceline.timeline.traces import merge_traces

__all__ = ["Event", "Kind", "Measured", "Observer", "Timeline", "merge_traces"]
