"""An optimizer whose state is sharded over the ranks, and put together again on rank 0 to be saved."""

import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 1))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9)
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))[rank::world_size]
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    loss = loss.detach()
    dist.all_reduce(loss)
    if rank == 0:
        momenta = [state["momentum_buffer"] for state in optimizer.state_dict()["state"].values()]
        assert [tuple(momentum.shape) for momentum in momenta] == [(1, 4), (1,)]
        print(json.dumps({"loss": loss.item() / world_size, "world_size": world_size}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
