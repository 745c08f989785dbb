"""`spillway fit`: somebody's own script, unchanged, under a budget.

NOTE [As if python ran it]. The script is `__main__`, with its own `sys.argv` and its folder first on the path. Its
standard output is its own: what Spillway says goes to standard error. Its exceptions are shown as python shows them,
without the frames above it, and its exit code is the command's. So it is with a module (`-m`), whose folder is the one
in which it is run. Nothing of torch is imported before the script does, so that what it sets in the environment counts.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import io
import json as json_lines
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, final

import typer

from spillway.budgets import parse_budget
from spillway.cli.common import INTERRUPTED, Json, Method, Page, SpillDirectory, check_writable, naming
from spillway.errors import SpillwayError, UsageError, on_one_line
from spillway.methods import resolve
from spillway.report.figures import NO_BUDGET
from spillway.units import KiB, MiB, format_bytes, format_seconds

if TYPE_CHECKING:
    from spillway.integrations.found_training import FoundTraining, Trainer
    from spillway.ir import StepReport

TELLS: Final = 5
"""Steps after which is told how it goes."""
SHARES: Final = (0.8, 0.6, 0.4)
"""Of the plain peak: budgets that are worth a try."""
METHOD: Final = "auto"


def fit(
    *,
    script: Annotated[str, typer.Argument(help="A script that trains, as python takes it.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The script's own, options too.", show_default=False)
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Bytes, 6GiB, or 80% of the memory.", show_default="none: only watch")
    ] = None,
    method: Method = METHOD,
    spill_directory: SpillDirectory = None,
    output: Page = None,
    json: Json = False,
    module: Annotated[bool, typer.Option("-m", help="A module instead of a script, as python -m takes it.")] = False,
) -> None:
    """Run a script of yours, unchanged, under a budget: a loop by hand, or of a library's trainer.

    Options of Spillway stand before the script, the script's own after it. After a few steps, and at the end, it is
    told on standard error what left memory, what that costs, and the two lines that make it permanent; with --json one
    line of JSON there, at the end. Without --budget the training is only watched, and told is which budgets would work.
    The exit code is the script's. Under torchrun, and where Lightning starts the processes, each has the budget and the
    first tells, of its own steps.
    """
    resolve(method)
    if budget is not None:
        parse_budget(budget, NO_BUDGET)  # what makes no sense is refused before the script begins
    check_writable(output, read=[] if module else [script])
    program = None if module else _script(script)
    # Of the processes that torchrun or Lightning begins, one tells for all.
    first = all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK"))
    command = [*["-m"] * module, script, *(arguments or [])]
    told = _Told(script, shlex.join(command), budget=budget, method=method, silent=json or not first)
    code: str | int | None = 1
    refused: SpillwayError | None = None
    try:
        with ExitStack() as opened:
            _when_imported("torch", lambda _: told.watch(opened, spill_directory))
            for library in ("lightning.fabric", "lightning_fabric"):
                _when_imported(f"{library}.strategies.launchers.subprocess_script", _start_as_this)
            code = _run(program or _module(script), arguments or [])
    except SpillwayError as error:
        refused = error
    if first and output is not None and told.found is not None and told.found.session is not None:
        told.found.session.report(output)
    if json and first:
        besides = {"report": output and str(output), "refused": refused and on_one_line(str(refused))}
        print(json_lines.dumps(told.figures() | besides), file=sys.stderr)
    elif refused is not None:
        raise refused
    elif first:
        told.end()
    if code:
        sys.exit(code)


@final
class _Told:
    """What is said of a script's training, and when."""

    def __init__(self, script: str, command: str, *, budget: str | None, method: str, silent: bool) -> None:
        self.found: FoundTraining | None = None
        """None as long as the script has not imported torch."""
        self._script, self._command = script, command
        self._budget, self._method, self._silent = budget, method, silent
        self._smallest: int | None = None

    def watch(self, opened: ExitStack, spill_directory: Path | None) -> None:
        """From here on."""
        from spillway.integrations.found_training import FoundTraining
        from spillway.session import SpillOptions

        # Without a budget nothing is decided, and a method that knows no blocks keeps the most exact account.
        self.found = FoundTraining(
            self._step_ended, budget=self._budget, method="lru" if self._budget is None else self._method,
            spill=SpillOptions(directory=spill_directory),
        )  # fmt: skip
        opened.enter_context(self.found)

    def _step_ended(self, found: FoundTraining) -> None:
        if len(found.reports) == TELLS:
            self._smallest = found.smallest_budget() if self._budget is None else None
            if not self._silent:
                self._say(self._how(found.reports))

    def end(self) -> None:
        """Everything, when the script has ended."""
        found = self.found
        if found is None or not found.reports:
            updates = 0 if found is None else found.updates
            why = (
                f"{updates} updates of optimizers ran without a call of their module under gradients"
                if updates else "no optimizer has stepped in it"
            )  # fmt: skip
            self._say(f"{self._script} ended, and nothing was trained under a budget: {why}.")
            return
        if len(found.reports) != TELLS:
            self._say(self._how(found.reports))
        if self._budget is None:
            self._say(self._which(found.reports))
            return
        self._say("To make it permanent" + _PERMANENT[found.trainer or "a loop"][0] + ":")
        for line in self._lines():
            print(f"    {line}", file=sys.stderr)

    def figures(self) -> dict[str, Any]:
        """The same as one JSON document."""
        found = self.found
        reports = [] if found is None else found.reports
        return {
            "script": self._script, "found": None if found is None else found.trainer, "budget": self._budget,
            "budget_bytes": reports[-1].allowed if reports and self._budget is not None else None,
            "method": None if self._budget is None else self._method, "steps": len(reports),
            "updates": 0 if found is None else found.updates, **_sums(reports), "smallest_budget_bytes": self._smallest,
            "lines": self._lines() if reports and self._budget is not None else [],
        }  # fmt: skip

    def _how(self, reports: Sequence[StepReport]) -> str:
        sums, count, found = _sums(reports), len(reports), self.found
        assert found is not None
        steps = f"{count} step{'s' * (count != 1)} of {found.trainer}"
        if self._budget is None:
            return f"{steps} took at most {format_bytes(sums['peak_bytes'])}, without a budget."
        within = f"{steps} took at most {format_bytes(sums['peak_bytes'])} of {format_bytes(reports[-1].allowed)}"
        if not sums["left_bytes"]:
            return f"{within}: all of it fits, and nothing had to leave."
        cost = sums["stall_seconds"] + sums["recomputed_seconds"]
        return (
            f"{within}: a step let {format_bytes(sums['left_bytes'] // count)} leave memory, "
            f"{format_bytes(sums['bytes_out'] // count)} of it to the slower tier. That cost "
            f"{format_seconds(cost / count)} of its {format_seconds(sums['seconds'] / count)}: "
            f"{format_seconds(sums['stall_seconds'] / count)} waiting for copies, "
            f"{format_seconds(sums['recomputed_seconds'] / count)} recomputing."
        )

    def _which(self, reports: Sequence[StepReport]) -> str:
        peak = max(report.peak_bytes for report in reports)
        least = max(self._smallest or 0, 1)
        worth = [int(share * peak) for share in SHARES if share * peak >= least]
        tries = ", ".join(format_bytes(nbytes) for nbytes in worth)
        lowest = f"; less than {format_bytes(self._smallest)} is refused" if self._smallest else ""
        if not tries:
            return f"A smaller budget is hardly possible{lowest}."
        unit, name = (MiB, "MiB") if worth[-1] >= 100 * MiB else (KiB, "KiB")
        first = f"{-(-worth[-1] // unit)}{name}"  # not below what is refused
        return f"Budgets worth a try: {tries}{lowest}. Run: spillway fit --budget {first} {self._command}"

    def _lines(self) -> list[str]:
        found = self.found
        assert found is not None
        budget, method = json_lines.dumps(self._budget), json_lines.dumps(self._method)
        return [line.format(budget=budget, method=method) for line in _PERMANENT[found.trainer or "a loop"][1:]]

    def _say(self, text: str) -> None:
        print(on_one_line(f"spillway: {text}"), file=sys.stderr, flush=True)


