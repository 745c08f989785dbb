"""What the terminal shows while processes run: a line with a bar for each."""

from __future__ import annotations

from types import TracebackType
from typing import Self, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from spillway.report.figures import seconds_per_step
from spillway.runs.launch import Listener, run
from spillway.runs.records import RunRequest, RunResult, StepDone
from spillway.units import format_seconds


@final
class Board:
    """Runs processes one after another and shows how far each is; a context manager.

    Where the console is no terminal, it prints a plain line when a run is done.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(24),
            MofNCompleteColumn(),
            TextColumn("steps  {task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def announce(self, title: str, steps: int) -> TaskID:
        """Show a run that is still to come."""
        return self._progress.add_task(title, total=steps, start=False, note="")

    def run(self, title: str, request: RunRequest, *, announced: TaskID | None = None) -> RunResult:
        """Run it and show it. Raises what `spillway.runs.launch.run` raises."""
        task = self.announce(title, request.steps) if announced is None else announced
        self._progress.start_task(task)
        self._progress.update(task, note="starting")
        seconds: list[float] = []

        def step(done: StepDone) -> None:
            seconds.append(done.seconds)
            self._progress.update(task, advance=1, note=f"{format_seconds(seconds_per_step(seconds))} a step")

        result = run(request, Listener(step=step, output=self.say))
        if not self._console.is_terminal:
            self.say(f"{title}: {len(seconds)} steps, {format_seconds(seconds_per_step(seconds))} a step")
        return result

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
