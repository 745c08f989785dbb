"""Dynamic workloads at the smallest sizes that are still dynamic, by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

SMALL_DYNAMIC: Final[Mapping[str, Mapping[str, Any]]] = {
    "tree-lstm": {"width": 8, "largest": 10},
    "tree-cnn": {"width": 8, "largest": 10, "cells": 4},
    "var-lstm": {"width": 8, "longest": 5},
    "var-bert": {"width": 8, "layers": 3, "heads": 2, "longest": 24, "rate": 1e-3},
    "moe": {"width": 8, "layers": 1, "experts": 3, "top": 1, "longest": 5},
    "unrolled-gan": {"width": 8, "batch": 8, "ahead": 3},
    "evoformer": {"single": 8, "pair": 8, "blocks": 1, "shortest": 4, "longest": 6, "recycles": 1},
}