_PERMANENT: Final[dict[Trainer, tuple[str, str, str]]] = {
    "transformers.Trainer": (
        ", give the trainer a callback",
        "from spillway.integrations.transformers import SpillwayCallback",
        "trainer = Trainer(..., callbacks=[SpillwayCallback({budget}, method={method})])",
    ),
    "lightning.Trainer": (
        ", give the trainer a callback",
        "from spillway.integrations.lightning import SpillwayCallback",
        "trainer = Trainer(..., callbacks=[SpillwayCallback({budget}, method={method})])",
    ),
    "Accelerate": (
        ", let Spillway prepare what the accelerator prepares",
        "from spillway.integrations.accelerate import prepare",
        "model, optimizer = prepare(accelerator, model, optimizer, budget={budget}, method={method})",
    ),
    "a loop": (
        ", put one line around the loop and one around a step of it, with its optimizer, after `import spillway`",
        "with spillway.manage(model, optimizer, budget={budget}, method={method}) as memory:",
        "    with memory.step(batch):",
    ),
}
"""What is to be said, and the two lines."""


def _sums(reports: Sequence[StepReport]) -> dict[str, Any]:
    return {
        "peak_bytes": max((report.peak_bytes for report in reports), default=0),
        "left_bytes": sum(report.bytes_out + report.dropped_bytes for report in reports),
        "bytes_out": sum(report.bytes_out for report in reports),
        "seconds": sum(report.seconds for report in reports),
        "stall_seconds": sum(report.stall_seconds for report in reports),
        "recomputed_seconds": sum(report.recomputed_seconds for report in reports),
    }


