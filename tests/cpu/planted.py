"""The wrong results of `test_planted_faults.py`, by target: which check each is for, and which figure is made worse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

Wrong = Any | Callable[[Any], Any]
"""A figure to stand there instead, or what makes it of the right one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """A fault."""

    what: str
    """A regular expression for the names of the checks that it is for."""
    figures: Mapping[str, Wrong] = field(default_factory=dict)
    """The figures of one row that are made wrong."""
    where: Mapping[str, Any] = field(default_factory=dict)
    """What else the row has, if not every one will do."""
    everywhere: bool = False
    """Whether all such rows have the fault at once, instead of one after the other."""
    fact: Callable[[dict[str, Any]], None] | None = None
    """Instead of figures of a row: makes a fact wrong."""
    only: int | None = None
    """Instead of that: so many rows are left."""


def plant(what: str, where: Mapping[str, Any] | None = None, **figures: Wrong) -> Plant:
    """In a row."""
    return Plant(what=what, where=where or {}, figures=figures)


def everywhere(what: str, where: Mapping[str, Any] | None = None, **figures: Wrong) -> Plant:
    """In every row that has the figure."""
    return Plant(what=what, where=where or {}, figures=figures, everywhere=True)


def fact(what: str, *keys: Any, wrong: Wrong) -> Plant:
    """In a fact, by the keys that lead to it."""

    def change(facts: dict[str, Any]) -> None:
        place: Any = facts
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = wrong(place[keys[-1]]) if callable(wrong) else wrong

    return Plant(what=what, fact=change)


def one_more(count: float) -> float:
    """Of what is counted and must not be."""
    return count + 1


def one_less(count: float) -> float:
    """Of what is counted and must be all."""
    return count - 1


def times(factor: float) -> Callable[[Any], Any]:
    """A figure that is so many times too large; every one of a list."""
    return lambda right: [one * factor for one in right] if isinstance(right, list) else right * factor


WORSE: Final = times(100)
"""Larger than any target."""
GONE: Final = object()
"""The figure is not there: what was to be measured did not happen."""


def filters(link: int, **memory: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """DELTA's filters, some of which have other figures with that link."""

    def changed(beside: dict[str, Any]) -> dict[str, Any]:
        found = {name: list(pair) for name, pair in beside["filters"].items()}
        for name, figure in memory.items():
            found[name][link] = figure
        return {**beside, "filters": found}

    return changed


def _of_filters() -> list[Plant]:
    plants = []
    for link, named in enumerate(("the paper's link", "the physical link")):
        for model in ("ResNet-50", "EfficientNet", "ResNeXt-50"):
            for one, other in (("base", "greedy"), ("lru", "greedy"), ("lru", "base")):
                what = f"{model}, {named}: .* {one} needs more than {other}"
                plants.append(plant(what, {"table": "Fig. 7"}, beside=filters(link, **{one: 1e9, other: 1.0})))
        plants.append(plant(f"ResNet-50, {named}: offloads .*", {"table": "Fig. 8"}, beside=filters(link, greedy=1e9)))
    return plants


def in_each(key: str, wrong: Any) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    """That figure in every one of a list."""
    return lambda right: [{**one, key: wrong} for one in right]


_GPU: Final = {"model": "resnet50", "batch": 128, "budget": 100, "outcome": "identical", "over": 0.9, "peak": 90}
_MADE: Final = ("drops", "moves", "returns")
RIGHT: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "block_programs": {"rows": [{"method": "auto", "runs": 9, "identical": 8, "refused": 1, "wrong": 0}]},
        "gpu": {
            "rows": [
                {"model": "resnet50", "batch": 128, "method": "plain", "peak": 200, "seconds": 1.0},
                {**_GPU, "method": "delta", "told": 90, "seconds": 0.7, "copying": 0.5},
                {**_GPU, "method": "delta, copies in turn", "told": 90, "seconds": 1.0, "copying": 0.5},
            ]
        },
        "device_arena": {"rows": [{"allocator": "arena, chunks of 2 MiB", "over": 1.05}]},
        "simulated": {
            "rows": [
                {
                    "workload": "resnet",
                    "method": "lru",
                    "share": 0.5,
                    "peak": 10**7,
                    "simulated_peak": 10**7,
                    "of_extra": 1.1,
                    **dict.fromkeys(_MADE, 20),
                    **{f"simulated_{name}": 21 for name in _MADE},
                }
            ]
        },
    }
)
"""Rows and facts where no result is kept, or an older one that lacks what a check looks at; none misses a target."""

