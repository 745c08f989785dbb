"""Every error that Spillway raises on purpose.

SpillwayError
 +- UsageError (also a ValueError)     something given to Spillway does not make sense; nothing was changed
 |   +- BudgetError                    a budget that cannot be read, is not positive, or exceeds the device
 |   +- UnknownMethodError             no method has this name
 |   +- SessionError                   a session used out of turn: a step inside a step, a call after close
 |   +- ModelError                     a model that one session cannot manage: two devices, nothing to train
 |   |   +- NoBlocksError              no blocks were found in the model
 |   +- WorkloadError                  a workload that cannot be found or does not offer what a run needs
 +- BudgetInfeasible                   the step cannot run under its budget; carries the budget to ask for instead
 +- SpillError                         the place where absent bytes wait cannot be used
 |   +- SpillDirectoryError            the directory is missing or not writable
 |   +- SpillFullError                 no room is left for another storage
 |   +- SpillBusyError                 the workers have enough to copy; what was to be copied early stays for now
 |   +- SpillCorruptedError            bytes came back that are not the bytes that went out
 +- RecomputeError                     a block cannot run a second time as it ran the first time
 +- DeviceFullError                    the device has no memory for an op although all that may leave has left
 +- TrialError                         a step to be measured that failed; at another batch size it may not
 +- PlanRejected                       a plan that could not run; names the rule that it breaks
 +- NoPlanFound                        a planner ran out of time before it had any plan
 +- FileFormatError                    a file that Spillway cannot read: foreign, newer, or damaged
 +- NativeError                        the native part cannot be built or loaded; sessions run without it
 +- EngineError                        an invariant of the engine is broken: a bug in Spillway

The command line prints the sentence of a SpillwayError, and where the documents say what to do, and exits with 1. A
traceback of anything else is a bug.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Final, Self

from spillway.units import format_bytes

SITE: Final = ""
"""The address of the documentation site, with a slash at its end; empty as long as it has none. Errors link there, and
the site is built with it."""


def on_one_line(text: str) -> str:
    """The text with everything escaped that would move a terminal's cursor, as what is quoted from a file may."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


