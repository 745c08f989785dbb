"""PAPAYA: which method pays, at which batch size; from measurements, without torch."""

from spillway.advisor.fits import Line, fit_knee, fit_line
from spillway.advisor.gains import Crossover, Sweep, SweepPoint, crossover, measured_crossover, over_devices, sweeps_of
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
    "Crossover",
    "Experiment",
    "Line",
    "Row",
    "Samples",
    "Sweep",
    "SweepPoint",
    "advise",
    "crossover",
    "default_limit",
    "fit_knee",
    "fit_line",
    "measured_crossover",
    "over_devices",
    "pays",
    "pays_by_score",
    "pays_with_fragments",
    "point",
    "read_measurements",
    "score",
    "sentence",
    "sweeps_of",
]
