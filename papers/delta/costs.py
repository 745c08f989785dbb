"""DELTA's Table V, and what its text claims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from benchmarks.record import Row
from papers.delta.batches import Found
from papers.delta.lab import Lab, figure, mib, milliseconds, overheads, published
from papers.delta.memory import COMPARED, FILTERED, FILTERS
from papers.delta.soft_budget import Ran, run_softly
from spillway.ir import Phase, Step
from spillway.units import Bytes, Seconds

OUTPUTS: Final = {
    "BNForward": "aten.native_batch_norm", "ConvForward": "aten.convolution", "PoolingForward": "aten.max_pool2d",
    "ReLUForward": "aten.relu",
}  # fmt: skip
"""How the names of ops begin."""
NOT_SIMULATED: Final = "not simulated"

Cells = Mapping[tuple[str, float], Mapping[str, tuple[Ran, Ran]]]
"""Runs of Figure 7 by model, share and filter."""


class Output(NamedTuple):
    """The largest result of an op of the forward."""

    nbytes: Bytes
    recompute: Seconds
    """Of the op, its inputs being there."""


def table_5(lab: Lab) -> list[Row]:
    """What a copy and what recomputing take, for the output whose copy takes most nearly what it took in the paper."""
    batch = lab.size.batches["ResNet-50"]
    step = lab.step("ResNet-50", batch)
    links = [device.out_per_second for device in lab.size.devices]
    rows = []
    for costs in lab.paper.costs:
        wanted = costs.swap * links[0]
        output = min(_outputs(step, costs.tensor.partition("(")[0]), key=lambda one: abs(one.nbytes - wanted))
        rate = output.nbytes / costs.swap / 1e9
        note = f"{mib(output.nbytes):.0f} MiB at batch {batch}, for which the paper's c_s is {rate:.1f} GB/s"
        swaps = [milliseconds(output.nbytes / link) for link in links]
        rows.append(figure("V", f"{costs.tensor} c_s", milliseconds(costs.swap), swaps, "ms", why="g", note=note))
        again, told = milliseconds(output.recompute), milliseconds(costs.recompute)
        rows.append(figure("V", f"{costs.tensor} c_r", told, (again,), "ms", why="h", note="synchronised, by roofline"))
    largest = max(_outputs(step, "ReLUForward"))
    rows.append(figure("V", "ReLUForward c_s", None, [milliseconds(largest.nbytes / link) for link in links], "ms"))
    rows.append(figure("V", "ReLUForward c_r", None, (milliseconds(largest.recompute),), "ms"))
    return rows + _with_launches(lab, step)


def _with_launches(lab: Lab, step: Step) -> list[Row]:
    """What the Director does with costs as in Table V, and with true ones."""
    rows = []
    for what, launch in (("synchronised", None), ("of launches, as in Table V", lab.size.devices[0].op_seconds)):
        runs = [
            run_softly(step, published(), ran.budget, device, launch=launch)
            for ran, device in zip(lab.least("ResNet-50", lab.size.batches["ResNet-50"]), lab.size.devices, strict=True)
        ]
        counts = [f"{ran.offloads} of {ran.offloads + ran.simulation.drops}" for ran in runs]
        rows.append(figure("V", f"offloads of all releases, costs {what}", None, counts, note=overheads(runs)))
    return rows


def _outputs(step: Step, name: str) -> Iterator[Output]:
    for op in step.ops:
        if op.phase is Phase.FORWARD and op.name.startswith(OUTPUTS[name]):
            # Beside its result, batch normalisation makes statistics, and writes others.
            yield Output(max(step.storages[step.values[made].storage].nbytes for made in op.creates), op.seconds or 0.0)


# ---------------------------------------------------------------------- filters


def ordered(cells: Cells) -> tuple[int, int]:
    """Of the models of Figure 7: in how many greedy's least memory is no less than that of both others, and in how
    many lru offloads most often, over all budgets."""
    worse = more = 0
    for model in FILTERED:
        runs = {name: [cell[name][0] for (of, _), cell in cells.items() if of == model] for name in FILTERS}
        least = {name: min((r.simulation.peak_bytes for r in of if r.ok), default=0) for name, of in runs.items()}
        offloads = {name: sum(ran.offloads for ran in of) for name, of in runs.items()}
        worse += least["greedy"] >= max(least["base"], least["lru"])
        more += offloads["lru"] >= max(offloads["base"], offloads["greedy"])
    return worse, more


def _greedy_is_worst_below(cells: Cells) -> float:
    """The largest budget of EfficientNet, in bytes, from which on greedy takes the most memory."""
    worst = [
        cell["greedy"][0].budget
        for (model, _), cell in cells.items()
        if model == "EfficientNet"
        and cell["greedy"][0].simulation.peak_bytes
        > max(cell[name][0].simulation.peak_bytes for name in FILTERS if name != "greedy")
    ]
    return float(max(worst, default=0))


# ---------------------------------------------------------------------- claims


def claims(lab: Lab, largest: Mapping[tuple[str, str], Sequence[Found]], cells: Cells) -> list[Row]:
    """What stands in the text, each with what a simulation says of it."""
    lab.tell("claims")
    batches = lab.size.batches
    saved = {model: _saved(lab, model, batches[model]) for model in ("ResNet-50", *COMPARED)}
    double = _saved(lab, "ResNet-50", 2 * batches["ResNet-50"])
    networks = [saved[name] for name in ("ResNet-50", "ResNet-101", "ResNeXt-50")] + [double]
    bert = [
        f"{mib(lab.step('BERT', batches['BERT']).plain_peak() - ran.simulation.peak_bytes):.0f} MiB, {share:.0%}"
        for ran, share in zip(lab.least("BERT", batches["BERT"]), saved["BERT"], strict=True)
    ]
    devices = lab.size.devices
    ours: dict[str, tuple[str, Sequence[object], str]] = {
        "D1": ("memory saved, convolutional networks",
               [f"{min(s[k] for s in networks):.0%} to {max(s[k] for s in networks):.0%}" for k in (0, 1)], "c"),
        "D2": ("saved at twice the batch, ResNet-50", _shares(double), "c"),
        "D3": ("saved, ResNet-50, DELTA", _shares(saved["ResNet-50"]), "c, d"),
        "D4": ("saved, ResNet-101 / ResNeXt-50",
               [f"{saved['ResNet-101'][k]:.1%} / {saved['ResNeXt-50'][k]:.1%}" for k in (0, 1)], "c"),
        "D5": ("saved, BERT", bert, "c"),
        "D6": ("less time by overlapping", _overlap(lab), "i"),
        "D7": ("offloads / reloads, others recomputed", _counts(lab), "i"),
        "D8": ("final loss: exact by construction", [NOT_SIMULATED], ""),
        "D9": ("seconds of a step, ResNet-50, least memory",
               [f"{ran.simulation.seconds:.3f}" for ran in lab.least("ResNet-50", batches["ResNet-50"])], "j"),
        "D10": ("GB/s of the link", [f"{device.out_per_second / 1e9:g}" for device in devices], ""),
        "D11": ("share of the budget at which releases start", [f"{published().early:g}"], ""),
        "D12": ("budget below which greedy takes most, EfficientNet", [f"{_greedy_is_worst_below(cells):.3g}"], "k"),
        "D13": ("device", [device.name for device in devices], ""),
        "D14": ("ResNet-101, DELTA: of DTR's batch, of the plain one", _ratios(largest), "e"),
    }  # fmt: skip
    return [
        figure("text", f"{number}: {ours[number][0]}", told, ours[number][1], why=ours[number][2])
        for number, told in lab.paper.claims.items()
        if number in ours
    ]


def _saved(lab: Lab, model: str, batch: int) -> list[float]:
    plain = lab.step(model, batch).plain_peak()
    return [1 - ran.simulation.peak_bytes / plain for ran in lab.least(model, batch)]


def _shares(saved: Sequence[float]) -> list[str]:
    return [f"{share:.1%}" for share in saved]


def _overlap(lab: Lab) -> list[str]:
    """Time that copies beside ops save, at the budget of least memory and at half of the plain peak."""
    batch = lab.size.batches["ResNet-50"]
    step, shown = lab.step("ResNet-50", batch), []
    for ran, device in zip(lab.least("ResNet-50", batch), lab.size.devices, strict=True):
        saved = []
        for budget in (ran.budget, step.plain_peak() // 2):
            beside, in_turn = (
                run_softly(step, published(), budget, device, overlapped=overlapped) for overlapped in (True, False)
            )
            saved.append(f"{1 - beside.simulation.seconds / in_turn.simulation.seconds:.1%}")
        shown.append(" / ".join(saved))
    return shown


def _counts(lab: Lab) -> list[str]:
    """Of the runs of the paper's filter, the one whose offloads are nearest to the paper's nine."""
    batch, shown = lab.size.batches["ResNet-50"], []
    wanted = int(lab.paper.claims["D7"].split()[0])
    runs = [lab.soft("ResNet-50", batch, published, share) for share in lab.size.shares]
    for link in (0, 1):
        ran = min((pair[link] for pair in runs), key=lambda ran: abs(ran.offloads - wanted))
        shown.append(f"{ran.offloads} / {ran.reloads}, {ran.recalls}")
    return shown


def _ratios(largest: Mapping[tuple[str, str], Sequence[Found]]) -> list[str]:
    plain, dtr = (largest["ResNet-101", name][0].batch for name in ("baseline", "DTR"))
    return [f"{one.batch / dtr:.2f}, {one.batch / plain:.2f}" for one in largest["ResNet-101", "DELTA"]]
