"""What the rows of `test_integrations_distributed.py` train: a loop of plain PyTorch, alone, with DDP, or sharded.

Of several processes one runs for each rank: `python -m tests.cpu.integration_processes RANK WORLD STORE`, with a line
of JSON for each training on the standard input, and on the standard output the file that says what it left.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import spillway
from spillway.errors import SpillwayError, UsageError
from spillway.internals.private import default_store
from spillway.methods.actions import Action
from spillway.methods.by_block import BlockPlan, Decision, Phase
from spillway.methods.checkpoint import Checkpoint
from spillway.session import ranks
from spillway.session.ranks import Agreement
from tests.cpu.process_programs import let_go_of_the_group

STEPS: Final = 7
TOKENS: Final = 64
WIDTH: Final = 48
LENGTHS: Final = (24, 40, 32)
PATIENCE: Final = timedelta(seconds=60)
"""What a collective waits for the others, before it fails in all of them."""


class Layer(nn.Module):
    """A residual block with a random stream and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.second(self.first(self.norm(x)))))))
        return out


class Predictor(nn.Module):
    """Tokens [batch, length] -> scores of the next ones [batch, length, TOKENS]"""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.layers = nn.ModuleList(Layer() for _ in range(5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(x)
        return scores


def built(kind: str) -> tuple[Any, torch.optim.Optimizer]:
    """The model as the loop calls it, and its optimizer."""
    torch.manual_seed(0)
    model: Any = Predictor()
    if kind.startswith("DDP"):
        model = DistributedDataParallel(model, bucket_cap_mb=0.05)
    elif kind.startswith("FSDP2"):
        for layer in model.layers:
            if kind.endswith(("parts", "parts alone")):
                for part in (layer.first, layer.second, layer.up, layer.down):
                    fully_shard(part)
            if not kind.endswith("alone"):
                fully_shard(layer)
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def synchronised(model: Any, last: bool) -> AbstractContextManager[Any]:
    """Gradients of the last micro-batch are, those of the others wait for them."""
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    return nullcontext()


def batches(number: int, several: int) -> list[Tensor]:
    """The micro-batches of a step of this rank; steps have other lengths, and so have the other ranks."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    chance = torch.Generator().manual_seed(100 * number + rank)
    length = LENGTHS[(number + rank) % len(LENGTHS)]
    return [torch.randint(TOKENS, (24, length + 1), generator=chance) for _ in range(several)]


def loss_of(model: Any, batch: Tensor, situation: str) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=situation == "bf16 autocast"):
        scores = model(batch[:, :-1])
    return F.cross_entropy(scores.float().flatten(0, 1), batch[:, 1:].flatten())


def steps(model: Any, optimizer: torch.optim.Optimizer, situation: str, step: Any, numbers: range) -> Iterator[Tensor]:
    """Tells losses, norms of gradients and figures of evaluations."""
    for number in numbers:
        micros = batches(number, 3 if situation == "accumulation" else 1)
        with step(micros):
            for at, micro in enumerate(micros):
                with synchronised(model, at == len(micros) - 1):
                    loss = loss_of(model, micro, situation) / len(micros)
                    loss.backward()
                yield loss.detach()
            if situation == "clipping":
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                yield norm.full_tensor() if isinstance(norm, DTensor) else norm
            optimizer.step()
            optimizer.zero_grad()
        if situation == "evaluation":
            model.eval()
            with torch.no_grad():
                yield loss_of(model, batches(number + 50, 1)[0], situation)
            model.train()


def saved(model: Any, optimizer: torch.optim.Optimizer) -> io.BytesIO:
    file = io.BytesIO()
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "stream": torch.get_rng_state()}
    torch.save(states, file)
    file.seek(0)
    return file


def resumed(kind: str, file: io.BytesIO) -> tuple[Any, torch.optim.Optimizer]:
    """In new objects."""
    model, optimizer = built(kind)
    found = torch.load(file, weights_only=False)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    torch.set_rng_state(found["stream"])
    return model, optimizer


def train(kind: str, situation: str, method: str | None, budget: int | None) -> dict[str, Any]:
    """What was told, what is there at the end, and the peaks of the session's steps."""
    if kind.startswith("Lightning"):
        from tests.cpu import lightning_processes  # which takes seconds, and imports this

        return lightning_processes.train(situation, method, budget)
    model, optimizer = built(kind)
    torch.manual_seed(10 + (dist.get_rank() if dist.is_initialized() else 0))
    told: list[Tensor] = []
    peaks: list[int] = []
    parts = [range(STEPS)] if situation != "save and resume" else [range(STEPS // 2), range(STEPS // 2, STEPS)]
    for part in parts:
        if part.start:
            model, optimizer = resumed(kind, saved(model, optimizer))
        with contextlib.ExitStack() as stack:
            step: Any = lambda batch: nullcontext()  # noqa: E731
            if method is not None:
                kept = budget is None and method != "lru"
                memory = stack.enter_context(
                    spillway.manage(
                        model, optimizer, budget=budget, method=method, report=spillway.ReportOptions(timeline=kept)
                    )
                )
                step = memory.step
            told += steps(model, optimizer, situation, step, part)
            if method is not None:
                assert all(report.peak_measured for report in memory.history)
                peaks += [report.peak_bytes for report in memory.history]
    state = {name: local(value) for name, value in model.state_dict().items()}
    for number, values in enumerate(optimizer.state.values()):
        state |= {f"{name} {number}": local(value) for name, value in values.items()}
    return {"told": told, "state": state | {"stream": torch.get_rng_state()}, "peaks": peaks}


def local(value: Any) -> Tensor:
    part: Tensor = value.to_local() if isinstance(value, DTensor) else value
    return part.detach().clone()


def forced(kind: str, actions: list[str], agrees: bool) -> dict[str, Any]:
    """Trains with another plan in each rank; where nobody has to agree, or is not asked, that is carried out."""
    mine = Action[actions[dist.get_rank()]]

    def begin(self: Checkpoint, size: Any, available: int) -> Decision:
        plan = BlockPlan(
            size=size, actions=(mine,) * 5, otherwise=mine, projected=0, available=available, seconds=0.0, smallest=0
        )
        return Decision(Phase.COLLECTING, plan, False)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Checkpoint, "begin", begin))
        if not agrees:
            stack.enter_context(mock.patch.object(Agreement, "reached", return_value=True))
        model, optimizer = built(kind)
        torch.manual_seed(10 + dist.get_rank())
        with spillway.manage(model, optimizer, budget="1GiB", method="checkpoint") as memory:
            told = list(steps(model, optimizer, "", memory.step, range(STEPS)))
            again = [report.recomputed_blocks for report in memory.history]
    return {"told": told, "again": again}


@contextlib.contextmanager
def begun(memory: Any, batch: Any) -> Iterator[None]:
    """A step that nobody ends where it fails."""
    memory.begin(batch)
    yield
    memory.end()


def refused(kind: str, method: str, budgets: list[int], blind: bool = False, closes: bool = False) -> dict[str, Any]:
    """Trains under a budget for each rank; what each of them raises, and what the next step does. Of models of their
    own the first rank does not train, and waits for the others. Nobody lets go of the process group before all have
    raised something. Who is blind sees no connection of this process; who closes leaves no step by itself. When it was
    raised is told by a clock that all processes share."""
    if kind == "Lightning":
        from tests.cpu import lightning_processes

        return lightning_processes.refused(method, budgets)
    if blind:
        mock.patch.object(ranks, "_connections", return_value=iter(())).start()
    model, optimizer = built(kind)
    torch.manual_seed(10 + dist.get_rank())
    told: list[tuple[str, str, int | None]] = []
    raised: list[float] = []
    waits = kind == "plain" and dist.get_rank() == 0
    for again in range(2):
        try:
            with spillway.manage(model, optimizer, budget=budgets[dist.get_rank()], method=method) as memory:
                if waits and not again:
                    dist.barrier()
                step = functools.partial(begun, memory) if closes else memory.step
                list(steps(model, optimizer, "", step, range(STEPS)))
        except SpillwayError as error:
            raised.append(time.monotonic())
            told.append((type(error).__name__, str(error), error.rank))
    all_have_raised()
    return {"told": told, "raised": raised}


def all_have_raised() -> None:
    """Wait until each rank is here."""
    store = default_store()
    store.set(f"raised {dist.get_rank()}", "")
    store.wait([f"raised {rank}" for rank in range(dist.get_world_size())], PATIENCE)


def example(script: str, options: list[str]) -> dict[str, Any]:
    """What the text of a script prints that begins a process group, and ends it: here there is one."""
    said = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(dist, "init_process_group"))
        stack.enter_context(mock.patch.object(dist, "destroy_process_group"))
        stack.enter_context(mock.patch.object(sys, "argv", ["example", *options]))
        stack.enter_context(contextlib.redirect_stdout(said))
        exec(compile(script, "example", "exec"), {"__name__": "__main__"})
    return {"said": said.getvalue()}


ASKED: Final = {"train": train, "forced": forced, "refused": refused, "example": example}


def main(rank: int, world: int, store: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    shared = dist.FileStore(store, world)
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        prefix = dist.PrefixStore(str(number), shared)
        dist.init_process_group("gloo", store=prefix, rank=rank, world_size=world, timeout=PATIENCE)
        try:
            answer = ASKED[asked.pop("what")](**asked)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "refused": isinstance(error, UsageError)}
        finally:
            let_go_of_the_group()
        torch.save(answer, f"{store}.{number}.{rank}")
        print(json.dumps({"file": f"{store}.{number}.{rank}"}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
