"""PAPAYA: which method pays, at which batch size; from measurements, without torch."""

from spillway.advisor.fits import Line, fit_knee, fit_line
from spillway.advisor.measurements import Experiment, Samples, read_measurements
from spillway.advisor.model import (
    Cost,
    pays,
    pays_by_score,
    pays_with_fragments,
    point,
    score,
)
from spillway.advisor.verdict import Row, advise, default_limit, sentence

__all__ = [
    "Cost",
    "Experiment",
    "Line",
    "Row",
    "Samples",
    "advise",
    "default_limit",
    "fit_knee",
    "fit_line",
    "pays",
    "pays_by_score",
    "pays_with_fragments",
    "point",
    "read_measurements",
    "score",
    "sentence",
]
