import os

import torch.distributed as dist

import paceline

if dist.is_initialized():
    dist.destroy_process_group()
paceline.shutdown()
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
