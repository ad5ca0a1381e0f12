"""Wrappers that train one model on many devices, and what keeps their replicas equal."""

from paceline.parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
