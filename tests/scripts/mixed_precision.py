"""Workers that load, autocast and a scaler, gradients accumulated under ``no_sync``, parameters that are not used."""

import contextlib
import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

ACCUMULATION_STEPS = 2


class Samples(Dataset):
    def __init__(self):
        self.x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.x[index].sum(0, keepdim=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 1)
        self.auxiliary = nn.Linear(4, 1)

    def forward(self, x, with_auxiliary=False):
        return self.auxiliary(x) if with_auxiliary else self.used(x)


def main():
    rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, local_rank if kind == "cuda" else 0)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")

    torch.manual_seed(0)
    model = DDP(Model().to(device), device_ids=[local_rank] if kind == "cuda" else None, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(kind, init_scale=1024.0)
    dataset = Samples()
    sampler = DistributedSampler(dataset, shuffle=True)
    batch_size = len(dataset) // world_size // ACCUMULATION_STEPS
    loader = DataLoader(dataset, batch_size, sampler=sampler, num_workers=1, persistent_workers=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(1, device=device)
        for step, (x, y) in enumerate(loader):
            is_last = (step + 1) % ACCUMULATION_STEPS == 0
            with contextlib.nullcontext() if is_last else model.no_sync():
                with torch.autocast(kind, dtype=torch.bfloat16):
                    loss = nn.functional.mse_loss(model(x.to(device)).float(), y.to(device)) / ACCUMULATION_STEPS
                scaler.scale(loss).backward()
            total += loss.detach()
            if is_last:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 100.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    dist.all_reduce(total)
    if rank == 0:
        print(json.dumps({"loss": total.item() / world_size, "world_size": world_size}))
    del model  # torch's wrapper may wait for ever for a group that it is the last to hold
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
