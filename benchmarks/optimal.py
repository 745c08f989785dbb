"""How far every method is from the best recomputation: Checkmate's plans, its bound, and the others beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from spillway.costs import device_named, step_seconds
from spillway.errors import BudgetInfeasible, NoPlanFound, PlanRejected
from spillway.ir import Step, verify
from spillway.methods import METHODS, Checkmate, Problem, SqrtN, method_named
from spillway.methods.checkmate import Solution, lower_bound
from spillway.simulation.problem import with_seconds
from spillway.simulation.simulated_engine import simulate
from spillway.units import Bytes
from tests.pure.linear_graphs import linear_step

DEVICE: Final = "v100-nvlink"

CHECKPOINTS: Final = "sqrt-n"
OTHERS: Final = (
    CHECKPOINTS, "sqrt-n, greedy", "dtr", "dtr-eqclass", "dtr-local", "largest", "msps", "lru", "delta",
    "delta-published", "swap", "swap-prefetch", "uvm", "zero-offload",
)  # fmt: skip
"""The methods beside Checkmate: all of `spillway compare` but those that recompute whole blocks, which not every step
has."""

TOLERANCE: Final = 1e-6


@frozen
class Size:
    """How much is planned."""

    layers: Sequence[int]
    """Linear graphs by their number of layers; twice as many nodes, and one."""
    recorded: Mapping[str, Mapping[str, Any]]
    """Workloads that are recorded, with their options."""
    percents: Sequence[int]
    """Budgets, in percent of what the plain peak has beside what is there before and after the step."""
    time_limit: float
    """Seconds for each of Checkmate's plans."""
    most_nodes: int
    """Nodes beyond which a recorded step is coarsened. Linear graphs never are."""


def run(size: Size, tell: Tell) -> Result:
    """Every step under every budget."""
    steps = {f"linear {layers}": (linear_step(layers), 2 * layers + 1) for layers in size.layers}
    device = device_named(DEVICE)
    for name, options in size.recorded.items():
        tell(f"recording {name}")
        steps[name] = with_seconds(_recorded(name, options), device), size.most_nodes
    rows: list[Row] = []
    for name, (step, nodes) in steps.items():
        for percent in size.percents:
            tell(f"{name}, {percent} %")
            problem = Problem(step=step, allowed=_budget(step, percent), device=device)
            rows += _rows(name, percent, problem, nodes, size.time_limit)
    planned = [row for row in rows if row["method"] == "checkmate" and row["status"] == "ok"]
    rejected = [row for row in rows if row["status"] == "rejected"]
    below = [row for row in planned if row["x_bound"] < 1 - TOLERANCE]
    checkpoints = {(row["step"], row["budget"]): row for row in rows if row["method"] == CHECKPOINTS}
    slower = [row for row in planned if _is_slower(row, checkpoints[row["step"], row["budget"]])]
    # A finer plan may be faster than the best of a coarsened step; a plan of the same nodes may not.
    beaten = [row for row in rows if row["beats"] and not row["coarsened"]]
    return Result(
        title="Checkmate's plans, and the distance of every method to them and to their bound",
        columns=COLUMNS,
        rows=rows,
        checks=[
            Check(what="plans of Checkmate that the verifier rejected", measured=len(rejected), at_most=0),
            Check(what="plans of Checkmate below their own bound", measured=len(below), at_most=0),
            Check(what="recomputing methods below the bound of a step that is not coarsened",
                  measured=len(beaten), at_most=0),
            Check(what="plans of Checkmate that are slower than checkpoints after every square root of n layers",
                  measured=len(slower), at_most=0),
        ],
        notes=(*NOTES, *_summary(rows)),
    )  # fmt: skip


def _is_slower(row: Row, other: Row) -> bool:
    return other["status"] == "ok" and row["overhead"] > other["overhead"] * (1 + TOLERANCE)


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(step="step", budget="budget", method="method", status="status"),
    *columns.ratios(overhead="x plain", x_bound="x LP bound", x_checkmate="x checkmate"),
    *columns.nbytes(budget_bytes="allowed", peak_bytes="peak"),
    *columns.text(nodes="nodes", proof="proof"),
    *columns.nbytes(tightened_bytes="given up"),
)

