"""Random small models made of blocks, and random training loops around them.

A program is drawn from a seed. Its blocks are made of parts, each with one thing that an extra run of the block, or of
the whole forward, could get wrong; what such a thing holds has a say in the loss. The loop has accumulation, autocast,
anomaly mode and the like. The same seed builds the same program, so that it can be trained plainly and managed.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy
import torch
from torch import Tensor, nn

from tests.cpu import block_elsewhere as elsewhere
from tests.cpu.block_parts import PARTS, WIDTH, Box, InPlace, Part, Scripted, forget_globals
from tests.cpu.block_state import COPIED_KINDS, PARAMETERS, Stateful

# ---------------------------------------------------------------------- blocks and models


@dataclass
class Answer:
    hidden: Tensor
    extra: list[Tensor]


def hidden_of(answer: Any) -> Tensor:
    if isinstance(answer, Answer):
        return answer.hidden
    if isinstance(answer, Tensor):
        return answer
    found: Tensor = answer["hidden"] if isinstance(answer, dict) else answer[0]
    return found


@final
class Block(nn.Module):
    """Parts one after the other around a residual, which answers with a tensor, a tuple, a dict or a dataclass."""

    def __init__(self, parts: list[Part], answers: str, fails: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.answers, self.fails = answers, fails
        self.runs = 0

    def forward(self, x: Any, **named: Any) -> Any:
        x = hidden_of(x)
        self.runs += 1
        cache, lists = named.get("cache"), named.get("lists")
        y = x * 1.0
        for part in self.parts:
            given = y * 1.0 if isinstance(part, InPlace) else y  # nobody has saved what it writes to
            y = part(given).to(x.dtype)
        if self.fails and self.runs % self.fails == 0:
            raise ArithmeticError
        if cache is not None:
            for held in cache.values():
                y = y + 0.1 * held
            cache[len(cache)] = y.mean(0)
            lists.append(y.sum())
        if named.get("mask") is not None:
            y = y * named["mask"]
        y = 0.5 * x + y
        kinds = {"tensor": y, "tuple": (y, None), "dict": {"hidden": y, "n": 1}, "dataclass": Answer(y, [y.sum()])}
        return kinds[self.answers]


class Nested(nn.Module):
    """A block that holds blocks."""

    def __init__(self, inner: list[Block]) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)

    def forward(self, x: Any, **named: Any) -> Any:
        for block in self.inner:
            x = block(x, **named)
        return x


class Draw(NamedTuple):
    """What was drawn for the model's forward."""

    loops: int
    drops: float
    catches: bool
    caches: bool
    masks: bool
    ramps: bool


@final
class Model(nn.Module):
    def __init__(self, blocks: list[nn.Module], draw: Draw) -> None:
        super().__init__()
        self.draw = draw
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(blocks)
        self.forwards, self.ramp, self.log = 0, Box({"scale": 1.0}), []

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if self.draw.ramps:
            self.ramp.value["scale"] *= 0.97
            self.log.append(self.forwards)
        x = self.embed(x) * self.ramp.value["scale"]
        named: dict[str, Any] = {"cache": {}, "lists": []} if self.draw.caches else {}
        if self.draw.masks:
            named["mask"] = (x.detach() > -1).to(x.dtype)
        for block in self.blocks:
            if self.draw.drops and self.training and random.random() < self.draw.drops:
                continue
            for _ in range(self.draw.loops):
                if self.draw.catches:
                    try:
                        x = block(x, **named)
                    except ArithmeticError:
                        self.log.append(-1)
                else:
                    x = block(x, **named)
        x = hidden_of(x)
        y = self.head(x)
        return y + 1e-3 * torch.stack(named["lists"]).mean() if named.get("lists") else y

    def facts(self) -> Any:
        parts = [module.facts() for module in self.modules() if isinstance(module, Part)]
        runs = [module.runs for module in self.modules() if isinstance(module, Block)]
        return self.forwards, self.ramp.value["scale"], list(self.log), runs, parts


class Loop(NamedTuple):
    """What was drawn for the steps."""

    optimizer: str
    accumulates: int
    autocast: bool
    anomaly: bool
    retains: bool
    clips: bool
    scales: bool
    evaluates: bool
    averages: bool
    schedules: bool
    sets_to_none: bool
    rows: tuple[int, ...]
    cleared: str


class Program(NamedTuple):
    """Everything that one seed makes."""

    seed: int
    model: Model
    optimizer: torch.optim.Optimizer
    loop: Loop
    parts: tuple[str, ...]
    calls: list[Tensor]
    """Batches that the model was called with."""


