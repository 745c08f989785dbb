"""What the terminal shows while processes run: a line with a bar for each."""

from __future__ import annotations

from types import TracebackType
from typing import Self, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from spillway.cli.common import say
from spillway.errors import SpillwayError
from spillway.report.figures import seconds_per_step
from spillway.subprocess_runs.run import Listener, RunRequest, RunResult, StepDone, run
from spillway.units import Seconds, format_seconds


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

    def run(self, task: TaskID, request: RunRequest) -> RunResult:
        """Do what was announced, and show how far it is. Raises what `spillway.subprocess_runs.run.run` raises."""
        self._progress.start_task(task)
        self._progress.update(task, note="starting")
        seconds: list[Seconds] = []

        def step(done: StepDone) -> None:
            seconds.append(done.seconds)
            self._progress.update(task, advance=1, note=f"{format_seconds(seconds_per_step(seconds))} a step")

        try:
            result = run(request, Listener(step=step, output=self.say))
        except SpillwayError:
            self._finish(task, "ended early")
            raise
        self._finish(task, f"{format_seconds(seconds_per_step(seconds))} a step")
        return result

    def _finish(self, task: TaskID, note: str) -> None:
        self._progress.update(task, note=note)
        self._progress.stop_task(task)
        if not self._console.is_terminal:
            done = self._progress.tasks[task]
            self.say(f"{done.description}: {done.completed:.0f} of {done.total:.0f} steps, {note}")

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        say(self._console, text)
