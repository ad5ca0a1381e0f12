"""Model parallelism: the parts of one model on different devices, or on different ranks."""

from paceline.pipeline.balance import partition
from paceline.pipeline.make import make_schedule
from paceline.pipeline.picture import draw
from paceline.pipeline.pipeline import Pipeline
from paceline.pipeline.schedule import Action, Schedule

__all__ = ["Action", "Pipeline", "Schedule", "draw", "make_schedule", "partition"]
