"""What several processes train together: plainly, and under a session, to be compared bit for bit.

Run by `test_process_groups.py` and `benchmarks/collectives.py`, one process for each rank:
`python -m tests.cpu.process_programs RANK WORLD STORE`, with a line of JSON for each run on the standard input, and one
on the standard output for what came of it.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Final, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import spillway
from spillway.errors import BudgetInfeasible, SpillwayError
from spillway.memory.copies import Flights
from spillway.methods import METHODS

STEPS: Final = 3
BLOCKS: Final = [f"blocks.{number}" for number in range(4)]
PATIENCE: Final = timedelta(seconds=60)
"""What a collective waits for the others, before it fails in all of them."""

Step = Callable[..., AbstractContextManager[Any]]


class Program(NamedTuple):
    """A model, wrapped or not, and how it is trained."""

    build: Callable[[], tuple[nn.Module, nn.Module]]
    """The module whose forward is called, and the one that is managed."""
    train: Callable[[nn.Module, torch.optim.Optimizer, Step], Iterator[Tensor]]
    """Gives, between steps, what is to be the same with and without a session."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.dropout = nn.BatchNorm1d(width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))
        return out


class Chain(nn.Module):
    def __init__(self, width: int = 64, depth: int = 4, block: type[Block] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(width) for _ in range(depth))
        self.last = nn.Linear(width, width)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out


class Partly(Chain):
    """Uses its blocks in turn."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for number, block in enumerate(self.blocks):
            x = x if number == self.calls % 4 else block(x)
        out: Tensor = self.last(x)
        return out


class Summed(torch.autograd.Function):
    """A sum over all ranks, both ways."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        out = x.clone()
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        work = dist.all_reduce(gradient, async_op=True)
        work.wait()
        return gradient


class Communicating(Block):
    """What it makes is the mean over all ranks; they communicate in the middle of it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.within(super().forward(x)) / dist.get_world_size()

    def within(self, x: Tensor) -> Tensor:
        out: Tensor = Summed.apply(x)
        return out


class Functional(Communicating):
    """The same by a functional collective, which autograd knows."""

    def within(self, x: Tensor) -> Tensor:
        return functional.all_reduce(x, "sum", dist.group.WORLD)


class Gathered(Communicating):
    """The same by `torch.distributed.nn`."""

    def within(self, x: Tensor) -> Tensor:
        from torch.distributed.nn.functional import all_gather

        out: Tensor = sum(all_gather(x, dist.group.WORLD), torch.zeros(()))
        return out


def communicating(block: type[Block] = Communicating) -> nn.Module:
    return Chain(block=block)


class Pace:
    """The ranks take turns in being late: what the others have begun stays in flight until they are ready to wait."""

    def __init__(self) -> None:
        self.turn = 0
        self.store: dist.Store | None = None

    def fall_behind(self) -> None:
        """The late one goes on when all others have said that they are ahead, or wait for it already."""
        world = dist.get_world_size()
        if self.store is not None and dist.get_rank() == self.turn % world:
            others = [f"{self.turn}.{rank}" for rank in range(world) if rank != dist.get_rank()]
            with contextlib.suppress(RuntimeError):
                self.store.wait(others, timedelta(seconds=3))

    def get_ahead(self) -> None:
        """From here on this one waits for others."""
        if self.store is not None:
            self.store.set(f"{self.turn}.{dist.get_rank()}", "")


PACE: Final = Pace()


def input_of(model: nn.Module, rows: int = 96) -> Tensor:
    PACE.turn += 1
    return torch.randn(rows, getattr(model, "module", model).width)


def replicated(model: Callable[[], Any] = Chain, hook: Any = None, paced: bool = False, **options: Any) -> Any:
    """The default of DDP but for its buckets, which are as small as the models are."""

    def build() -> tuple[nn.Module, nn.Module]:
        inner = model()
        whole = DistributedDataParallel(inner, **{"bucket_cap_mb": 0.1, **options})
        if isinstance(hook, dist.BuiltinCommHookType):
            whole._register_builtin_comm_hook(hook)
        elif hook is not None:
            state = hook[1]() if isinstance(hook, tuple) else None
            whole.register_comm_hook(state, hook[0] if isinstance(hook, tuple) else hook)
        if paced:
            inner.last.weight.register_hook(lambda _: PACE.fall_behind())
            inner.blocks[0].norm.weight.register_hook(lambda _: PACE.get_ahead())
        return whole, inner

    return build


def alone(model: Callable[[], nn.Module] = Chain) -> Any:
    def build() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(3)
        inner = model()
        return inner, inner

    return build


def state_of(model: nn.Module, loss: Tensor) -> Iterator[Tensor]:
    yield loss
    yield torch.get_rng_state()
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()


def usual(model: nn.Module, optimizer: torch.optim.Optimizer, step: Step) -> Iterator[Tensor]:
    for _ in range(STEPS):
        x = input_of(model)
        with step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        yield from state_of(model, loss)


def pressing(model: nn.Module, optimizer: torch.optim.Optimizer, step: Step) -> Iterator[Tensor]:
    """So much is made in the backward that buckets in flight would have to leave."""
    held: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda _: held.append(torch.full((64, 256), float(len(held)))))
    for _ in range(STEPS):
        x = input_of(model)
        with step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            loss = loss.detach() + sum(one.sum() for one in held)
            held.clear()
        yield from state_of(model, loss)


def accumulating(model: Any, optimizer: torch.optim.Optimizer, step: Step) -> Iterator[Tensor]:
    for _ in range(STEPS):
        x = input_of(model)
        with step(x):
            optimizer.zero_grad()
            with model.no_sync():
                model(x).square().mean().backward()
            loss = model(x.flip(0)).square().mean()
            loss.backward()
            optimizer.step()
        yield from state_of(model, loss)


def uneven(model: Any, optimizer: torch.optim.Optimizer, step: Step) -> Iterator[Tensor]:
    """The first rank has one batch more than the others."""
    loss = torch.zeros(())
    with Join([model]):
        for _ in range(STEPS + (dist.get_rank() == 0)):
            x = input_of(model)
            with step(x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
    yield from state_of(model, loss)


def by_hand(reduce: Callable[[nn.Module], Any]) -> Any:
    """Gradients are reduced after the backward."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: Step) -> Iterator[Tensor]:
        for _ in range(STEPS):
            x = input_of(model)
            with step(x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                reduce(model)
                optimizer.step()
            yield from state_of(model, loss)

    return train


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def one_by_one(model: nn.Module) -> None:
    for gradient in gradients_of(model):
        dist.all_reduce(gradient)


def asynchronously(model: nn.Module) -> None:
    PACE.fall_behind()
    works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients_of(model)]
    noise = torch.ones(256, 256)
    PACE.get_ahead()
    for work in works:
        noise = noise @ noise / 256  # what is computed meanwhile
        work.wait()


