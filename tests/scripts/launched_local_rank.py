"""As scripts for ``torch.distributed.launch`` were written for years: ``--local_rank`` is an option, and required."""

import argparse
import json

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", default=3, type=int)
parser.add_argument("--local_rank", required=True, type=int)
args = parser.parse_args()

if torch.cuda.is_available():
    torch.cuda.set_device(args.local_rank)
dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo", init_method="env://")

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
if torch.cuda.is_available():
    model = model.cuda()
model = DistributedDataParallel(
    model,
    device_ids=[args.local_rank] if torch.cuda.is_available() else None,
    output_device=args.local_rank if torch.cuda.is_available() else None,
)
x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0)).chunk(dist.get_world_size())[dist.get_rank()]
y = x.sum(1, keepdim=True)
for _ in range(args.steps):
    loss = torch.nn.functional.mse_loss(model(x), y)
    model.zero_grad()
    loss.backward()
    for param in model.parameters():
        param.data.add_(param.grad.data, alpha=-0.1)

loss = loss.detach()
dist.all_reduce(loss)
if args.local_rank == 0:
    print(json.dumps({"loss": loss.item() / dist.get_world_size(), "world_size": dist.get_world_size()}))
del model  # torch's wrapper may wait for ever for a group that it is the last to hold
dist.destroy_process_group()
