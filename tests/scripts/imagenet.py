"""In the manner of torch's ImageNet example: ranks by ``mp.spawn`` or by a launcher, meters, checkpoints, resuming."""

import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("-b", "--batch-size", default=8, type=int, help="of all ranks of this node together")
parser.add_argument("--lr", default=0.05, type=float)
parser.add_argument("--momentum", default=0.9, type=float)
parser.add_argument("--resume", default="", type=str, help="a checkpoint")
parser.add_argument("--world-size", default=-1, type=int, help="nodes; with env:// and one process a rank, ranks")
parser.add_argument("--rank", default=-1, type=int)
parser.add_argument("--dist-url", default="tcp://127.0.0.1:23456", type=str)
parser.add_argument("--dist-backend", default="gloo", type=str)
parser.add_argument("--gpu", default=None, type=int)
parser.add_argument("--multiprocessing-distributed", action="store_true")


def main():
    args = parser.parse_args()
    if args.dist_url == "env://" and args.world_size == -1:
        args.world_size = int(os.environ["WORLD_SIZE"])
    args.distributed = args.world_size > 1 or args.multiprocessing_distributed
    ngpus_per_node = torch.cuda.device_count() if torch.cuda.is_available() else 2
    if args.multiprocessing_distributed:
        args.world_size = ngpus_per_node * args.world_size
        mp.spawn(main_worker, nprocs=ngpus_per_node, args=(ngpus_per_node, args))
    else:
        main_worker(args.gpu, ngpus_per_node, args)


def main_worker(gpu, ngpus_per_node, args):
    if args.distributed:
        if args.dist_url == "env://" and args.rank == -1:
            args.rank = int(os.environ["RANK"])
        if args.multiprocessing_distributed:
            args.rank = args.rank * ngpus_per_node + gpu
        dist.init_process_group(
            args.dist_backend, init_method=args.dist_url, world_size=args.world_size, rank=args.rank
        )

    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    if torch.cuda.is_available() and gpu is not None:
        torch.cuda.set_device(gpu)
        model.cuda(gpu)
    if args.distributed:
        args.batch_size = args.batch_size // ngpus_per_node
        model = torch.nn.parallel.DistributedDataParallel(model)
    criterion = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)

    start_epoch = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu")
        start_epoch = checkpoint["epoch"]
        (model.module if args.distributed else model).load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])

    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(dataset) if args.distributed else None
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=sampler is None, sampler=sampler)

    for epoch in range(start_epoch, args.epochs):
        if args.distributed:
            sampler.set_epoch(epoch)
        losses = train(loader, model, criterion, optimizer)
        scheduler.step()
        if args.distributed:
            losses.all_reduce()
        if not args.distributed or args.rank % ngpus_per_node == 0:
            checkpoint = {
                "epoch": epoch + 1,
                "state_dict": (model.module if args.distributed else model).state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }
            torch.save(checkpoint, "checkpoint.pth.tar")
    if not args.distributed or args.rank == 0:
        print(json.dumps({"loss": losses.avg, "world_size": max(args.world_size, 1)}))
    if args.distributed:
        del model  # torch's wrapper may wait for ever for a group that it is the last to hold
        dist.destroy_process_group()


def train(loader, model, criterion, optimizer):
    losses = AverageMeter("Loss", ":.4e")
    model.train()
    for images, target in loader:
        loss = criterion(model(images), target)
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


class AverageMeter:
    """The average of what it has been told, weighted."""

    def __init__(self, name, fmt=":f"):
        self.name = name
        self.fmt = fmt
        self.sum = 0.0
        self.count = 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()


if __name__ == "__main__":
    main()
