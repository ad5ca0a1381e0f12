"""Sharded data: which samples each rank sees, how they are loaded, and how the results come back together."""

from paceline.data.batches import BatchSampler
from paceline.data.gather import gather
from paceline.data.loader import DataLoader
from paceline.data.sampler import DistributedSampler

__all__ = ["BatchSampler", "DataLoader", "DistributedSampler", "gather"]
