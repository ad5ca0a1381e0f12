"""Wrappers that train one model on many devices, and what keeps their replicas equal."""

from paceline.parallel.data_parallel import DataParallel, data_parallel, gather, parallel_apply, replicate, scatter
from paceline.parallel.ddp.wrapper import DistributedDataParallel
from paceline.parallel.global_mean import global_mean
from paceline.parallel.patch import patch_torch
from paceline.parallel.sync_batchnorm import SyncBatchNorm

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "SyncBatchNorm",
    "data_parallel",
    "gather",
    "global_mean",
    "parallel_apply",
    "patch_torch",
    "replicate",
    "scatter",
]
