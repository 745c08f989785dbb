"""Every method by the name that users write: what it is, and where it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias, final

from spillway.errors import UnknownMethodError
from spillway.methods.auto import Auto
from spillway.methods.auto.on_paper import AutoPlanner
from spillway.methods.base import AbstractPlanner, AbstractPolicy
from spillway.methods.by_block import AbstractBlockMethod
from spillway.methods.checkmate import Checkmate
from spillway.methods.checkpoint import Checkpoint, CheckpointPlanner
from spillway.methods.delta import Delta
from spillway.methods.dtr import DTR, HEURISTICS
from spillway.methods.dynn_offload import DynnOffload, DynnOffloadPlanner
from spillway.methods.keep_all import KeepAll
from spillway.methods.lms import LMS
from spillway.methods.lru import LRU
from spillway.methods.mimose import Mimose
from spillway.methods.mimose.planner import MimosePlanner
from spillway.methods.planned import SelfPlanned
from spillway.methods.sqrt_n import SqrtN
from spillway.methods.swap import Swap
from spillway.methods.uvm import UVM
from spillway.methods.window import Window
from spillway.methods.window.improved import ImprovedWindow
from spillway.methods.zero_offload import ZeroOffload
from spillway.units import Seconds

Runs: TypeAlias = Literal["tensor engine", "block engine"]


@final
@dataclass(frozen=True, slots=True)
class Method:
    """What stands behind a name.

    Arguments:
        on_paper: Makes what decides for a recorded step: a policy, which answers under pressure, or a planner.
        by_block: Makes what decides for the block engine, where the method runs there.
        in_session: Makes what decides in a session of the tensor engine, where that is not what decides on paper.
    """

    on_paper: Callable[..., AbstractPolicy | AbstractPlanner]
    by_block: Callable[[], AbstractBlockMethod] | None = None
    in_session: Callable[[], AbstractPolicy] | None = None

    @property
    def plans(self) -> bool:
        """Whether it decides before a recorded step, and not while it runs."""
        return isinstance(self.on_paper(), AbstractPlanner)

    @property
    def runs(self) -> Runs:
        """What carries it out in a session. What plans is shown steps that the session has recorded."""
        return "block engine" if self.by_block is not None else "tensor engine"


def _checkmate(time_limit: Seconds = 60.0) -> Checkmate:
    policies = (DTR.named(name) for name in ("dtr", "dtr-eqclass", "msps"))
    return Checkmate(time_limit, starts=(SqrtN, SqrtN.greedy, *policies))


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        AutoPlanner.name: Method(lambda: AutoPlanner((ImprovedWindow(), Window())), Auto),
        KeepAll.name: Method(KeepAll),
        LRU.name: Method(LRU),
        Delta.name: Method(Delta),
        "delta-published": Method(Delta.as_published),
        **{name: Method(DTR.named(name)) for name in HEURISTICS},
        SqrtN.name: Method(SqrtN),
        Checkmate.name: Method(_checkmate),
        Swap.name: Method(Swap),
        "swap-prefetch": Method(Swap.ahead),
        UVM.name: Method(UVM),
        ZeroOffload.name: Method(ZeroOffload),
        Window.name: Method(Window),
        "window-published": Method(Window.as_published),
        ImprovedWindow.name: Method(ImprovedWindow),
        DynnOffload.name: Method(DynnOffloadPlanner, in_session=DynnOffload),
        "dynn-offload-published": Method(DynnOffloadPlanner.as_published),
        LMS.name: Method(LMS),
        MimosePlanner.name: Method(MimosePlanner, Mimose),
        "mimose-published": Method(MimosePlanner.as_published, Mimose.as_published),
        Checkpoint.name: Method(CheckpointPlanner, Checkpoint),
    }
)


def resolve(
    method: str | AbstractPolicy | AbstractPlanner | AbstractBlockMethod,
) -> AbstractPolicy | AbstractBlockMethod:
    """What decides in a session, by its name; an object is taken as it is, and a planner follows its own plans. Raises
    UnknownMethodError if no method has that name."""
    if isinstance(method, str) and method in METHODS:
        found = METHODS[method]
        method = (found.by_block or found.in_session or found.on_paper)()
    if isinstance(method, AbstractPlanner):
        return SelfPlanned(method)
    if isinstance(method, AbstractPolicy | AbstractBlockMethod):
        return method
    raise UnknownMethodError(f"There is no method {method!r}; choose one of {', '.join(sorted(METHODS))}.")


def method_named(method: str) -> AbstractPolicy | AbstractPlanner:
    """What decides for a recorded step, by its name. Raises UnknownMethodError if no method has it."""
    if isinstance(method, str) and method in METHODS:
        return METHODS[method].on_paper()
    raise UnknownMethodError(f"There is no method {method!r}; choose one of {', '.join(sorted(METHODS))}.")