_COUNTED: Final = ("over", "floors_off", "slower_if_smaller", "slower_with_more", "single")
PLANTED: Final[Mapping[str, list[Plant]]] = MappingProxyType(
    {
        "host_cost": [plant("CPU us per op .*", cpu_us_per_op=WORSE), plant("CPU of a step .*", cpu_ratio=WORSE)],
        "block_cost": [
            plant("idle, .*(?<!CPU)", ratio=WORSE), plant("idle, .*CPU", cpu_ratio=WORSE),
            plant("Python calls .*", added_per_call=WORSE),
            plant("every block .*(?<!CPU)", ratio_checkpoint=WORSE),
            plant("every block .*CPU", cpu_ratio_checkpoint=WORSE),
        ],
        "compiled": [
            plant(".* / compiled.*", ratio=WORSE), plant("graph breaks added", breaks=99),
            plant("graphs added", graphs=99), plant("losses that differ", losses="DIFFER"),
        ],
        "arena": [
            plant(".*content was wrong", wrong=one_more), plant(".*most resident.*", resident=WORSE),
            plant(".*median microseconds.*", {}, collecting=1.0),
            everywhere("without a block of 2 MiB.*", collecting=None),
        ],
        "half_memory": [
            plant(".*plain on the arena.*", ratio=WORSE), everywhere(".*better of lru and delta.*", ratio=WORSE),
            plant(".*spillway .*, times the faster plain step", ratio=WORSE),
            plant(".*page faults", page_faults=10**6), plant(".*arena, times the budget", arena_bytes=WORSE),
            plant(".*RSS.*", peak_rss_bytes=WORSE),
        ],
        "race": [
            plant(".*multiple of the plain step", ratio=WORSE), plant(".*multiple of that of.*", walls=WORSE),
            plant(".*refused", ratio=GONE), plant(".*losses differ from plain", losses="DIFFER"),
        ],
        "auto_race": [
            plant(".*losses differ", losses="DIFFER"), plant(".*auto refused", ratio=GONE),
            plant(".*times the plain step", ratio=WORSE), plant(".*over a budget", peak_bytes=WORSE),
            plant(".*, auto.*, times (?!the).*", walls=WORSE),
        ],
        "auto_predictions": [
            plant(".*over the budget", peak_bytes=WORSE), plant(".*losses that differ", losses="DIFFER"),
            plant(".*without a plan", planned=0), plant(".*of what was expected", least=0.5),
            plant(".*multiple of the peak", most=WORSE), plant(".*seconds off", off=WORSE),
        ],
        "auto_lengths": [
            plant(".*over the budget", over=one_more), plant(".*losses that differ", losses="DIFFER"),
            plant("plans", {"competitor": "auto"}, plans=WORSE), plant("share of the time.*", planning=WORSE),
            plant("bytes grown.*", {"competitor": "auto"}, growth=1e12), fact("step time.*", "beside_anew", wrong=1.0),
        ],
        "out_of_core": [
            plant(".*times the bound", of_bound=WORSE), plant(".*multiple of that of.*", walls=WORSE),
            plant(".*other bits than plain", losses="DIFFER"), plant(".*bytes over the budget", peak_bytes=WORSE),
            plant(".*seconds on paper.*", simulated_seconds=WORSE), plant(".*bytes moved.*", simulated_out=WORSE),
            plant("runs of families.*", {"task": "families"}, losses="identical; DIFFERS in a gradient; identical"),
        ],
        "foreseen": [
            fact("seconds to look.*", "following_seconds", wrong=1.0),
            plant(".*forward as a multiple.*", of_forward=9.0),
            plant(".*step as a multiple.*", of_step=9.0), plant(".*other bits than plain", losses="DIFFER"),
            plant(".*bytes over the budget", peak_bytes=WORSE), everywhere("without a task.*", computing=9.0),
        ],
        "mimose_speed": [
            plant("mimose's mean step.*", {"competitor": "mimose"}, seconds=WORSE),
            plant("losses that differ.*", identical=False), plant("competitors over the budget", peak_bytes=WORSE),
        ],
        "budget": [
            plant(".*steps over budget.*", over=one_more), plant(".*losses that differ.*", differing_losses=one_more),
            plant(".*peak RSS.*", rss_ratio=WORSE),
        ],
        "mimose_budget": [
            plant(".*steps over budget.*", over=one_more), plant(".*steps refused", refused=one_more),
            plant(".*losses that differ.*", differing_losses=one_more),
        ],
        "reach": [plant(".*smallest budget.*", smallest_share=WORSE), plant(".*losses differ", identical=False)],
        "exactness": [
            plant("runs of .*", **{"50 delta": "DIFFERS in a buffer"}),
            Plant(what="families short of twelve", only=11),
        ],
        "block_exactness": [
            plant("runs of .*", offload="DIFFERS in a gradient"),
            plant("runs that gave up nothing.*", idle=lambda right: {**right, "offload": True}),
            Plant(what="architectures .*", only=19),
        ],
        "block_mixtures": [
            plant("runs that are not exact.*", identical=one_less),
            plant("sessions refused.*", {"where": "session"}, refused=one_more, identical=one_less),
            everywhere("things that never happened", moved=0),
        ],
        "block_programs": [plant("runs that are wrong", wrong=one_more)],
        "block_refusals": [plant(".*do not work", works=one_less), plant(".*tenth too much", more=one_more)],
        "random_programs": [plant("runs that are wrong", wrong=one_more)],
        "list_optimizers": [
            plant(".*floor / single", ratio=WORSE), plant("trainings that differ.*", verdict="lru: DIFFERS"),
        ],
        "data_dependent": [
            plant("steps over budget", over=one_more), plant("reported peaks.*", unlike=one_more),
            plant("peaks of unwatched.*", less=one_more), plant("steps with more in memory", more=one_more),
            plant("trainings that differ", verdict="a gradient"),
        ],
        "refusals": [
            plant(".*do not work", works=one_less), plant(".*tenth too much", more=one_more),
            plant(".*bound from below", exact=one_less),
        ],
        "collectives": [
            plant("runs that are wrong", wrong=one_more), fact("planted faults.*", "untold", wrong=one_more),
        ],
        "op_audit": [plant("programs that are wrong", wrong=one_more)],
        "modelled": [plant(".*", unseen_ratio=WORSE)],
        "simulated": [
            plant("simulated extra seconds.*", of_extra=WORSE), plant("bytes between.*", simulated_peak=WORSE),
            *(plant(f"simulated {name},.*", **{f"simulated_{name}": WORSE}) for name in _MADE),
        ],
        "auto_planner": [
            plant("points over the bound, .*", instances=in_each("first_gap", 100.0)),
            plant("points over the bound once polished.*", instances=in_each("polish_gap", 100.0)),
            plant("problems with a bound.*", instances=in_each("over_others", 1.0)),
            fact("(points over the best|share of them).*", "small", wrong=in_each("polish", 9.0)),
            fact("bounds above.*", "small", wrong=in_each("slack", -1.0)),
            *(fact(f"milliseconds for a plan of {n} .*", "milliseconds", n, wrong=WORSE) for n in ("24", "100")),
            *(fact("(random|refusals|plans) .*", "random", "counts", key, wrong=one_more) for key in _COUNTED),
        ],
        "auto_paper": [plant(".*is faster", gain=-0.5), plant(".*above the memory", over=1)],
        "compression": [
            plant("share .*", ratio=WORSE), plant("bias .*", bias=WORSE), plant("final loss .*", beyond=9.0),
        ],
        "files": [
            *(plant(f"files that ended in: {how}", **{how: one_more})
              for how in ("traceback", "not_a_sentence", "script", "endless")),
        ],
        "compare_models": [
            plant("rows that ended in an exception.*", failed=one_more, ok=one_less),
            plant("things said.*", odd=one_more),
            plant("rows that are missing", ok=one_less),
        ],
        "gpu": [
            everywhere("without a run.*", outcome="refused"), plant("runs that are not exact", outcome="DIFFERS"),
            plant("largest peak over budget", over=WORSE), plant("largest peak over what.*", peak=WORSE),
            plant("step with overlap.*", {"method": "delta"}, seconds=WORSE),
        ],
        "device_arena": [plant(".*given / in use", over=WORSE)],
        "mimose_planning": [
            plant("microseconds .*", seconds=WORSE), plant("a step .*", ratio=WORSE),
            plant("what collecting adds.*", adds=0.9), plant(".*plans kept.*", kept=WORSE),
        ],
        "convergence": [
            plant(".*losses that differ.*", differing=one_more),
            plant(".*differences at the end", difference="a buffer"),
            plant(".*steps over budget", over=one_more), plant(".*nothing was chosen.*", chose=False),
        ],
        "mimose_convergence": [
            plant(".*losses that differ.*", differing=one_more),
            plant(".*differences at the end", difference="a buffer"),
            plant(".*steps over budget", over=one_more), plant(".*nothing was chosen.*", chose=False),
        ],
        "window_table1": [
            plant(".*off the paper.*", ips=WORSE), plant("cells that fit.*", {"fits_in_the_paper": True}, ips=None),
            plant("batches where the other.*", {"method": "schedule + VA"}, ips=WORSE),
            plant("batches where Spillway's window.*", {"method": "Spillway's window"}, ips=times(0.01)),
            plant("(improved|cells of improved|rows of the other).*", ips=times(0.01)),
            plant(".*bytes in over the least", over=WORSE), plant("seconds of a plan.*", plan_seconds=WORSE),
        ],
        "dtr_reference": [
            plant("of .* runs those.*", identical=one_less), fact("DenseNet.*", "fast", wrong=[9.0]),
        ],
        "delta_tables": [
            fact("numbers of a derived step.*", "not_as_recorded", wrong=one_more),
            plant("of .* numbers .* that no rule explains", ours=WORSE),
            plant("largest deviation.*", ours=WORSE), plant("largest batches.*", ours=times(0.001)),
            plant("rows of Table V.*", ours=WORSE), *_of_filters(),
        ],
        "mimose_tasks": [
            fact("numbers of a derived step.*", "not_as_recorded", wrong=one_more),
            fact("plans that the verifier.*", "rejected", wrong=one_more),
            fact("block-level plans.*", "not_as_planned", wrong=one_more), plant("share of .*", over_default=0.5),
            plant("tasks and budgets .*", mimose=WORSE), plant("the same .*", **{"mimose-published": WORSE}),
        ],
        "mimose_estimator": [
            plant(".*not exact to the byte", inexact=one_more), plant(".*distance from the allocator.*", allocator=1.0),
            plant(".*of its error and the paper's.*", error=WORSE),
        ],
        "mimose_blocks": [
            plant("blocks of which.*", allocator=times(2)),
            plant("of what the first encoder.*", {"figure": "11"}, measured=times(0.1)),
        ],
        "mimose_detection": [
            plant("steps without a plan.*", told=one_less), plant("share by which.*", apart=[-0.5, 0.0]),
            plant("steps that could hold.*", passed=10),
        ],
        "dynn_table1": [plant("samples .*", samples=1), plant("Tree-LSTM.*", distances=[0.0, 0.0, 0.0, 0.0, 1.0])],
        "dynn_accuracy": [
            plant(".*decisions wrong.*", upfront=0.0), plant(".*decisions wrong one ahead.*", ahead_1=0.0),
            plant(".*points over frequency.*", bits_frequency=1.0), plant("moe: points under.*", bits_frequency=1.0),
            plant(".*seconds", cost_seconds=WORSE),
        ],
        "dynn_prefetch": [
            plant("referee slower.*", time_referee=WORSE), plant(".*gain that is missed.*", gain=-1.0),
            plant(".*paths not exact.*", exact=0.0),
        ],
        "dynn_partition": [
            plant(".*(slower|the mean).*", over_plain=WORSE),
            everywhere(".*processor time.*", {"cut": "greedy"}, cut_seconds=WORSE),
        ],
        "dynn_training_time": [
            plant(".*time over that.*", {"method": "dynn-offload", "load": 1.0}, overhead=WORSE),
            plant("cells in which.*", overhead=GONE),
        ],
        "papaya_paper": [
            fact(".*average largest batch.*", "averages", wrong=in_each("batches", 99.0)),
            fact(".*average highest throughput.*", "averages", wrong=in_each("highest", 99.0)),
            fact("GPT.*", "gpt", wrong={"start": 99, "held_out": 9.0}),
            fact(".*apart from the paper's .*", "starts", wrong=lambda right: dict.fromkeys(right, 10**6)),
            fact(".*wrong sign", "judged", wrong=lambda right: [[not one[1], one[1]] for one in right]),
            fact("its sign by fits.*", "signs", wrong=lambda right: [False for _ in right]),
            fact("of .* fits .*", "linear", wrong=lambda right: [0.5 for _ in right]),
            fact("highest throughput foretold.*", "errors", wrong=lambda right: [9.0 for _ in right]),
        ],
        "papaya_here": [
            plant(".*nothing was predicted.*", measured=None), plant(".*1 - R of memory.*", r_memory=0.5),
            plant(".*intercept of memory.*", intercept_off=9.0), plant(".*highest throughput.*", off=9.0),
            fact(".*the recommended method.*", "behind",
                 wrong=lambda right: {name: dict.fromkeys(behind, 0.9) for name, behind in right.items()}),
        ],
        "papaya_pays": [
            plant(".*nothing was predicted.*", measured=None), plant(".*1 - R of memory.*", r_memory=0.5),
            plant(".*intercept of memory.*", intercept_off=9.0), plant(".*highest throughput.*", off=9.0),
            plant(".*sizes left out.*", without_reason=one_more), plant(".*methods that pay.*", taken=1e-9),
            plant(".*plain training at its.*", {"method": "plain"}, fastest=WORSE),
            fact(".*the recommended method.*", "behind",
                 wrong=lambda right: {name: dict.fromkeys(behind, 0.9) for name, behind in right.items()}),
        ],
        "papaya_simulated": [
            everywhere("1 less Kendall's tau with the published.*", throughput=times(-1)),
            everywhere("1 less Kendall's tau with fixed time.*", explained_ratio=times(-1)),
            everywhere("of .* another method .*", throughput=times(-1)),
            fact("of .* fits .*", "linear", wrong=lambda right: [0.5 for _ in right]),
        ],
        "papaya_implications": [
            plant(".*gain of checkpoints falls", gain=0.0, only=""), plant(".*without a value.*", gain=0.0, only=""),
            plant(".*from where on checkpoints.*", gain=0.0, only=""), plant(".*other side of 1.*", gain=0.0),
            everywhere(".*compression pays earlier.*", {"method": "compress"}, gain=9.0),
            plant("devices: gain of checkpoints on 8.*", gain=99.0),
        ],
        "costs_ops": [plant(".*median error", error=9.0), plant(".*off by", ratio=9.0)],
        "costs_plain": [
            plant(".*plain throughput, off by", ratio=9.0), everywhere("plain throughput, median.*", ratio=9.0),
            plant(".*peak, off by.*", peak_ratio=9.0),
            everywhere(".*outside of the 80 % interval", {"batch": 4}, ratio=9.0),
            everywhere(".*inside of the 80 % interval", ratio=1.2),
        ],
        "costs_methods": [
            everywhere("of .* outside of the 80 % interval", {"model": "Bert-Large"}, ratio=9.0),
            everywhere("of .* inside of it", ratio=1.0),
        ],
        "costs_hardware": [plant(".*", {"method": "checkpoint"}, batch=1)],
        "optimum": [
            plant("cells in which another.*", best=1.12), plant("cells in which any.*", bound=1.16),
            plant("Checkmate's gap.*", gap=0.5),
        ],
    }
)  # fmt: skip
"""By target."""
