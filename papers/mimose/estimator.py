"""Bytes of every block at sizes that were not measured, from ten that were: Tables 3 and 4 of Mimose's paper."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias, final

import numpy

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from papers.mimose.lab import Taken, blocks_at, build, counted_at
from spillway.methods.by_block import BlockSample, StepSample
from spillway.methods.mimose import Options
from spillway.methods.mimose.planning import PublishedPlanning, SimulatedPlanning
from spillway.units import Bytes, Seconds

# ---------------------------------------------------------------------- what could estimate


Samples: TypeAlias = Mapping[int, Sequence[Bytes]]
"""By size what each block saved."""
Predict: TypeAlias = Callable[[int, int], float]
"""Bytes of a block at a size."""
Fit: TypeAlias = Callable[[Samples], Predict]

EVEN: Final = "even steps"
COMING: Final = "as in an epoch"
"""How the sizes are chosen that are estimated."""
WITHIN: Final = 2.0
"""Times the paper's error, or the paper's times ours."""
SVR_LINEAR: Final = "SVR, linear kernel"
OURS: Final = "exact laws, the default"
PUBLISHED: Final = "quadratic, as published"
EXACT: Final = (OURS, PUBLISHED, "cubic")
"""Without an error here: bytes are counted, and follow a quadratic."""


def planned(
    kind: Callable[[Options], PublishedPlanning | SimulatedPlanning], options: Options, samples: Samples
) -> Predict:
    """As a training does that plans so: the samples of each step are handed over, then all is learned at once."""
    planning = kind(options)
    for size, counted in samples.items():
        blocks = [
            BlockSample(block=block, size=(size,), nbytes=nbytes, seconds=0.0) for block, nbytes in enumerate(counted)
        ]
        step = StepSample(size=(size,), recomputed=frozenset(range(len(blocks))), peak=0)
        planning.observe(step, blocks, whole=False)
    for block in range(len(blocks)):
        planning.nbytes(block, (size,))
    return lambda block, size: planning.nbytes(block, (size,))


def polynomial(degree: int, samples: Samples) -> Predict:
    """Least squares of NumPy."""
    fits = [numpy.polyfit(list(samples), counted, degree) for counted in zip(*samples.values(), strict=True)]
    return lambda block, size: float(numpy.polyval(fits[block], size))


def scikit(make: Callable[[], Any], samples: Samples) -> Predict:
    """A regressor of scikit-learn for each block."""
    sizes = numpy.array([[size] for size in samples], dtype=float)
    fits = [make().fit(sizes, numpy.array(counted, dtype=float)) for counted in zip(*samples.values(), strict=True)]
    return lambda block, size: float(fits[block].predict(numpy.array([[float(size)]]))[0])


OWN: Final[Mapping[str, Fit]] = MappingProxyType(
    {
        OURS: partial(planned, SimulatedPlanning, Options()),
        PUBLISHED: partial(planned, PublishedPlanning, Options.as_published()),
        "linear": partial(polynomial, 1),
        "cubic": partial(polynomial, 3),
    }
)
"""What needs no other library."""


def of_scikit() -> dict[str, Fit]:
    """Those of scikit-learn; none where it is not installed."""
    try:
        from sklearn.compose import TransformedTargetRegressor
        from sklearn.ensemble import GradientBoostingRegressor
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
        from sklearn.svm import SVR
        from sklearn.tree import DecisionTreeRegressor
    except ImportError:
        return {}

    def svr(kernel: str) -> Any:
        support = make_pipeline(StandardScaler(), SVR(kernel=kernel, C=100.0))
        return TransformedTargetRegressor(support, transformer=StandardScaler())

    return {
        SVR_LINEAR: partial(scikit, partial(svr, "linear")),
        "SVR, radial kernel": partial(scikit, partial(svr, "rbf")),
        "decision tree": partial(scikit, partial(DecisionTreeRegressor, random_state=0)),
        "gradient-boosted trees": partial(scikit, partial(GradientBoostingRegressor, random_state=0)),
    }


# ---------------------------------------------------------------------- the estimates


@frozen
class Task:
    """A model and the sizes of its inputs."""

    name: str
    """As `lab.build` has it."""
    options: Mapping[str, Any]
    """How large it is made."""
    smallest: int
    largest: int
    at_most: float
    """Target for the distance from what the allocator gets back, all blocks together."""
    all_regressors: bool = False
    """Whether all are tried, those that the paper gave more samples with more of them too: Table 3. Then sizes are
    also drawn as they come in an epoch."""


@frozen
class Size:
    """How much is measured."""

    tasks: Sequence[Task]
    samples: int
    """Sizes that are measured to learn from."""
    more: int
    """And for some regressors of one task."""
    unseen: int
    """Sizes that are estimated."""
    epochs: int
    """Draws of sizes as they come in an epoch; the median of their mean errors counts."""
    asked: int
    """Sizes that are estimated in each."""
    times: int
    """How often a fit and a prediction are timed; medians count."""


class Told(NamedTuple):
    """What the paper has: relative error, seconds of a fit, seconds of a prediction."""

    error: float
    fit: Seconds
    predict: Seconds


PAPER: Final[Mapping[tuple[str, str, int], Told]] = {
    ("TC-Bert", "linear", 10): Told(0.0404, 0.90e-3, 14.78e-6),
    ("TC-Bert", PUBLISHED, 10): Told(0.0032, 0.98e-3, 16.21e-6),
    ("TC-Bert", "cubic", 10): Told(0.0032, 1.01e-3, 17.88e-6),
    ("TC-Bert", SVR_LINEAR, 10): Told(0.0380, 1.01e-3, 107.05e-6),
    ("TC-Bert", SVR_LINEAR, 50): Told(0.0356, 2.70e-3, 110.39e-6),
    ("TC-Bert", "decision tree", 10): Told(0.0567, 3.98e-3, 82.97e-6),
    ("TC-Bert", "decision tree", 50): Told(0.0150, 21.15e-3, 82.25e-6),
    ("TC-Bert", "gradient-boosted trees", 10): Told(0.0513, 428.76e-3, 1348.26e-6),
    ("TC-Bert", "gradient-boosted trees", 50): Told(0.0143, 2504.11e-3, 1354.93e-6),
    ("MC-Roberta", PUBLISHED, 10): Told(0.0046, 0.94e-3, 15.50e-6),
    ("QA-XLNet", PUBLISHED, 10): Told(0.0033, 1.02e-3, 16.93e-6),
    ("QA-Bert", PUBLISHED, 10): Told(0.0033, 1.18e-3, 16.45e-6),
}
"""Tables 3 and 4 of arXiv:2209.02478, by task, regressor and samples. Its boosted trees are XGBoost's."""


