"""Data parallelism in one process: replicas of a module on several devices, in threads."""

from paceline.parallel.data_parallel.apply import parallel_apply
from paceline.parallel.data_parallel.gather import gather
from paceline.parallel.data_parallel.replicate import replicate
from paceline.parallel.data_parallel.scatter import scatter
from paceline.parallel.data_parallel.wrapper import DataParallel, data_parallel

__all__ = ["DataParallel", "data_parallel", "gather", "parallel_apply", "replicate", "scatter"]
