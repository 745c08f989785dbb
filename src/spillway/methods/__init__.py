"""Published ways to decide, one file each. No torch here."""

from __future__ import annotations

from spillway.methods.actions import Action
from spillway.methods.base import (
    AbstractPlanner,
    AbstractPolicy,
    Candidate,
    Copy,
    Drop,
    Evicted,
    Fetch,
    MemoryView,
    Move,
    Problem,
    Proposal,
    Recall,
    Restore,
)
from spillway.methods.by_block import AbstractBlockMethod
from spillway.methods.checkmate import Checkmate
from spillway.methods.checkpoint import Checkpoint
from spillway.methods.delta import Delta
from spillway.methods.dtr import DTR
from spillway.methods.dynn_offload import DynnOffload
from spillway.methods.keep_all import KeepAll
from spillway.methods.lms import LMS
from spillway.methods.lru import LRU
from spillway.methods.mimose import Mimose
from spillway.methods.planned import Planned
from spillway.methods.registry import METHODS, Method, method_named, resolve
from spillway.methods.sqrt_n import SqrtN
from spillway.methods.swap import Swap
from spillway.methods.uvm import UVM
from spillway.methods.window import Window
from spillway.methods.window.improved import ImprovedWindow
from spillway.methods.zero_offload import ZeroOffload

__all__ = [
    "DTR",
    "LMS",
    "LRU",
    "METHODS",
    "UVM",
    "AbstractBlockMethod",
    "AbstractPlanner",
    "AbstractPolicy",
    "Action",
    "Candidate",
    "Checkmate",
    "Checkpoint",
    "Copy",
    "Delta",
    "Drop",
    "DynnOffload",
    "Evicted",
    "Fetch",
    "ImprovedWindow",
    "KeepAll",
    "MemoryView",
    "Method",
    "Mimose",
    "Move",
    "Planned",
    "Problem",
    "Proposal",
    "Recall",
    "Restore",
    "SqrtN",
    "Swap",
    "Window",
    "ZeroOffload",
    "method_named",
    "resolve",
]
