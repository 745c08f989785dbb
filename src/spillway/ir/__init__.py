"""The nouns: a recorded step, a plan for it, what verifies it, and the timeline of what happened. No torch."""

from spillway.ir.files import RunFile, RunWriter, read_run
from spillway.ir.plan import Gap, Home, Host, Plan, Recompute
from spillway.ir.spans import Lane, Span, Transfers, Work
from spillway.ir.step import Op, Phase, Saving, Step, StorageId, StorageInfo, Value, ValueId
from spillway.ir.step_files import Recorded, read_step, write_step
from spillway.ir.step_report import BlocksAtPeak, HeldByBlock, StepReport
from spillway.ir.timeline import Change, Event, Kind, Origin, StorageLine, Timeline
from spillway.ir.verify import Rule, verify

__all__ = [
    "BlocksAtPeak",
    "Change",
    "Event",
    "Gap",
    "HeldByBlock",
    "Home",
    "Host",
    "Kind",
    "Lane",
    "Op",
    "Origin",
    "Phase",
    "Plan",
    "Recompute",
    "Recorded",
    "Rule",
    "RunFile",
    "RunWriter",
    "Saving",
    "Span",
    "Step",
    "StepReport",
    "StorageId",
    "StorageInfo",
    "StorageLine",
    "Timeline",
    "Transfers",
    "Value",
    "ValueId",
    "Work",
    "read_run",
    "read_step",
    "verify",
    "write_step",
]