def in_parts(model: nn.Module) -> None:
    """Both halves of one storage under way while the end of it is computed with."""
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients_of(model)] + [torch.ones(5000)])
    half = (len(flat) - 5000) // 2
    PACE.fall_behind()
    works = [dist.all_reduce(flat[:half], async_op=True), dist.all_reduce(flat[half:-5000], async_op=True)]
    flat[-5000:].mul_(2)
    beside = flat[-5000:] * 3
    PACE.get_ahead()
    for work in works:
        work.wait()
    place = 0
    for gradient in gradients_of(model):
        gradient.copy_(flat[place : place + gradient.numel()].view_as(gradient))
        place += gradient.numel()
    gradients_of(model)[0].add_(beside.sum() * 1e-6)


def pressed(model: nn.Module) -> None:
    """So much is made meanwhile that what is in flight would have to leave."""
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients_of(model)])
    PACE.fall_behind()
    work = dist.all_reduce(flat, async_op=True)
    held = [torch.full((64, 256), float(number)) for number in range(32)]
    PACE.get_ahead()
    work.wait()
    place = 0
    for gradient in gradients_of(model):
        gradient.copy_(flat[place : place + gradient.numel()].view_as(gradient))
        place += gradient.numel()
    gradients_of(model)[0].add_(sum(one.sum() for one in held) * 1e-9)


def together(model: nn.Module) -> None:
    with dist._coalescing_manager(async_ops=True) as works:
        for gradient in gradients_of(model):
            dist.all_reduce(gradient)
    works.wait()


def ring(model: nn.Module) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for gradient in gradients_of(model):
        if gradient.numel() < 2000:
            continue
        received = torch.empty_like(gradient)
        works = [dist.irecv(received, (rank - 1) % world), dist.isend(gradient, (rank + 1) % world)]
        noise = torch.ones(256, 256) @ torch.ones(256, 256)
        for work in works:
            work.wait()
        gradient.add_(received, alpha=0.5).add_(noise[0, 0] * 1e-6)


def in_a_batch(model: nn.Module) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    gradients = [gradient for gradient in gradients_of(model) if gradient.numel() > 2000]
    received = [torch.empty_like(gradient) for gradient in gradients]
    ops = [dist.P2POp(dist.isend, gradient, (rank + 1) % world) for gradient in gradients]
    ops += [dist.P2POp(dist.irecv, one, (rank - 1) % world) for one in received]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    for gradient, one in zip(gradients, received, strict=True):
        gradient.add_(one, alpha=0.5)


