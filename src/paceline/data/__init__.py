"""Sharded data: which samples each rank sees, how they are loaded, and how the results come back together."""

from paceline.data.batches import BatchSampler
from paceline.data.fingerprint import Fingerprint, fingerprint
from paceline.data.gather import gather
from paceline.data.loader import DataLoader
from paceline.data.metrics import Accuracy, ConfusionCounts, Mean
from paceline.data.sampler import DistributedSampler
from paceline.data.speeds import measured_weights

__all__ = [
    "Accuracy",
    "BatchSampler",
    "ConfusionCounts",
    "DataLoader",
    "DistributedSampler",
    "Fingerprint",
    "Mean",
    "fingerprint",
    "gather",
    "measured_weights",
]
