"""Several processes train together, each under a budget of its own: a small language model learns the source text of
the standard library, byte by byte, replicated by DistributedDataParallel or sharded by fully_shard.

torchrun --nproc-per-node 2 examples/ddp_torchrun.py --budget 160MiB
torchrun --nproc-per-node 2 examples/ddp_torchrun.py --shard --budget 160MiB

Without Spillway this is the same script less the two lines that are marked, with the same losses.
"""

from __future__ import annotations

import argparse
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

from spillway.integrations.automatic_steps import AutomaticSteps  # the first line
from spillway.workloads.stdlib_text import PAD, VOCABULARY, clipped, functions


class Reader(nn.Module):
    """Bytes [batch, length] -> scores of what comes after each [batch * length, VOCABULARY]"""

    def __init__(self, width: int = 128, layers: int = 6, longest: int = 256) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(longest, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        x = self.bytes(text) + self.places(torch.arange(length, device=text.device))
        later = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        for layer in self.layers:
            x = layer(x, src_mask=later, is_causal=True)
        scores: Tensor = self.head(x.flatten(0, 1))
        return scores


def batches(steps: int, rank: int, device: torch.device, *, batch: int = 8, longest: int = 256) -> list[Tensor]:
    """Each as long as the longest of its functions; every rank reads others."""
    texts = (torch.tensor(list(clipped(text, longest))) for text in functions(seed=rank))
    rows = [[*islice(texts, batch)] for _ in range(steps)]
    return [pad_sequence(row, batch_first=True, padding_value=PAD).to(device) for row in rows]


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    """Mean cross entropy of the next byte, in nats."""
    return F.cross_entropy(model(text[:, :-1]), text[:, 1:].flatten(), ignore_index=PAD)


def main() -> None:
    """Train, and print the losses of this rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="160MiB", help="of each rank")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--shard", action="store_true", help="fully_shard instead of DistributedDataParallel")
    parser.add_argument("--steps", type=int, default=8)
    chosen = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = (
        torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
    )
    torch.manual_seed(0)
    model: nn.Module = Reader().to(device)
    if chosen.shard:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)
    with AutomaticSteps(model, optimizer, budget=chosen.budget, method=chosen.method):  # the second line
        for number, text in enumerate(batches(chosen.steps, rank, device)):
            loss = loss_of(model, text)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"rank {rank}, step {number}: loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
