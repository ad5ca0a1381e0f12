"""As scripts for ``torch.distributed.launch --use_env`` are written: no option, all from the environment."""

import json
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def init_distributed_mode():
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return 0, 1, False
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        backend = "nccl"
    dist.init_process_group(backend=backend, init_method="env://", world_size=world_size, rank=rank)
    dist.barrier()
    return rank, world_size, True


def main():
    rank, world_size, distributed = init_distributed_mode()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    model_without_ddp = model
    if distributed:
        model = DDP(model)
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0)).chunk(world_size)[rank]
    y = x.sum(1, keepdim=True)
    for _ in range(3):
        loss = torch.nn.functional.mse_loss(model(x), y)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for param in model_without_ddp.parameters():
                param -= 0.1 * param.grad
    loss = loss.detach()
    if distributed:
        dist.all_reduce(loss)
    if rank == 0:
        print(json.dumps({"loss": loss.item() / world_size, "world_size": world_size}))
    if distributed:
        del model  # torch's wrapper may wait for ever for a group that it is the last to hold
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
