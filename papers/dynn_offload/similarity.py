"""Table I: how much the steps of a dynamic network have in common, by the Jaccard distance from a baseline sample.

The paper takes a binary vector of the control flows of Tree-LSTM, 6,000 samples and the first one as the baseline, and
does not say which control flows are the same one in two trees. Three answers stand here: a path is the operators that
ran, each as often as it did; or its ops by their sites, so that it matters which node of the tree runs what; or the
decisions that resolve it. Which sample is the first decides much of such a table, so that every share is the mean over
many baselines, and the range that it has over them stands behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from papers import TABLES, table
from papers.dynn_offload.samples import FROZEN, TRAINS, samples_of
from spillway.pilots.program import Program
from spillway.pilots.sample_files import RecordedSamples

BINS: Final = ("[0,0.2]", "(0.2,0.4]", "(0.4,0.6]", "(0.6,0.8]", "(0.8,1]")
"""Of the distance, as the paper has them."""
EDGES: Final = (0.2, 0.4, 0.6, 0.8)
BASELINES: Final = 200
"""Samples that are the baseline in turn, evenly spread over all."""
OPERATORS, OPS, DECISIONS = "operators", "sites", "decisions"
PUBLISHED: Final = "published"
FEWEST: Final = 2000
"""Samples of a network that a figure stands on."""


@frozen
class Size:
    """How much is run."""

    networks: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int
    frozen: tuple[str, ...] = ()
    """Networks that are recorded as they stay too."""


def run(size: Size, tell: Tell) -> Result:
    """A row a network, state and kind of set, over all seeds, behind the paper's."""
    rows: list[Row] = [_published()]
    for network, state in [(one, TRAINS) for one in size.networks] + [(one, FROZEN) for one in size.frozen]:
        kept = state == FROZEN
        recorded = [samples_of(network, seed=seed, steps=size.steps, frozen=kept, tell=tell) for seed in size.seeds]
        for kind in (OPERATORS, OPS, DECISIONS):
            rows.append(_row(network, state, kind, recorded))
            tell("{network}, {state}, by {kind}: {distances}".format(**rows[-1]))
    return Result(
        title="DyNN-Offload, Table I: samples by the Jaccard distance of what they run from a baseline",
        columns=COLUMNS, rows=[_flat(row) for row in rows], notes=NOTES,
    )  # fmt: skip


def distances(counts: npt.NDArray[np.int16], baseline: int) -> npt.NDArray[np.float64]:
    """[others] The Jaccard distance of every other row from one, of [samples, elements] with how often each has each; 0
    for two that are empty."""
    both = np.minimum(counts, counts[baseline]).sum(axis=1)
    either = np.maximum(counts, counts[baseline]).sum(axis=1)
    away = 1 - np.divide(both, either, out=np.ones(len(counts)), where=either > 0)
    return np.asarray(np.delete(away, baseline))