class SpillwayError(Exception):
    """Base of every error of this package. Its text is one sentence, ready to be shown to a user. Each class below has
    a place in `errors.md` beside this module; where that is stands as a note under the sentence in tracebacks."""

    rank: int | None = None
    """The process of a group that has stopped all of them with it; None of what concerns one process."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        # And not in `__init__`, which does not run where an error comes from another process.
        made = super().__new__(cls, *args)
        if page := made.page:
            made.add_note(f"What to do: {page}")
        return made

    @property
    def page(self) -> str | None:
        """Where it is said what to do: an address or, as long as the site has none, a heading of a file that is
        installed with this module. None of the two bases themselves, whose sentence says all there is."""
        kind = next(one for one in type(self).__mro__ if one.__module__ == __name__)  # of a user's own class, its base
        if kind in (SpillwayError, UsageError):
            return None
        return (f"{SITE}errors/" if SITE else f"{Path(__file__).with_suffix('.md')}") + f"#{kind.__name__.lower()}"

    def __reduce__(self) -> tuple[object, ...]:
        # The default calls the class with `args` alone, which loses keyword-only arguments between processes.
        return _restored, (type(self), self.args, dict(self.__dict__))


def _restored(kind: type[SpillwayError], args: tuple[object, ...], attributes: dict[str, object]) -> SpillwayError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


def pass_notes(error: BaseException, told: BaseException) -> None:
    """Of an error that is told as another, which may be the same: notes that this does not have."""
    there = getattr(told, "__notes__", ())
    for note in [one for one in getattr(error, "__notes__", ()) if one not in there]:
        told.add_note(note)


class UsageError(SpillwayError, ValueError):
    """Something that was given to Spillway does not make sense."""


class BudgetError(UsageError):
    """A budget that cannot be read, is not positive, or exceeds the device."""


class UnknownMethodError(UsageError):
    """No method has this name."""


class SessionError(UsageError):
    """A session used out of turn: a step entered twice, a call after close."""


class ModelError(UsageError):
    """A model or optimizer that one session cannot manage, as when its parameters lie on two devices."""


class NoBlocksError(ModelError):
    """A model in which no blocks were found."""

    reason: str
    """A clause without a full stop."""

    def __init__(self, sentence: str, *, reason: str) -> None:
        super().__init__(sentence)
        self.reason = reason


class WorkloadError(UsageError):
    """A workload that cannot be found or does not offer what a run needs."""


class BudgetInfeasible(SpillwayError):
    """The step cannot run under its budget, whatever leaves memory.

    Nothing is lost: model and optimizer are as plain PyTorch leaves them when an op raises.
    """

    needed: int
    """Bytes that have to be resident at once for the op to run."""
    allowed: int
    """The budget, in bytes."""
    op: str
    """Name of the op that does not fit."""
    op_index: int
    """Number of that op within its step, from 0."""
    smallest_budget: int
    """Bytes: the smallest budget that is expected to work; if not `exact`, what the ops that ran would have needed."""
    exact: bool
    """Whether the rest of the step was looked at too, on tensors without content; its ops may still differ."""

    def __init__(self, *, needed: int, allowed: int, op: str, op_index: int, smallest_budget: int, exact: bool) -> None:
        bound = f"{smallest_budget} bytes ({format_bytes(smallest_budget)})"
        answer = f"the smallest budget that should work is {bound}" if exact else f"it takes {bound} or more"
        super().__init__(
            f"Op {op_index} ({op}) needs {format_bytes(needed)} in memory at once and {format_bytes(allowed)} are "
            f"allowed: {answer}."
        )
        self.needed = needed
        self.allowed = allowed
        self.op = op
        self.op_index = op_index
        self.smallest_budget = smallest_budget
        self.exact = exact


class SpillError(SpillwayError):
    """The place where absent bytes wait cannot be used."""


class SpillDirectoryError(SpillError):
    """The spill directory is missing or not writable."""


class SpillFullError(SpillError):
    """No room is left where absent bytes wait."""


class SpillBusyError(SpillError):
    """The workers have enough to copy: what was to be copied early stays where it is for now."""


class SpillCorruptedError(SpillError):
    """Bytes came back that are not the bytes that went out."""


class RecomputeError(SpillwayError):
    """A block cannot run a second time as it ran the first time, or did not."""

    once = False
    """Whether the next step does it in another way, so that it does not happen again."""


class DeviceFullError(SpillwayError):
    """The device has no memory for an op, under its budget or not, although all that may leave has left."""


class TrialError(SpillwayError):
    """A step that was to be measured failed. At another batch size it may not."""


class PlanRejected(SpillwayError):
    """A plan that could not run. Its `reason` is a clause without a full stop."""

    rule: str
    """The rule of the verifier that the plan breaks."""

    def __init__(self, reason: str, *, rule: str) -> None:
        super().__init__(f"The plan breaks the rule {rule}: {reason}.")
        self.rule = rule


class NoPlanFound(SpillwayError):
    """A planner ran out of time before it had any plan. Whether there is one is not known."""


class FileFormatError(SpillwayError):
    """A file that Spillway cannot read: foreign, newer, or damaged. Its `reason` is a clause without a full stop."""

    path: Path
    line: int
    """Line of the fault, from 1."""

    def __init__(self, reason: str, *, path: str | PathLike[str], line: int) -> None:
        super().__init__(on_one_line(f"{path}, line {line}: {reason}."))
        self.path = Path(path)
        self.line = line


class NativeError(SpillwayError):
    """The native part cannot be built or loaded."""


class EngineError(SpillwayError):
    """An invariant of the engine is broken: a bug in Spillway, never the user's fault. `broken` is a whole sentence."""

    def __init__(self, broken: str) -> None:
        super().__init__(f"{broken} This is a bug in Spillway: please report it, with the run file if there is one.")
