"""In the manner of early language-model scripts: rank 0 fetches the data while the others wait at a barrier."""

import argparse
import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def load_and_cache_examples(args):
    if args.local_rank not in [-1, 0]:
        dist.barrier()  # the first one fetches, the others find the cache
    if os.path.exists("cached_train.pt"):
        x = torch.load("cached_train.pt")
    else:
        x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
        with open("downloads.log", "a") as log:
            log.write("downloaded\n")
        if args.local_rank in [-1, 0]:
            torch.save(x, "cached_train.pt")
    if args.local_rank == 0:
        dist.barrier()
    return TensorDataset(x, x.sum(1, keepdim=True))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--per_gpu_train_batch_size", type=int, default=16)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    args = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        args.local_rank = int(os.environ["LOCAL_RANK"])
    if args.local_rank == -1:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    else:
        if torch.cuda.is_available():
            torch.cuda.set_device(args.local_rank)
        device = torch.device("cuda", args.local_rank) if torch.cuda.is_available() else torch.device("cpu")
        dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")

    train_dataset = load_and_cache_examples(args)
    train_sampler = RandomSampler(train_dataset) if args.local_rank == -1 else DistributedSampler(train_dataset)
    loader = DataLoader(train_dataset, sampler=train_sampler, batch_size=args.per_gpu_train_batch_size)

    torch.manual_seed(0)
    model = nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if args.local_rank != -1:
        model = nn.parallel.DistributedDataParallel(
            model,
            device_ids=[args.local_rank] if torch.cuda.is_available() else None,
            output_device=args.local_rank if torch.cuda.is_available() else None,
            find_unused_parameters=True,
        )
    for _ in range(args.num_train_epochs):
        for batch in loader:
            x, y = (tensor.to(device) for tensor in batch)
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
            model.zero_grad()
    loss = loss.detach()
    world_size = 1
    if args.local_rank != -1:
        world_size = dist.get_world_size()
        dist.all_reduce(loss)
        del model  # torch's wrapper may wait for ever for a group that it is the last to hold
        dist.destroy_process_group()
    if args.local_rank in [-1, 0]:
        print(json.dumps({"loss": loss.item() / world_size, "world_size": world_size}))


if __name__ == "__main__":
    main()
