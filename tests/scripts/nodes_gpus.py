"""In the manner of a well-read blog post: ``-n`` nodes with ``-g`` GPUs each, of which this is number ``-nr``."""

import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", "--nodes", default=1, type=int)
    parser.add_argument("-g", "--gpus", default=1, type=int, help="per node")
    parser.add_argument("-nr", "--nr", default=0, type=int, help="this node's rank among the nodes")
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("--port", default="8888")
    args = parser.parse_args()
    args.world_size = args.gpus * args.nodes
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = args.port
    mp.spawn(train, nprocs=args.gpus, args=(args,))


def train(gpu, args):
    rank = args.nr * args.gpus + gpu
    dist.init_process_group(backend="gloo", init_method="env://", world_size=args.world_size, rank=rank)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    if torch.cuda.is_available():
        torch.cuda.set_device(gpu)
        model.cuda(gpu)
    criterion = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[gpu] if torch.cuda.is_available() else None)
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    train_dataset = TensorDataset(x, x.sum(1, keepdim=True))
    train_sampler = DistributedSampler(train_dataset, num_replicas=args.world_size, rank=rank)
    train_loader = DataLoader(train_dataset, 32 // args.world_size, pin_memory=False, sampler=train_sampler)
    for _ in range(args.epochs):
        for images, labels in train_loader:
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    loss = loss.detach()
    dist.all_reduce(loss)
    if rank == 0:
        print(json.dumps({"loss": loss.item() / args.world_size, "world_size": args.world_size}))
    del model  # torch's wrapper may wait for ever for a group that it is the last to hold
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
