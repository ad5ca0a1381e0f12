"""Wrappers that train one model on many devices, and what keeps their replicas equal."""

from paceline.parallel.distributed import DistributedDataParallel
from paceline.parallel.global_mean import global_mean
from paceline.parallel.patch import patch_torch
from paceline.parallel.sync_batchnorm import SyncBatchNorm

__all__ = ["DistributedDataParallel", "SyncBatchNorm", "global_mean", "patch_torch"]
