"""What could estimate a block's bytes: Mimose's own ways, and the regressors that its paper tried (section 6.5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy

from spillway.methods.mimose import BlockSample, Options, StepSample
from spillway.methods.mimose.planning import AbstractPlanning, PublishedPlanning, SimulatedPlanning
from spillway.units import Bytes

Samples: TypeAlias = Mapping[int, Sequence[Bytes]]
"""By size what each block saved."""
Predict: TypeAlias = Callable[[int, int], float]
"""Bytes of a block at a size."""
Fit: TypeAlias = Callable[[Samples], Predict]

OURS: Final = "exact laws, the default"
PUBLISHED: Final = "quadratic, as published"


def planned(kind: Callable[[Options], AbstractPlanning], options: Options, samples: Samples) -> Predict:
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

    def svr() -> Any:
        return TransformedTargetRegressor(make_pipeline(StandardScaler(), SVR(C=100.0)), transformer=StandardScaler())

    return {
        "SVR": partial(scikit, svr),
        "decision tree": partial(scikit, partial(DecisionTreeRegressor, random_state=0)),
        "gradient-boosted trees": partial(scikit, partial(GradientBoostingRegressor, random_state=0)),
    }
