"""`auto` on paper: what it gains at equal memory over what trainers do today, for models that are not here.

Steps are recorded on fake tensors, nothing is downloaded, and everything is simulated. The ways of today do the same
with every block; their copies run beside ops as early as there is room, in the memory that they take with two blocks'
bytes on the way. `auto` has the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch

from benchmarks import columns
from benchmarks.models import built_as, repeated
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from spillway.costs.device import DEVICES, Device
from spillway.ir import Plan, Step
from spillway.ir.account import account
from spillway.methods import METHODS, Planned, Problem
from spillway.methods.actions import Action
from spillway.methods.auto.on_paper import Choices
from spillway.simulation.simulated_engine import simulate
from spillway.simulation.sweep import sweep_problem_of
from spillway.units import Bytes, Seconds
from spillway.workloads import Workload
from spillway.workloads.recorded import record


def llama(*, layers: int = 32, batch: int = 1, length: int = 8192, width: int = 4096) -> Workload:
    """A decoder of 8 billion parameters in bf16, as Llama 3 has it: grouped attention, fused."""
    settings = {
        "hidden_size": width, "intermediate_size": 7 * width // 2, "num_hidden_layers": layers,
        "num_attention_heads": width // 128, "num_key_value_heads": width // 512, "vocab_size": 128_256,
        "max_position_embeddings": length, "use_cache": False,
    }  # fmt: skip
    return _training("llama-8b", "LlamaForCausalLM", settings, batch, length)


def bert(*, layers: int = 24, batch: int = 32, length: int = 512, width: int = 1024) -> Workload:
    """BERT-large in bf16, with fused attention."""
    settings = {
        "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers,
        "num_attention_heads": width // 64, "max_position_embeddings": length,
    }  # fmt: skip
    return _training("bert-large", "BertForMaskedLM", settings, batch, length)


def _training(name: str, kind: str, settings: Mapping[str, Any], batch: int, length: int) -> Workload:
    model = built_as(torch.bfloat16, kind, **settings)
    tokens = torch.ones(batch, length, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return repeated(name, model, {"input_ids": tokens, "labels": tokens}, optimizer)


def _bf16(name: str, flops: float, link: float) -> Device:
    """A device of the table whose matrix products reach so many operations a second, as kernels in bf16 do."""
    return replace(
        DEVICES[name], name=f"{name}, bf16", flops_per_second=flops / 0.75, out_per_second=link, in_per_second=link
    )


ASKED: Final = MappingProxyType({"h200": _bf16("h200", 500e12, 55e9), "a100": _bf16("a100", 220e12, 24e9)})
TODAY: Final = MappingProxyType(
    {
        "full recompute": Action.RECOMPUTE, "inputs offloaded": Action.RECOMPUTE_OFFLOADED,
        "selective": Action.SELECTIVE, "offload all": Action.OFFLOAD,
    }
)  # fmt: skip
PUBLISHED: Final = (
    "Published, and measured by others on other batches: torchtitan#4636, Llama-8B, plans at full recompute's memory "
    "(68.56 GiB): +5.6 % tokens/s. axolotl#3776, Qwen3-8B at 8k tokens: recomputing 2677.7 ms in 17.16 GB; with inputs "
    "offloaded 2665.9 ms in 17.09 GB; offloading everything 4956.2 ms in 32.50 GB. DeepSpeed#8255, Qwen3-14B: planned "
    "offload 7.38 s, offloading everything 8.67 s. Megatron#1752: 99.84 % of the bytes freed at +0.3 %.",
    "Layers of Llama save their input in fp32, made from one in bf16 that dies in the forward: a recomputed layer "
    "holds that one, and no plan on paper can move it, so that inputs offloaded is full recompute there.",
    "A share is of the memory between the least that one action for every block takes and the plain peak.",
    "Devices reach 500 and 220 TFLOP/s in products of matrices, and 55 and 24 GB/s on their links; assumed.",
)


@frozen
class Size:
    """How much is asked."""

    models: Mapping[str, Callable[[], Workload]]
    devices: tuple[str, ...]
    shares: tuple[float, ...]


def run(size: Size, tell: Tell) -> Result:
    """Record each model once; a row for each way of today, and for each share."""
    rows: list[Row] = []
    for name, build in size.models.items():
        tell(f"recording {name}")
        recorded = record(build, fake=True)
        for device in size.devices:
            problem = sweep_problem_of(recorded, ASKED[device])
            for row in _rows(problem.step, problem.device, size.shares):
                rows.append({"model": name, "device": device, **row})
                tell(f"{name} on {device}, {row['memory_of']}: {row['auto']:.3f} times plain")
    return Result(
        title="auto at equal memory, simulated",
        columns=[
            *columns.text(model="model", device="device", memory_of="memory of"),
            *columns.nbytes(memory="memory", plain="plain"), *columns.ratios(itself="times plain"),
            *columns.text(way="fastest way of today in it"), *columns.ratios(today="times plain", auto="auto"),
            *columns.shares(gain="auto is faster by"),
        ],
        rows=rows,
        notes=PUBLISHED,
    )  # fmt: skip


def _checks(result: Result) -> Iterator[Check]:
    slower = sum(row["gain"] is not None and row["gain"] < -1e-3 for row in result.rows)
    yield Check(what="rows in which a way of today is faster", measured=slower)
    yield Check(what="rows in which auto is above the memory", measured=sum(row["over"] for row in result.rows))


def _rows(step: Step, device: Device, shares: tuple[float, ...]) -> Iterator[Row]:
    peak, plain = step.plain_peak(), sum(op.seconds or 0.0 for op in step.ops)
    asked = Choices(Problem(step=step, allowed=peak, device=device))
    ways = {name: _everywhere(asked, action) for name, action in TODAY.items()}
    found: dict[str, tuple[Bytes, Seconds]] = {}
    for name, choice in ways.items():
        moved = max(way[action].away for way, action in zip(asked.blocks.ways, choice, strict=True))
        given = Problem(step=step, allowed=min(asked.counted(choice).peak + 2 * moved, peak), device=device)
        gaps = Choices(given).gaps(choice)
        memory = account(step, gaps, asked.blocks.lives).peak
        plan = Plan(step=step.digest(), allowed=given.allowed, projected=memory, gaps=tuple(gaps))
        ran = simulate(step, allowed=given.allowed, method=Planned(plan, step, begin="at op"), device=device)
        found[name] = given.allowed, ran.seconds
    floor = asked.least().peak
    budgets = {name: memory for name, (memory, _) in found.items()}
    budgets |= {f"share {share}": int(floor + share * (peak - floor)) for share in shares}
    for name, memory in budgets.items():
        fitting = {way: seconds for way, (needed, seconds) in found.items() if needed <= memory}
        way = min(fitting, key=lambda way: fitting[way], default=None)
        ran = simulate(step, allowed=memory, method=METHODS["auto"].on_paper(), device=device)
        yield {
            "memory_of": name, "memory": memory, "plain": peak, "way": way or "none",
            "today": fitting[way] / plain if way else None, "auto": ran.overhead,
            "gain": fitting[way] / ran.seconds - 1 if way else None, "over": ran.peak_bytes > memory,
            "itself": found[name][1] / plain if name in found else None,
        }  # fmt: skip


def _everywhere(asked: Choices, action: Action) -> tuple[Action, ...]:
    """The action for every block; those whose input nobody saves, so that no plan can move it, are recomputed."""
    instead = Action.RECOMPUTE if action.recomputes else Action.KEEP
    return tuple(action if action in ways else instead for ways in asked.blocks.ways)


BENCHMARK: Final = Benchmark(
    name="auto_paper",
    run=run,
    judge=_checks,
    full=Size(models={"llama-8b": llama, "bert-large": bert}, devices=("h200", "a100"), shares=(0.2, 0.4, 0.6)),
    quick=Size(
        models={"bert, small": partial(bert, layers=3, batch=4, length=64, width=256)}, devices=("h200",), shares=(0.4,)
    ),
)