# ---------------------------------------------------------------------- as if python ran it


class _Program(NamedTuple):
    path: str
    """The file that it stands in, as its frames say."""
    folder: str
    """What is first on the path of imports."""
    called: str
    """What is first of its arguments."""
    code: CodeType | bytes
    names: Mapping[str, Any]
    """What `__main__` has from the beginning."""


def _script(script: str) -> _Program:
    path = os.path.abspath(script)
    with naming(Path(script)), io.open_code(script) as file:
        source = file.read()
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    names = {"__file__": path, "__loader__": loader, "__cached__": None}
    return _Program(path, os.path.dirname(os.path.realpath(script)), script, source, names)


def _module(name: str) -> _Program:
    """The module, or of a package its `__main__`. Packages around it are imported."""
    sys.path[0] = os.getcwd()
    try:
        spec = None if name.startswith(".") else importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    loader: Any = spec.loader if spec is not None else None
    code = loader.get_code(spec.name) if spec is not None and hasattr(loader, "get_code") else None
    if spec is None or code is None:
        raise UsageError(f"There is no module {name} to run: -m takes what python -m takes, in this folder.")
    path = spec.origin or name
    names = {"__file__": path, "__loader__": spec.loader, "__cached__": spec.cached, "__spec__": spec}
    return _Program(path, os.getcwd(), path, code, names | {"__package__": spec.parent})


def _run(program: _Program, arguments: Sequence[str]) -> str | int | None:
    """See NOTE [As if python ran it]. Returns what the script gave to `sys.exit`, 1 after an exception of its own.

    Raises SpillwayError for what Spillway refused, and KeyboardInterrupt never: it is told as python tells it.
    """
    main = ModuleType("__main__")
    vars(main).update({"__builtins__": __builtins__, **program.names})
    sys.modules["__main__"], sys.argv, sys.path[0] = main, [program.called, *arguments], program.folder
    try:
        source, path = program.code, program.path
        exec(source if isinstance(source, CodeType) else compile(source, path, "exec", dont_inherit=True), vars(main))
    except SystemExit as left:
        return left.code
    except SpillwayError:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != program.path:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return None


def _start_as_this(launchers: ModuleType) -> None:
    """Have Lightning start its other processes with the command of this one, where it would leave `fit` out."""
    vars(launchers)["_basic_subprocess_cmd"] = lambda: [sys.executable, *sys.orig_argv[1:]]


def _when_imported(name: str, call: Callable[[ModuleType], None]) -> None:
    """Call it with a module when that was imported for the first time; at once if it is there."""
    if name in sys.modules:
        call(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, call))


@final
class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as all others do, and calls something when it is there."""

    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self._name, self._call = name, call
        self._asks = False
        """Whether it asks all others."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """That of the module with a loader that calls afterwards; of others none. Many ask and do not import."""
        if fullname != self._name or self._asks:
            return None
        self._asks = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asks = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                self._call(module)

            vars(spec.loader)["exec_module"] = execute_and_call
        return spec
