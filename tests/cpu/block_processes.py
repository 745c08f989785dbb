"""Two processes train together, with and without the block engine; run by `test_block_distributed.py`.

Every case is trained plainly and then under the engine, from the same state. Prints a line for each case and way that
was the same to the bit, and raises where one was not.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from spillway.engines.blocks.block_engine import BlockEngine
from spillway.methods.actions import Action
from tests.cpu.block_cases import WIDTH, Chain, Normalised, Residual, Shared

STEPS = 2
ACTIONS = (Action.RECOMPUTE, Action.RECOMPUTE_OFFLOADED, Action.OFFLOAD, Action.SELECTIVE)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Residual(), Normalised()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(self.one(x))


class Partly(nn.Module):
    """Uses one of its layers in the first step and the other in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.step = Residual(), Residual(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return self.one(x) if self.step % 2 else self.two(x)


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    blocks: list[str]
    wrap: Callable[[nn.Module], nn.Module]
    manage_first: bool = False
    actions: tuple[Action, ...] = ACTIONS


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def compiled(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def replicated(**options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: DistributedDataParallel(model, **options)


def mixed() -> nn.Module:
    return Chain(Mixed(), Mixed())


def residual() -> nn.Module:
    return Chain(Residual(), Residual())


TWO = ["blocks.0", "blocks.1"]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES: dict[str, Case] = {
    "ddp": Case(mixed, TWO, replicated()),
    "ddp, managed first": Case(mixed, TWO, replicated(), manage_first=True),
    "ddp, unused parameters": Case(
        lambda: Chain(Partly(), Partly()), TWO, replicated(find_unused_parameters=True, broadcast_buffers=False)
    ),
    "ddp, static graph, a block called four times": Case(
        lambda: Shared(Residual()), ["block"], replicated(static_graph=True)
    ),
    "ddp, compiled blocks": Case(
        residual, TWO, lambda model: replicated()(compiled(model)), actions=(Action.RECOMPUTE, Action.OFFLOAD)
    ),
    "fsdp": Case(mixed, TWO, sharded),
    "fsdp, managed first": Case(mixed, TWO, sharded, manage_first=True),
    "fsdp, kept gathered, parts sharded": Case(
        mixed, TWO, lambda model: (fully_shard(model.blocks[0].one), sharded(model, reshard_after_forward=False))[1]
    ),
    "fsdp, bfloat16": Case(residual, TWO, lambda model: sharded(model, mp_policy=BF16)),
    "fsdp, compiled blocks": Case(
        residual, TWO, lambda model: compiled(sharded(model)), actions=(Action.RECOMPUTE, Action.OFFLOAD)
    ),
}


def train(case: Case, action: Action | None) -> tuple[list[Tensor], list[int]]:
    """Losses, gradients, parameters, buffers and the random stream after every step; how often each call ran again."""
    torch.manual_seed(0)
    model = case.build()
    engine: BlockEngine | None = None

    def manage() -> BlockEngine | None:
        if action is None:
            return None
        directory = tempfile.gettempdir()
        return BlockEngine(model, case.blocks, actions=lambda block, call: action, spill_directory=directory)

    if case.manage_first:
        engine = manage()
        whole = case.wrap(model)
    else:
        whole = case.wrap(model)
        engine = manage()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(10 + dist.get_rank())
    found: list[Tensor] = []
    recomputes: list[int] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = whole(torch.randn(40, WIDTH)).float().square().mean()
        loss.backward()
        recomputes += [report.recomputes for report in engine.calls] if engine is not None else []
        gradients = [parameter.grad for parameter in whole.parameters() if parameter.grad is not None]
        optimizer.step()
        found += [loss.detach(), torch.get_rng_state()]
        found += [_local(tensor) for tensor in (*gradients, *whole.parameters(), *whole.buffers())]
    if engine is not None:
        engine.close()
    return found, recomputes


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def main(rank: int, store: str, wanted: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for name, case in CASES.items():
        if wanted and name not in wanted:
            continue
        plain, _ = train(case, None)
        for action in case.actions:
            found, recomputes = train(case, action)
            assert len(plain) == len(found), f"{name} under {action.value}"
            assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True)), f"{name} under {action.value}"
            assert set(recomputes) == {int(action.recomputes)}, f"{name} under {action.value} ran again {recomputes}"
            print(f"{name}: {action.value}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