@final
@dataclass(frozen=True, slots=True)
class Measured:
    """The blocks of one model, by size."""

    learned: Samples
    unseen: Mapping[int, Sequence[Taken]]
    epochs: Sequence[tuple[Sequence[int], Sequence[int]]]
    """Sizes to learn from and to estimate, as they come in an epoch."""
    counted: Samples
    """Of all these."""


def run(size: Size, tell: Tell) -> Result:
    """Measure the blocks of every model, then let every regressor learn and estimate."""
    others, rows = of_scikit(), list[Row]()
    absent = "Without rows of scikit-learn, which is not installed: pip install 'torch-spillway[bench]'."
    for task in size.tasks:
        found = _measured(task, size, tell)
        fits = {**OWN, **others} if task.all_regressors else {name: OWN[name] for name in (OURS, PUBLISHED)}
        for name, fit in fits.items():
            for count in [size.samples, size.more] if name in others else [size.samples]:
                rows.append(_row(task, name, fit, found, count, size.times))
                if found.epochs:
                    rows.append(_drawn_row(task, name, fit, found, count))
    return Result(title=TITLE, columns=COLUMNS, rows=rows, notes=NOTES if others else (*NOTES, absent))


def _measured(task: Task, size: Size, tell: Tell) -> Measured:
    learned, unseen = sizes_of(task, size)
    subject = build(task.name, task.options)
    with subject.engine(task.smallest) as engine:
        subject.loss(task.smallest)  # shows which buffers a block writes to; until then none of them can be given up
        epochs = [as_they_come(task, size, random.Random(seed)) for seed in range(size.epochs * task.all_regressors)]
        drawn = sorted({one for epoch in epochs for sizes in epoch for one in sizes})
        tell(f"{task.name}: {len(learned) + len(unseen) + len(drawn)} sizes")
        return Measured(
            {one: counted_at(subject, engine, one) for one in learned},
            {one: blocks_at(subject, engine, one) for one in unseen},
            epochs,
            {one: counted_at(subject, engine, one) for one in drawn},
        )