def every_kind(model: nn.Module) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for gradient in gradients_of(model)[:6]:
        if gradient.dim() < 2:
            continue
        gathered = [torch.empty_like(gradient) for _ in range(world)]
        dist.all_gather(gathered, gradient)
        whole = torch.empty(world * gradient.numel())
        dist.all_gather_into_tensor(whole, gradient.reshape(-1))
        part = torch.empty(gradient.numel())
        dist.reduce_scatter_tensor(part, whole * 0.5)
        swapped = torch.empty_like(whole)
        dist.all_to_all_single(swapped, whole.clone())
        first = (gradient * (rank + 1)).contiguous()
        dist.broadcast(first, 0)
        reduced = gradient.clone()
        dist.reduce(reduced, 0)
        dist.broadcast(reduced, 0)
        collected = [torch.empty_like(gradient) for _ in range(world)] if rank == 0 else None
        dist.gather(gradient, collected)
        scattered = torch.empty_like(gradient)
        dist.scatter(scattered, [one * 2 for one in collected] if collected is not None else None)
        dist.barrier()
        work = dist.reduce_scatter_tensor(part, whole, async_op=True)
        noise = whole.sum()
        work.wait()
        total = sum(gathered[1:], gathered[0])
        gradient.copy_(
            total / world + first + reduced / world + scattered + part.view_as(gradient) / world
            + swapped[: gradient.numel()].view_as(gradient) + noise * 1e-6
        )  # fmt: skip


def functionally(model: nn.Module) -> None:
    group = dist.group.WORLD
    for gradient in gradients_of(model):
        if gradient.dim() < 2:
            continue
        reduced = functional.all_reduce(gradient, "sum", group)
        gathered = functional.all_gather_tensor(gradient, 0, group)
        noise = gradient * 1e-3
        part = functional.reduce_scatter_tensor(gathered * 2, "sum", 0, group)
        together = functional.all_reduce_coalesced([gradient, noise], "sum", group)
        gradient.copy_(reduced + part + noise + together[0] + together[1] + gathered[: len(gradient)])


def across_steps(model: nn.Module, optimizer: torch.optim.Optimizer, step: Step) -> Iterator[Tensor]:
    """What one step began the next waits for."""
    flat, work = torch.zeros(30000), None
    for _ in range(STEPS + 1):
        x = input_of(model)
        with step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            if work is not None:
                work.wait()
            gradient = gradients_of(model)[0]
            gradient.add_(flat[: gradient.numel()].view_as(gradient))
            optimizer.step()
            flat = torch.cat([one.reshape(-1) for one in gradients_of(model)])[:30000].clone()
            work = dist.all_reduce(flat, async_op=True)
        yield from state_of(model, loss)
    if work is not None:
        work.wait()
    yield flat


def between_steps(model: nn.Module, optimizer: torch.optim.Optimizer, step: Step) -> Iterator[Tensor]:
    """What begins between two steps is waited for within the next."""
    work: Any = None
    for _ in range(STEPS + 1):
        x = input_of(model)
        with step(x):
            out = model(x.clone())
            loss = out.square().mean()
            if work is not None:
                work.wait()
            optimizer.zero_grad()
            loss.backward()
        flat = gradients_of(model)[-2]
        dist.all_reduce(flat)
        work = dist.all_reduce(flat, async_op=True)
        yield loss
        yield torch.get_rng_state()
    work.wait()
    with step(x):  # block methods plan by it
        optimizer.step()
    yield from state_of(model, loss)


