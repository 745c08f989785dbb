from __future__ import annotations

from typing import Any

import typer.main
from typer import Typer

from spillway.cli import app

# What can be left out stands in brackets. Scripts rely on every word here: a change is a decision, and goes into
# CHANGELOG.md.
COMMAND_LINE = {
    "": ["[--version]"],
    "demo": [
        "[--steps]",
        "[--budgets]",
        "[--method]",
        "[--spill-directory]",
        "[--seed]",
        "[--output/-o]",
        "[--json]",
    ],
    "train": [
        "WORKLOAD",
        "--budget",
        "[--method]",
        "[--steps]",
        "[--spill-directory]",
        "[--spill-io]",
        "[--return-freed/--keep-freed]",
        "[--run-file]",
        "[--output/-o]",
        "[--plain-check/--no-plain-check]",
        "[--seed]",
        "[--json]",
    ],
    "fit": [
        "SCRIPT",
        "[ARGUMENTS]",
        "[--budget]",
        "[--method]",
        "[--spill-directory]",
        "[--output/-o]",
        "[--json]",
        "[-m]",
    ],
    "record": [
        "WORKLOAD",
        "--output/-o",
        "[--fake]",
        "[--batch]",
        "[--length]",
        "[--timed-steps]",
        "[--seed]",
        "[--json]",
    ],
    "simulate": [
        "STEP",
        "--budget",
        "[--method]",
        "[--device]",
        "[--allocator]",
        "[--limit]",
        "[--tier]",
        "[--measured]",
        "[--steps]",
        "[--run-file/-o]",
        "[--json]",
    ],
    "compare": [
        "STEP",
        "[--budgets]",
        "[--methods]",
        "[--device]",
        "[--plan-seconds]",
        "[--bounds/--no-bounds]",
        "[--processes]",
        "[--output/-o]",
        "[--png]",
        "[--json]",
    ],
    "report": ["RUN", "[--output/-o]", "[--perfetto]", "[--json]"],
    "plan": ["STEP", "--budget", "--method", "[--device]", "[--output/-o]", "[--json]"],
    "advise": [
        "[WORKLOAD]",
        "[--from]",
        "[--methods]",
        "[--memory]",
        "[--device]",
        "[--simulate]",
        "[--batches]",
        "[--seconds]",
        "[--length]",
        "[--layers]",
        "[--width]",
        "[--lossless]",
        "[--verify]",
        "[--fresh]",
        "[--write]",
        "[--small-batches]",
        "[--devices]",
        "[--gradients]",
        "[--link]",
        "[--latency]",
        "[--output/-o]",
        "[--seed]",
        "[--json]",
    ],
    "pilot record": [
        "WORKLOAD",
        "--output/-o",
        "[--steps]",
        "[--frozen]",
        "[--seed]",
        "[--json]",
    ],
    "pilot train": [
        "SAMPLES",
        "--output/-o",
        "[--pilot]",
        "[--width]",
        "[--epochs]",
        "[--budget]",
        "[--device]",
        "[--room]",
        "[--seed]",
        "[--json]",
    ],
    "pilot show": [
        "PILOT",
        "[--samples]",
        "[--device]",
        "[--room]",
        "[--architecture]",
        "[--json]",
    ],
    "build": ["[--json]"],
    "calibrate": ["[--output/-o]", "[--sizes]", "[--spill-directory]", "[--json]"],
    "doctor": ["[--spill-directory]", "[--measure/--no-measure]", "[--json]"],
}


def command_line(application: Typer) -> dict[str, list[str]]:
    """Every verb with its arguments and options, one of a group behind the group's name; what stands before a verb is
    under the empty name."""
    # Read from the commands and not from their help, which is wrapped to the width of a terminal.
    group = typer.main.get_command(application)
    verbs = {"": group}
    for name, verb in getattr(group, "commands", {}).items():
        inner = getattr(verb, "commands", None)
        verbs |= {name: verb} if inner is None else {f"{name} {word}": one for word, one in inner.items()}
    return {name: [_written(parameter) for parameter in verb.params] for name, verb in verbs.items()}


def _written(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        spelled = parameter.name.upper()
    else:
        spelled = "/".join([*parameter.opts, *parameter.secondary_opts])
    return spelled if parameter.required else f"[{spelled}]"


def test_the_verbs_and_their_options_are_these() -> None:
    assert command_line(app) == COMMAND_LINE


def test_every_verb_can_answer_a_program() -> None:
    # `--json` on every verb is a promise of the command line, for the verbs to come as well.
    assert [verb for verb, words in command_line(app).items() if verb and "[--json]" not in words] == []


def test_what_is_written_is_written_where_o_says() -> None:
    written = {
        "demo",
        "train",
        "fit",
        "record",
        "simulate",
        "compare",
        "report",
        "plan",
        "advise",
        "calibrate",
        "pilot record",
        "pilot train",
    }
    short = {verb for verb, words in command_line(app).items() if any("/-o" in word for word in words)}
    assert short == written


def test_help_lists_workloads_methods_and_planners() -> None:
    group: Any = typer.main.get_command(app)
    for listed in ("deep-narrow", "mimose-published", "Planners among them: auto"):
        assert listed in group.epilog
    helps = {verb: " ".join(str(one.help) for one in command.params) for verb, command in group.commands.items()}
    assert "stdlib-lm" in helps["train"]
    assert "stdlib-lm" in helps["advise"]
    assert "mimose-published" in helps["simulate"]
    assert "checkmate" in helps["plan"]
    assert "delta" not in helps["plan"]