def sizes_of(task: Task, size: Size) -> tuple[list[int], list[int]]:
    """Sizes to learn from, drawn by chance, and others, from the smallest to the largest in even steps."""
    count = max(size.samples, size.more if task.all_regressors else 0)
    step = (task.largest - task.smallest) / max(size.unseen - 1, 1)
    unseen = [round(task.smallest + step * number) for number in range(size.unseen)]
    others = sorted(set(range(task.smallest, task.largest + 1)) - set(unseen))
    return random.Random(0).sample(others, count), unseen


def as_they_come(task: Task, size: Size, chance: random.Random) -> tuple[list[int], list[int]]:
    """Sizes to learn from, all different, and sizes to estimate: both drawn from a bell whose three sigmas reach the
    ends, as `mimose_planning` draws an epoch."""
    middle, spread = (task.smallest + task.largest) / 2, (task.largest - task.smallest) / 6

    def drawn() -> int:
        return min(max(round(chance.gauss(middle, spread)), task.smallest), task.largest)

    learned: dict[int, None] = {}
    while len(learned) < max(size.samples, size.more):
        learned[drawn()] = None
    return list(learned), [drawn() for _ in range(size.asked)]


def _drawn_row(task: Task, name: str, fit: Fit, found: Measured, count: int) -> Row:
    """The error of sizes as they come in an epoch, the median of several, beside the paper's, which had one."""
    errors: list[list[float]] = []
    for learned, asked in found.epochs:
        predict = fit({size: found.counted[size] for size in learned[:count]})
        errors.append([
            abs(predict(block, size) / nbytes - 1)
            for size in asked for block, nbytes in enumerate(found.counted[size])
        ])  # fmt: skip
    every, means = [error for epoch in errors for error in epoch], [statistics.fmean(epoch) for epoch in errors]
    told = PAPER.get((task.name, name, count))
    return {
        "task": task.name, "regressor": name, "sizes": COMING, "samples": count, "estimates": len(every),
        "error": statistics.median(means), "worst": max(every), "inexact": sum(error > 0 for error in every),
        "least": min(means), "most": max(means),
        "paper_error": told.error if told else None,
    }  # fmt: skip


def _row(task: Task, name: str, fit: Fit, found: Measured, count: int, times: int) -> Row:
    samples = dict(list(found.learned.items())[:count])
    fitted = [_timed(lambda: fit(samples)) for _ in range(times)]
    predict: Predict = fitted[-1][0]
    asked = [(block, size) for size, blocks in found.unseen.items() for block in range(len(blocks))]
    predicted = [_timed(lambda: [predict(*question) for question in asked]) for _ in range(times)]
    answers: Mapping[tuple[int, int], float] = dict(zip(asked, predicted[-1][0], strict=True))
    errors = [abs(nbytes / found.unseen[size][block].nbytes - 1) for (block, size), nbytes in answers.items()]
    told = PAPER.get((task.name, name, count))
    return {
        "task": task.name, "at_most": task.at_most, "regressor": name, "sizes": EVEN, "samples": count,
        "blocks": len(asked) // len(found.unseen),
        "estimates": len(asked), "error": statistics.fmean(errors), "worst": max(errors),
        "inexact": sum(error > 0 for error in errors), "allocator": _from_allocator(answers, found),
        "fit": statistics.median(seconds for _, seconds in fitted),
        "predict": statistics.median(seconds for _, seconds in predicted) / len(asked),
        **({"paper_fit": told.fit, "paper_predict": told.predict} if told else {}),
        "paper_error": told.error if told and not found.epochs else None,
    }  # fmt: skip


def _timed(work: Callable[[], Any]) -> tuple[Any, Seconds]:
    began = time.process_time()
    done = work()
    return done, time.process_time() - began


def _from_allocator(answers: Mapping[tuple[int, int], float], found: Measured) -> float:
    """The worst distance of all blocks together."""
    return max(
        abs(sum(answers[block, size] for block in range(len(blocks))) / sum(one.freed for one in blocks) - 1)
        for size, blocks in found.unseen.items()
    )


