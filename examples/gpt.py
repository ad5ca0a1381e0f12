"""A character-level GPT that learns to write like Python's language reference, which every Python ships.

python examples/gpt.py                              one process
paceline run -n 2 examples/gpt.py                   two ranks, with the same result

Paragraphs are of unequal length, so ranks hold unequal numbers of characters: `global_mean` divides by those of all
ranks, over all batches of a step. Stop it when you like, by Ctrl-C, kill or a power cut: the same command goes on where
the last checkpoint was. Told by SIGTERM or SIGUSR1 to make room, it saves first, and exits with 75.
"""

import argparse
import contextlib
import functools
import math
import pydoc_data.topics
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import random_split

import paceline
from paceline.data import Mean

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--every", type=int, default=100, help="steps from one checkpoint, and one line, to the next")
parser.add_argument("--batch-size", type=int, default=64, help="pieces of text in a step, over all ranks")
parser.add_argument("--accumulate", type=int, default=2, help="parts into which each rank cuts its batch")
parser.add_argument("--context", type=int, default=64, help="characters")
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
parser.add_argument("--folder", default="runs/gpt", help="for the checkpoints")
parser.add_argument("--save", help="where to write the trained parameters alone")
args = parser.parse_args()
torch.set_default_dtype(getattr(torch, args.dtype))

NOTHING = -1  # fills up the shorter pieces of a batch
paragraphs = [paragraph + "\n" for topic in pydoc_data.topics.topics.values() for paragraph in topic.split("\n\n")]
alphabet = sorted({character for paragraph in paragraphs for character in paragraph})
code = {character: number for number, character in enumerate(alphabet)}
coded = [torch.tensor([code[character] for character in paragraph]) for paragraph in paragraphs]
pieces = [piece for paragraph in coded for piece in paragraph.split(args.context + 1) if len(piece) > 1]


class Gpt(nn.Module):
    def __init__(self, num_tokens, context, num_layers, width=128, num_heads=4):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(num_tokens, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, num_heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, num_tokens, bias=False)

    def forward(self, x):  # (batch, time) to (batch, time, num_tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        return self.head(self.layers(x, mask, is_causal=True))


def losses(model, batch):
    """The loss of each character (batch * time), given those before it; 0 where there is nothing to guess."""
    batch = batch.to(world.device)
    scores = model(batch[:, :-1].clamp(min=0)).flatten(0, 1)
    return cross_entropy(scores, batch[:, 1:].flatten(), ignore_index=NOTHING, reduction="none")


def train(model, optimizer, batch):
    """One step, in several parts; returns the loss over all of them, on all ranks."""
    num_characters = (batch[:, 1:] != NOTHING).sum().item()
    optimizer.zero_grad()
    loss, parts = 0.0, batch.tensor_split(args.accumulate)
    for number, part in enumerate(parts, 1):
        with contextlib.nullcontext() if number == len(parts) else model.no_sync():  # gradients travel once
            share = paceline.global_mean(losses(model, part).sum(), num_characters)
            share.backward()
        loss += share.item()
    optimizer.step()
    return loss


@torch.no_grad()
def test(model, loader):
    """Bits for each character of the pieces that it was not trained on."""
    model.eval()
    loss = Mean()
    for batch in loader:
        loss.update(losses(model, batch), batch[:, 1:].flatten() != NOTHING)
    model.train()
    return loss.compute() / math.log(2)


with paceline.init() as world:
    world.seed(0)
    train_set, test_set = random_split(pieces, [0.98, 0.02])
    collate = functools.partial(pad_sequence, batch_first=True, padding_value=NOTHING)
    options = {"global_batch_size": args.batch_size, "collate_fn": collate}
    loader = paceline.DataLoader(train_set, shuffle=True, drop_last=True, **options)
    test_loader = paceline.DataLoader(test_set, padding=False, **options)  # each piece once
    model = paceline.DistributedDataParallel(Gpt(len(alphabet), args.context, args.layers).to(world.device))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    run = {"model": model, "optimizer": optimizer, "loader": loader}
    with paceline.Checkpointer(args.folder, every=args.every, **run) as checkpoints:
        world.print(f"{len(pieces)} pieces of text; begins after step {checkpoints.resume()}")
        must_stop = False
        while checkpoints.num_steps < args.steps and not must_stop:
            for batch in loader:
                loss = train(model, optimizer, batch)
                must_stop = checkpoints.step()
                if checkpoints.num_steps % args.every == 0:
                    bits = test(model, test_loader)
                    world.print(
                        f"step {checkpoints.num_steps}: loss {loss:.3f}; {bits:.3f} bits a character in the test"
                    )
                if must_stop or checkpoints.num_steps == args.steps:
                    break
        if args.save:
            checkpoints.export(args.save)
sys.exit(75 if must_stop else 0)  # examples/launching/train.sbatch then queues the job again
