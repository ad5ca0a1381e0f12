import os
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import paceline

world = paceline.init()