def shares(away: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[bins] The share of distances in each of the paper's bins, whose upper ends belong to them."""
    return np.bincount(np.searchsorted(EDGES, away, side="left"), minlength=len(BINS)) / len(away)


def _row(network: str, state: str, kind: str, recorded: Sequence[RecordedSamples]) -> dict[str, Any]:
    means, ranges, firsts = [], [], []
    for one in recorded:
        counts = _counts(one, kind)
        chosen = np.linspace(0, len(counts) - 1, min(BASELINES, len(counts))).astype(int)
        found = np.array([shares(distances(counts, baseline)) for baseline in chosen])
        means.append(found.mean(axis=0))
        ranges.append(np.ptp(found, axis=0).max())
        firsts.append(found[0])
    return {
        "network": network, "state": state, "kind": kind, "seeds": len(recorded),
        "samples": sum(len(one.samples) for one in recorded), "distances": np.mean(means, axis=0).round(4).tolist(),
        "of_seeds": np.round(means, 4).tolist(), "of_first_sample": np.mean(firsts, axis=0).round(4).tolist(),
        "widest_range": float(np.mean(ranges)), **_paths(recorded),
    }  # fmt: skip


def _counts(recorded: RecordedSamples, kind: str) -> npt.NDArray[np.int16]:
    known = recorded.architecture
    if kind == DECISIONS:
        program = Program(known)
        return np.array([program.bits(sample.path) for sample in recorded.samples], np.int16)
    numbers = dict[str, int]()
    elements = [*range(len(known.ops))]
    if kind == OPERATORS:
        elements = [numbers.setdefault(op.name, len(numbers)) for op in known.ops]
    of_key, many = np.array(elements), max(elements) + 1
    rows = [np.bincount(of_key[sample.path.keys], minlength=many) for sample in recorded.samples]
    return np.array(rows, np.int16)


def _paths(recorded: Sequence[RecordedSamples]) -> dict[str, float]:
    """How many paths there are, and how often the simplest guesses are right, in the mean of the seeds."""
    found = []
    for one in recorded:
        numbers = [sample.path.number for sample in one.samples]
        counts = np.bincount(numbers)
        seen, last = set[int](), dict[tuple[float, ...], int]()
        before = same = 0
        for sample, number in zip(one.samples, numbers, strict=True):
            before += number in seen
            same += last.get(sample.sizes) == number
            seen.add(number)
            last[sample.sizes] = number
        ops = np.percentile([len(sample.path) for sample in one.samples], (5, 50, 95))
        found.append((*ops, len(counts), counts.max() / len(numbers), before / len(numbers), same / len(numbers)))
    names = ("ops_5", "ops_50", "ops_95", "paths", "most_frequent", "seen_before", "last_of_size")
    return dict(zip(names, np.mean(found, axis=0).round(4).tolist(), strict=True))


def _published() -> dict[str, Any]:
    told = {row["bin"].replace(" ", ""): float(row["percent"]) / 100 for row in table(TABLES / PAPERS_TABLE)}
    return {
        "network": "tree-lstm", "state": PUBLISHED, "kind": "control flows", "samples": 6000,
        "distances": [told[name] for name in BINS],
    }  # fmt: skip


PAPERS_TABLE: Final = "dynn_table1_jaccard_treelstm_6000.csv"


def _flat(row: Row) -> Row:
    return {**row, **dict(zip(BINS, row["distances"], strict=True))}


def _checks(result: Result) -> Iterator[Check]:
    rows = result.rows
    here = [row for row in rows if row["state"] != PUBLISHED]
    fewest = min(row["samples"] / row["seeds"] for row in here)
    yield Check(what=f"samples of a network that lack to {FEWEST}", measured=max(FEWEST - fewest, 0))
    told = next(row for row in rows if row["state"] == PUBLISHED)["distances"]
    for row in here:
        if (row["network"], row["kind"]) == ("tree-lstm", OPERATORS):
            away = float(np.abs(np.subtract(row["distances"], told)).sum() / 2)
            yield Check(what="Tree-LSTM, share of samples in another bin than the paper's", measured=away, at_most=0.25)


COLUMNS: Final = (
    *columns.text(network="network", state="state", kind="by", seeds="seeds", samples="samples"),
    *columns.shares(**{name: name for name in BINS}, widest_range="widest range"),
    *columns.shown("{:.0f}".format, ops_5="ops p5", ops_50="p50", ops_95="p95", paths="paths"),
    *columns.shares(most_frequent="most frequent", seen_before="seen before", last_of_size="last of its size"),
)
NOTES: Final = (
    "Shares of samples by Jaccard distance, the mean over baselines and seeds; 0 is the same path. The similarity is 1 "
    "less the distance. The widest range is what the share of one bin varies by over the baselines.",
    "Ops of a forward. Paths, and how often a step's path was the most frequent one, had been seen before, or was that "
    "of the last step of the same size: means over seeds.",
)

BENCHMARK: Final = Benchmark(
    name="dynn_table1",
    run=run,
    judge=_checks,
    full=Size(
        networks=("tree-lstm", "tree-cnn", "var-lstm", "var-bert", "moe", "unrolled-gan", "evoformer"),
        seeds=(0, 1, 2),
        steps=FEWEST, frozen=("var-bert",),
    ),
    quick=Size(networks=("unrolled-gan",), seeds=(0,), steps=30),
)  # fmt: skip