def _checks(result: Result) -> Iterator[Check]:
    for row in result.rows:
        name, paper = row["task"], row.get("paper_error")
        if row.get("sizes", EVEN) == EVEN and row["regressor"] == OURS:
            apart = row["allocator"]
            yield Check(what=f"{name}: estimates that are not exact to the byte", measured=row["inexact"])
            yield Check(what=f"{name}: distance from the allocator's bytes", measured=apart, at_most=row["at_most"])
        elif row.get("sizes") == COMING and paper is not None and row["regressor"] not in EXACT:
            yield Check(
                what=f"{name}: {row['regressor']}, {row['samples']} samples: of its error and the paper's the larger, "
                "times the smaller",
                measured=round(max(row["error"] / paper, paper / max(row["error"], 1e-9)), 3), at_most=WITHIN,
            )  # fmt: skip


TITLE: Final = "bytes of blocks at sizes that were not measured, from sizes that were (Mimose's Tables 3 and 4)"

COLUMNS: Final = (
    *columns.text(
        task="task", regressor="regressor", sizes="sizes", samples="samples", blocks="blocks", inexact="inexact"
    ),
    *columns.shown(
        "{:.2%}".format,
        error="error",
        paper_error="paper",
        least="least epoch",
        most="most",
        worst="at worst",
        allocator="from allocator",
    ),
    *columns.seconds(fit="fit", paper_fit="paper", predict="predict", paper_predict="paper"),
)

NOTES: Final = (
    "Lengths of the paper's ranges: QQP 30 to 332 (TC-Bert), SQuAD 153 to 512 (QA-Bert, QA-XLNet), SWAG 35 to 141 "
    "(MC-Roberta, four endings each). Even steps: those learned from are drawn evenly by chance, the others in even "
    "steps, both ends among them. As in an epoch: both are drawn from a bell whose three sigmas reach the ends; the "
    "median of 21 such epochs, and the least and the most of them: the paper has one. ResNet and Swin by pixels along "
    "a side. Models have the paper's width, the text ones 2 of their 12 layers, which are alike, and 1 or 2 samples "
    "for the paper's 12 to 32: bytes grow in proportion. ResNet-50 and Swin-T are half and a third as wide.",
    "Error: mean over all blocks and unseen sizes of the distance from what the engine counts, in each block's bytes. "
    "From allocator: all blocks together, the worst size, beside what torch's allocator got back as one block after "
    "the other was given up (torch.profiler, exact) and its result was still held: as in the paper, that is not the "
    "block's.",
    "Fit: all blocks together. Predict: one block at one size. Processor time, medians. The paper does not say how "
    "many fits its times are of; its GPU machine has another processor.",
    "SVR with sizes and bytes scaled to unit variance and C=100, otherwise and for the trees the defaults of "
    "scikit-learn; the paper's boosted trees are XGBoost's. The paper does not name the kernel of its SVR, whose error "
    "is that of a line and hardly falls with more samples, as a linear kernel's does here.",
)


def _words(name: str, batch: int, smallest: int, largest: int, *, width: int = 768, **more: Any) -> Task:
    options = {"layers": 2, "width": width, "batch": batch}
    return Task(name=name, options=options, smallest=smallest, largest=largest, at_most=0.005, **more)


BENCHMARK: Final = Benchmark(
    name="mimose_estimator",
    run=run,
    judge=_checks,
    full=Size(
        tasks=(
            _words("TC-Bert", 2, 30, 332, all_regressors=True), _words("QA-Bert", 2, 153, 512),
            _words("MC-Roberta", 1, 35, 141), _words("QA-XLNet", 1, 153, 512),
            Task(name="ResNet", options={"depths": (3, 4, 6, 3), "width": 32, "batch": 1}, smallest=97, largest=320,
                 at_most=0.01),
            Task(name="Swin", options={"depths": (2, 2, 6, 2), "width": 32, "batch": 1}, smallest=230, largest=512,
                 at_most=0.01),
        ),
        samples=10, more=50, unseen=8, epochs=21, asked=40, times=9,
    ),
    quick=Size(
        tasks=(
            _words("TC-Bert", 1, 12, 40, width=64, all_regressors=True),
            Task(name="ResNet", options={"depths": (1, 1), "width": 8, "batch": 1}, smallest=33, largest=97,
                 at_most=0.2),
        ),
        samples=10, more=12, unseen=3, epochs=2, asked=6, times=1,
    ),
)  # fmt: skip