def program_of(seed: int) -> Program:
    """The program of a seed, and all random streams where its training begins."""
    forget_globals()
    elsewhere.forget()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    kinds = random.sample(PARTS, random.randint(1, 3))
    if seed % 11 == 3:
        kinds[0] = Scripted
    own = random.Random(f"state of {seed}")  # so that what else is drawn stays what it was
    stateful = own.sample(COPIED_KINDS, own.choice([0, 1, 2, 3]))
    if seed % 10 == 2:
        stateful.append(own.choice(PARAMETERS))
    fails = random.choice([0, 0, 0, 3, 4])
    answers = random.choice(["tensor", "tensor", "tuple", "dict", "dataclass"])

    def block() -> Block:
        return Block([*(kind() for kind in kinds), *map(Stateful, stateful)], answers, fails)

    count = random.randint(2, 4)
    nests = random.random() < 0.2
    made: list[nn.Module] = [Nested([block(), block()]) if nests else block() for _ in range(count)]
    if random.random() < 0.25:
        made[-1] = made[0]
    draw = Draw(
        loops=random.choice([1, 1, 1, 2]), drops=random.choice([0.0, 0.0, 0.0, 0.3]),
        catches=bool(fails), caches=random.random() < 0.25, masks=random.random() < 0.25, ramps=random.random() < 0.4,
    )  # fmt: skip
    model = Model(made, draw)
    if random.random() < 0.25:
        for parameter in made[0].parameters():
            parameter.requires_grad_(False)
    if random.random() < 0.15:
        model.embed.requires_grad_(False)
    loop = Loop(
        optimizer=random.choice(["sgd", "adam", "adamw fused", "momentum", "foreach"]),
        accumulates=random.choice([1, 1, 2]), autocast=random.random() < 0.2, anomaly=random.random() < 0.15,
        retains=random.random() < 0.1, clips=random.random() < 0.3, scales=random.random() < 0.1,
        evaluates=random.random() < 0.2,
        averages=random.random() < 0.15 and not _has_no_copies(model, stateful),
        schedules=random.random() < 0.2, sets_to_none=random.random() < 0.7,
        rows=tuple(random.choice([64, 96, 128, 256]) for _ in range(6)), cleared=random.choice(["before", "after"]),
    )  # fmt: skip
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    make: Any = {
        "sgd": lambda: torch.optim.SGD(trained, lr=0.05),
        "momentum": lambda: torch.optim.SGD(trained, lr=0.02, momentum=0.9, nesterov=True),
        "adam": lambda: torch.optim.Adam(trained, lr=1e-3, amsgrad=True),
        "adamw fused": lambda: torch.optim.AdamW(trained, lr=1e-3, fused=True),
        "foreach": lambda: torch.optim.RMSprop(trained, lr=1e-3, foreach=True),
    }
    return Program(seed, model, make[loop.optimizer](), loop, (*(kind.__name__ for kind in kinds), *stateful), [])


def _has_no_copies(model: nn.Module, stateful: Sequence[str]) -> bool:
    """Generators have none, nor have weights that `nn.utils.weight_norm` makes."""
    normed = any("weight_g" in part._parameters for part in model.modules())
    return normed or any(kind.startswith("generator") for kind in stateful)


# ---------------------------------------------------------------------- training


def steps(program: Program, step: Callable[[Tensor], Any]) -> Iterator[Tensor]:
    """Train; gives the loss after each step, which runs within `step(batch)`."""
    model, optimizer, loop = program.model, program.optimizer, program.loop
    batches = torch.Generator().manual_seed(program.seed)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=loop.scales)
    averaged = torch.optim.swa_utils.AveragedModel(model) if loop.averages else None
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for rows in loop.rows:
        batch = torch.randn(rows, WIDTH, generator=batches)
        with contextlib.ExitStack() as stack:
            stack.enter_context(step(batch))
            if loop.anomaly:
                stack.enter_context(torch.autograd.detect_anomaly(check_nan=False))
            if loop.cleared == "before":
                optimizer.zero_grad(set_to_none=loop.sets_to_none)
            total = torch.zeros(())
            for part in range(loop.accumulates):
                program.calls.append(batch)
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=loop.autocast):
                    out = model(batch + 0.1 * part)
                loss = out.float().square().mean() / loop.accumulates
                scaler.scale(loss).backward(retain_graph=loop.retains)
                if loop.retains:
                    scaler.scale(loss).backward()
                total = total + loss.detach()
                del out, loss
            if loop.evaluates:
                model.eval()
                program.calls.append(batch)
                with torch.no_grad():
                    total = total + 1e-3 * model(batch).float().mean()
                model.train()
            if loop.clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            if averaged is not None:
                averaged.update_parameters(model)
            if loop.cleared == "after":
                optimizer.zero_grad(set_to_none=loop.sets_to_none)
        if loop.schedules:
            schedule.step()
        yield total