NOTES: Final = (
    "Budgets are shares of what the plain peak has beside parameters and whatever else is there before and after the "
    "step.",
    f"Seconds are those of a {DEVICE}, on paper; Checkmate's and the bound's are of compute alone, the others' are "
    "simulated and have copies. Linear graphs have a millisecond and a mebibyte for every op.",
    "LP bound: the optimum of Checkmate's relaxation. Of recorded steps, which are coarsened to the nodes stated, it "
    "is a bound for that coarser problem, and a method that decides op by op may be below it. Methods that move bytes "
    "are not bound by it at all.",
    "Given up: bytes of the budget that a plan could not use, because it cannot say everything that Checkmate's "
    "schedule says. Proof: optimal, or by how much the plan may be off its own program's bound.",
)


def _budget(step: Step, percent: int) -> Bytes:
    """Parameters and the like are there whatever a plan says: the rest of the peak is what budgets are a share of."""
    stays = sum(info.nbytes for info in step.storages if info.present_at_start and info.present_at_end)
    return stays + (step.plain_peak() - stays) * percent // 100


def _recorded(name: str, options: Mapping[str, Any]) -> Step:
    from spillway.recording import record
    from spillway.workloads import get

    return record(lambda: get(name, **options), fake=True).step


def _rows(name: str, percent: int, problem: Problem, nodes: int, time_limit: float) -> list[Row]:
    common = {"step": name, "budget": f"{percent} %", "budget_bytes": problem.allowed}
    plain = step_seconds(problem.step)
    try:
        bound: float | None = lower_bound(problem, time_limit, nodes)
    except BudgetInfeasible:
        bound = None
    best, solved = _checkmate(problem, nodes, time_limit)
    compared = {
        "checkmate": best,
        **{method: _simulated(method, problem) for method in OTHERS if method.partition(",")[0] in METHODS},
    }
    rows: list[Row] = []
    for method, found in compared.items():
        seconds = found.pop("seconds", None)
        row = common | {"method": method, "coarsened": len(problem.step.ops) > nodes, "beats": False} | found
        if seconds is not None:
            row["overhead"] = seconds / plain
            row["x_bound"] = seconds / bound if bound else None
            row["x_checkmate"] = seconds / solved.seconds if solved else None
            row["beats"] = bool(bound) and seconds < bound * (1 - TOLERANCE) and not found.get("bytes_out")  # type: ignore[operator]
        rows.append(row)
    return rows


def _checkmate(problem: Problem, nodes: int, time_limit: float) -> tuple[dict[str, Any], Solution | None]:
    try:
        solved = Checkmate(time_limit=time_limit, most_nodes=nodes).solve(problem)
    except (BudgetInfeasible, NoPlanFound) as error:
        status = "none" if isinstance(error, NoPlanFound) else "refused"
        return {"status": status, "proof": "time was up" if status == "none" else "no such plan"}, None
    try:
        verify(solved.plan, problem.step, problem.allowed)
    except PlanRejected as rejected:
        return {"status": "rejected", "proof": rejected.rule}, None
    return {
        "status": "ok", "seconds": solved.seconds, "peak_bytes": solved.plan.projected, "nodes": solved.nodes,
        "proof": "optimal" if solved.proven else f"within {solved.gap:.1%}", "tightened_bytes": solved.tightened,
    }, solved  # fmt: skip


def _simulated(method: str, problem: Problem) -> dict[str, Any]:
    chosen = SqrtN.greedy() if method.endswith("greedy") else method_named(method)
    try:
        found = simulate(problem.step, allowed=problem.allowed, method=chosen, device=problem.device)
    except BudgetInfeasible:
        return {"status": "refused"}
    if found.status != "ok":
        return {"status": found.status}
    return {"status": "ok", "seconds": found.seconds, "peak_bytes": found.peak_bytes, "bytes_out": found.bytes_out}


def _summary(rows: Sequence[Row]) -> list[str]:
    planned = [row for row in rows if row["method"] == "checkmate"]
    done = [row for row in planned if row["status"] == "ok"]
    optimal = sum(row["proof"] == "optimal" for row in done)
    return [f"Checkmate: {len(done)} plans for {len(planned)} problems, {optimal} of them proven optimal."]


BENCHMARK: Final = Benchmark(
    name="optimal",
    run=run,
    full=Size(
        layers=(8, 16, 24, 32),
        recorded={"resnet": {"blocks": (1, 1, 1, 1)}, "stdlib-lm": {"layers": 4, "batch": 8, "longest": 128}},
        percents=(80, 65, 50, 40), time_limit=40.0, most_nodes=32,
    ),
    quick=Size(
        layers=(4,), recorded={"resnet": {"width": 8, "blocks": (1, 1), "batch": 2}}, percents=(80,), time_limit=5.0,
        most_nodes=20,
    ),
)  # fmt: skip
