"""In the manner of torch's DDP tutorial: ``setup``, ``mp.spawn``, a checkpoint between two barriers."""

import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CHECKPOINT = os.path.join(tempfile.gettempdir(), "model.checkpoint")


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = sys.argv[1] if len(sys.argv) > 1 else "12355"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


def train_some(ddp_model, rank, world_size, steps):
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    share = slice(rank, None, world_size)
    inputs, labels = x[share], x[share].sum(1, keepdim=True)
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_fn(ddp_model(inputs), labels)
        loss.backward()
        optimizer.step()
    return loss.detach()


def demo_checkpoint(rank, world_size):
    setup(rank, world_size)
    torch.manual_seed(0 if rank == 0 else rank)  # DDP gives all ranks the weights of rank 0
    ddp_model = DDP(nn.Linear(4, 1))
    train_some(ddp_model, rank, world_size, steps=2)
    if rank == 0:
        torch.save(ddp_model.state_dict(), CHECKPOINT)
    dist.barrier()
    ddp_model = DDP(nn.Linear(4, 1))
    map_location = {"cuda:0": f"cuda:{rank}"}
    ddp_model.load_state_dict(torch.load(CHECKPOINT, map_location=map_location, weights_only=True))
    loss = train_some(ddp_model, rank, world_size, steps=2)
    dist.barrier()
    if rank == 0:
        os.remove(CHECKPOINT)
    dist.all_reduce(loss)
    if rank == 0:
        print(json.dumps({"loss": loss.item() / world_size, "world_size": world_size}))
    cleanup()


def run_demo(demo_fn, world_size):
    mp.spawn(demo_fn, args=(world_size,), nprocs=world_size, join=True)


if __name__ == "__main__":
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 2
    run_demo(demo_checkpoint, n_gpus)