POWER = (powerSGD_hook.powerSGD_hook, lambda: powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2))
PROGRAMS: Final[dict[str, Program]] = {
    "ddp": Program(replicated(paced=True), usual),
    "ddp, 100 MB": Program(replicated(lambda: Chain(width=1216), bucket_cap_mb=25), usual),
    "ddp, views": Program(replicated(paced=True, gradient_as_bucket_view=True), usual),
    "ddp, unused": Program(replicated(Partly, find_unused_parameters=True), usual),
    "ddp, static": Program(replicated(paced=True, static_graph=True), usual),
    "ddp, no_sync": Program(replicated(), accumulating),
    "ddp, pressed": Program(replicated(paced=True), pressing),
    "ddp, fp16": Program(replicated(hook=default_hooks.fp16_compress_hook), usual),
    "ddp, fp16 in C++": Program(replicated(hook=dist.BuiltinCommHookType.FP16_COMPRESS), usual),
    "ddp, PowerSGD": Program(replicated(hook=POWER, bucket_cap_mb=25), usual),
    "ddp, join": Program(replicated(), uneven),
    "ddp, in the forward": Program(replicated(communicating), usual),
    "all_reduce": Program(alone(), by_hand(one_by_one)),
    "all_reduce, async": Program(alone(), by_hand(asynchronously)),
    "all_reduce, parts": Program(alone(), by_hand(in_parts)),
    "all_reduce, pressed": Program(alone(), by_hand(pressed)),
    "all_reduce, coalesced": Program(alone(), by_hand(together)),
    "all_reduce, in the forward": Program(alone(communicating), by_hand(one_by_one)),
    "ring": Program(alone(), by_hand(ring)),
    "batch_isend_irecv": Program(alone(), by_hand(in_a_batch)),
    "every kind": Program(alone(), by_hand(every_kind)),
    "functional": Program(alone(), by_hand(functionally)),
    "functional, in the forward": Program(alone(lambda: communicating(Functional)), usual),
    "all_gather, in the forward": Program(alone(lambda: communicating(Gathered)), usual),
    "across steps": Program(alone(), across_steps),
    "between steps": Program(alone(), between_steps),
}


def digest(tensors: Iterator[Tensor]) -> list[str]:
    """Of each tensor when it comes, which is between steps."""
    return [hashlib.blake2b(bytes_of(tensor), digest_size=8).hexdigest() for tensor in tensors]


def bytes_of(tensor: Tensor) -> bytes:
    flat = tensor.detach().clone().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def one_run(asked: dict[str, Any]) -> dict[str, Any]:
    """Train once: plainly without a "method", and else under it and its "budget", which may be one for each rank; with
    a "plant" what is in flight is not held."""
    program = PROGRAMS[asked["program"]]
    torch.manual_seed(0)
    whole, managed = program.build()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(10 + dist.get_rank())
    if "method" not in asked:
        found = digest(program.train(whole, optimizer, lambda batch: contextlib.nullcontext()))
        return {"trace": found, "weights": digest(iter(whole.parameters()))}
    options = {}
    if METHODS[asked["method"]].runs == "block engine":
        options = {"blocks": spillway.BlockOptions(names=BLOCKS), "report": spillway.ReportOptions(timeline=True)}
    if asked.get("plant"):
        with mock.patch.object(Flights, "begin", return_value=None):
            return under_a_session(program, whole, managed, optimizer, asked, options)
    return under_a_session(program, whole, managed, optimizer, asked, options)


def under_a_session(
    program: Program, whole: nn.Module, managed: nn.Module, optimizer: Any, asked: dict[str, Any], options: Any
) -> dict[str, Any]:
    """What came of it."""
    budget = asked["budget"][dist.get_rank()] if isinstance(asked["budget"], list) else asked["budget"]
    with spillway.manage(managed, optimizer, budget=budget, method=asked["method"], **options) as memory:
        try:
            found = digest(program.train(whole, optimizer, memory.step))
        except BudgetInfeasible as refusal:
            return {"refused": refusal.smallest_budget}
        except SpillwayError as refusal:
            return {"error": f"{type(refusal).__name__}: {refusal}"}
        history = memory.history
    return {
        "trace": found,
        "weights": digest(iter(whole.parameters())),
        "peak": max((report.peak_bytes for report in history if report.peak_measured), default=0),
        "unmeasured": sum(not report.peak_measured for report in history),
        "allowed": memory.allowed,
        "moves": sum(report.moves for report in history),
        "drops": sum(report.drops for report in history),
    }


def let_go_of_the_group() -> None:
    """Destroy the process group from this thread: a worker of gloo frees what a communication hook chained to its work
    after the work is done, and where that is the last to hold the group, the worker joins itself and the process ends
    with "Resource deadlock avoided"."""
    group = dist.group.WORLD
    dist.destroy_process_group()
    gc.collect()  # a reducer holds the group, and is part of a cycle
    tries = 1000
    while sys.getrefcount(group) > 2 and (tries := tries - 1):  # this name and the call's argument
        time.sleep(0.001)


def main(rank: int, world: int, store: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    shared = dist.FileStore(store, world)
    for number, line in enumerate(sys.stdin):
        prefix = dist.PrefixStore(str(number), shared)
        PACE.turn, PACE.store = 0, dist.PrefixStore("pace", prefix)
        dist.init_process_group("gloo", store=prefix, rank=rank, world_size=world, timeout=PATIENCE)
        try:
            answer = one_run(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        finally:
            let_go_of_the_group()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
