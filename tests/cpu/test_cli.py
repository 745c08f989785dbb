"""The command line: one sentence for what cannot be, one JSON document for programs, no process left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from spillway import __version__, manage, workloads
from spillway.advisor.real import RealBench
from spillway.cli import common, demo, main
from spillway.errors import WorkloadError
from spillway.ir import RunWriter, read_run
from spillway.tiers.disk import DiskTier
from tests.shared import HANGS, without_page

WORKLOADS = """
import dataclasses, os, signal, time
import torch
from torch.nn import functional as F
from spillway.workloads import Workload, seed_everything


def small(seed, loss=None):
    print("built")
    seed_everything(seed)
    layers = [torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.GELU(), torch.nn.Dropout(0.1)) for _ in range(8)]
    model = torch.nn.Sequential(*layers)
    return Workload(
        name="small",
        model=model,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),),
        batches=batches,
        loss=loss or (lambda model, batch: model(batch[0]).square().mean()),
    )


def blocks(seed):
    seed_everything(seed)
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return Workload(
        name="blocks",
        model=model,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),),
        batches=lambda steps: ((torch.full((4, 64 + 16 * (step % 5), 32), 0.1),) for step in range(steps)),
        loss=lambda model, batch: model(batch[0]).square().mean(),
    )


def batches(steps):
    for step in range(steps):
        yield (torch.full((200 + 8 * (step % 3), 128), 0.01 * (step + 1)),)


def changing(seed):
    # Not twice the same: the sentence of --plain-check is for this.
    return small(seed, lambda model, batch: model(batch[0]).square().mean() * (os.getpid() % 1000003))


def crashing(seed, batch=8):
    return small(seed, lambda model, batch: model(batch[0]).no_such_name)  # here


def growing(seed, batch=8):
    def batches(steps):
        return ((torch.ones(64 * batch, 128),) for _ in range(steps))
    return dataclasses.replace(small(seed), batches=batches, size=batch)


def killed(seed):
    return small(seed, lambda model, batch: os.kill(os.getpid(), signal.SIGKILL))


def endless(seed):
    def loss(model, batch):
        with open("pid", "w") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(600)

    return small(seed, loss)


def slow(seed):
    def loss(model, batch):
        with open("pid", "w") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(0.02)
        return model(batch[0]).square().mean()

    return small(seed, loss)


def without_batches(seed):
    return dataclasses.replace(small(seed), batches=lambda steps: iter(()))

"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a command left behind."""

    code: object
    out: str
    err: str


Command = Callable[..., Ended]


@pytest.fixture
def spillway(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command in an empty folder that holds the workloads above."""
    (tmp_path / "workloads.py").write_text(WORKLOADS)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Ended:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        written = capsys.readouterr()
        return Ended(code=ended.value.code, out=written.out, err=written.err)

    return run


def sentence(ended: Ended) -> str:
    """The one line of an expected failure."""
    assert (ended.code, ended.out) == (1, "")
    assert "Traceback" not in ended.err
    last = without_page(ended.err)[-1]
    assert re.fullmatch(r"spillway: .+\.", last)
    return last.removeprefix("spillway: ")


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("12 apples", "'12 apples' is not a number of bytes; write for example '6GiB' or '500 MB'."),
        ("0", "A budget has to be more than 0 bytes, and '0' is not."),
        ("-5MiB", "A number of bytes cannot be negative, as '-5MiB' is."),
        ("5000 TiB", "A budget of '5000 TiB' is more than the "),
        ("101%", "A share of the device's memory is more than 0 and at most 100%, and '101%' is not."),
        (
            "0.5x",
            "'0.5x' is a share of the plain peak, which nobody knows here; write bytes, as '6GiB', or a share of the "
            "memory, as '50%'.",
        ),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused_before_anything_runs(
    spillway: Command, budget: str, expected: str
) -> None:
    assert sentence(spillway("train", "small", "--budget", budget)).startswith(expected)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("12 apples", "'12 apples' is no budget; write for example '0.5x' (of the plain peak), '80%' (of the device's"),
        ("0", "A share of the plain peak is more than 0 and at most 1, and '0' is not."),
        ("5000 TiB", "A budget of '5000 TiB' is more than the "),
        ("101%", "A share of the device's memory is more than 0 and at most 100%, and '101%' is not."),
    ],
)
def test_budgets_of_the_demo_may_be_shares_of_its_plain_peak(spillway: Command, budget: str, expected: str) -> None:
    assert sentence(spillway("demo", "--budgets", f"0.7x,{budget}")).startswith(expected)


def test_help_knows_every_workload() -> None:
    assert tuple(workloads.WORKLOADS) == common.WORKLOADS


def test_a_percentage_of_a_device_is_said_to_be_one(spillway: Command) -> None:
    assert spillway("record", "workloads.py:small", "-o", "step.jsonl").code == 0
    ended = spillway("simulate", "step.jsonl", "--budget", "50%", "--json")
    assert json.loads(ended.out)["budget_bytes"] == 40 << 30
    assert ended.err.splitlines() == [
        "50%: percentages are of the 80.00 GiB of a100; a share of the plain peak is written with an x, as 0.5x."
    ]
    assert spillway("simulate", "step.jsonl", "--budget", "0.5x", "--json").err == ""
    (refused,) = without_page(spillway("simulate", "step.jsonl", "--budget", "150%").err)
    assert refused == "spillway: A share of the device's memory is more than 0 and at most 100%, and '150%' is not."


@pytest.mark.long
def test_half_is_half_of_the_device_in_every_verb_and_on_the_cpu_of_what_this_process_may_use(
    spillway: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("engines.tensors.devices", "cli.train", "cli.demo", "cli.advise"):
        monkeypatch.setattr(f"spillway.{module}.usable_memory", lambda: 2 << 30)
    assert spillway("record", "workloads.py:small", "-o", "step.jsonl").code == 0
    for words in (
        ("simulate", "step.jsonl", "--budget", "50%"),
        ("plan", "step.jsonl", "--budget", "50%", "--method", "sqrt-n"),
        ("compare", "step.jsonl", "--budgets", "50%", "--methods", "lru", "--processes", "1", "--no-bounds"),
    ):
        assert f'"budget_bytes": {40 << 30},' in spillway(*words, "--device", "a100", "--json").out
    simulated = ("--simulate", "a100", "--methods", "checkpoint", "--batches", "1,2,3,4")
    advised = spillway("advise", "workloads.py:growing", "--memory", "50%", *simulated, "--json")
    assert f'"limit_bytes": {40 << 30},' in advised.out
    trained = spillway("train", "workloads.py:small", "--budget", "50%", "--steps", "1", "--json")
    assert f'"budget_bytes": {1 << 30},' in trained.out
    with manage(nn.Linear(2, 2), budget="50%") as memory:  # as `spillway fit` hands it on
        assert memory.allowed == 1 << 30
    for words in (("demo", "--budgets", "3GiB"), ("train", "workloads.py:small", "--budget", "3GiB")):
        assert sentence(spillway(*words)) == "A budget of '3GiB' is more than the 2.00 GiB that the device has."


@pytest.mark.parametrize("command", [("train", "small", "--budget", "1MiB"), ("demo",)])
def test_a_method_that_nobody_knows_is_refused_with_those_that_exist(
    spillway: Command, command: tuple[str, ...]
) -> None:
    assert sentence(spillway(*command, "--method", "nope")) == (
        "There is no method 'nope'; choose one of auto, checkmate, checkpoint, delta, delta-published, dtr, "
        "dtr-eqclass, dtr-local, dynn-offload, dynn-offload-published, keep-all, largest, lms, lru, mimose, "
        "mimose-published, msps, sqrt-n, swap, swap-prefetch, uvm, window, window-improved, window-published, "
        "zero-offload."
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        (
            "nope",
            "There is no workload 'nope'; choose one of bert-base, bert-large, bert-small, deep-narrow, evoformer, "
            "gpt-small, gpt2, moe, resnet, resnet50, stdlib-lm, swin, t5, tree-cnn, tree-lstm, unrolled-gan, "
            "var-bert, var-lstm, vit-small, or write",
        ),
        ("workloads.py:nope", "workloads.py has no function 'nope'."),
        ("workloads.py:without_batches", "The workload workloads.py:without_batches has no batches."),
    ],
)
def test_a_workload_that_is_none_is_refused(spillway: Command, workload: str, expected: str) -> None:
    assert sentence(spillway("train", workload, "--budget", "1MiB", "--steps", 1)).startswith(expected)


@pytest.mark.long
def test_a_spill_directory_that_cannot_be_used_is_refused(spillway: Command) -> None:
    command = ("train", "workloads.py:small", "--budget", "1MiB", "--spill-directory", "workloads.py/inside")
    assert "The spill directory workloads.py/inside cannot be used" in sentence(spillway(*command))


@pytest.mark.parametrize("option", ["--output", "--run-file"])
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("missing/page.html", "missing/page.html cannot be written: there is no directory missing."),
        (".", ". is a directory and cannot be written as a file."),
        ("x" * 300, "x" * 300 + " cannot be written: File name too long."),
    ],
)
def test_a_file_that_could_not_be_written_is_refused_before_anything_runs(
    spillway: Command, option: str, path: str, reason: str
) -> None:
    assert sentence(spillway("train", "small", "--budget", "1MiB", option, path)) == reason


def test_a_place_that_takes_no_files_is_refused_before_anything_runs(spillway: Command) -> None:
    ended = spillway("demo", "--output", "/proc/page.html")
    assert sentence(ended).startswith("/proc/page.html cannot be written: ")
    assert "steps" not in ended.err


def test_a_file_that_may_be_written_is_not_there_before_it_is(spillway: Command, tmp_path: Path) -> None:
    common.check_writable(tmp_path / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["workloads.py"]


@pytest.mark.parametrize(
    "command",
    [
        "simulate a.jsonl --budget 0.5x -o a.jsonl", "simulate a.jsonl --budget 0.5x --device b.json -o b.json",
        "plan a.jsonl --budget 0.5x --method swap -o a.jsonl", "compare a.jsonl -o a.jsonl",
        "compare logs.zip:unet --png logs.zip", "compare a.jsonl -o new --png new", "advise --from m.csv -o m.csv",
        "advise a.py:build --write a.py", "train a.py:build --budget none --run-file a.py",
        "train stdlib-lm --budget none --run-file new --output new", "record a.py:build -o a.py", "fit -o a.py a.py",
        "pilot train samples.gz -o samples.gz", "pilot record a.py:build -o a.py",
    ],
)  # fmt: skip
def test_no_verb_replaces_what_it_reads_or_writes_besides(spillway: Command, command: str) -> None:
    for name in ("a.jsonl", "b.json", "a.py", "m.csv", "logs.zip", "samples.gz"):
        Path(name).write_text("hours of work")
    assert " cannot be written: this command " in sentence(spillway(*command.split()))
    assert all(path.read_text() == "hours of work" for path in Path().glob("[abmls]*.[jpcgz]*"))
    assert not Path("new").exists()


def test_a_place_that_leads_nowhere_is_told_in_a_sentence(spillway: Command) -> None:
    Path("loop").symlink_to("loop")
    assert sentence(spillway("report", "loop")) == "loop: Too many levels of symbolic links."
    with pytest.raises(WorkloadError, match=r"no file ~nobody/x.py"):
        workloads.get("~nobody/x.py:f")
    assert RealBench("~nobody/x.py:f", options={}, seed=0, output=print).key()["file"] == ""


MEASURED = """hardware,network,algorithm,batch_size,batch_time_s,peak_mb
a card,net,exact,2,0.22,1400
a card,net,exact,4,0.24,1800
a card,net,exact,8,0.28,2600
a card,net,exact,16,0.36,4200
a card,net,ckpt,2,0.23,1080
a card,net,ckpt,4,0.25,1160
a card,net,ckpt,8,0.31,1320
a card,net,ckpt,16,0.41,1640
"""


@pytest.mark.long(but=2)
@pytest.mark.parametrize(
    ("command", "to", "code", "said"),
    [
        ("advise --from m.csv", ">/dev/full", 1, "Standard output cannot be written: No space left on device."),
        ("advise --from m.csv --json", ">/dev/full", 1, "Standard output cannot be written: No space left on device."),
        ("--help", ">/dev/full", 1, "Standard output cannot be written: No space left on device."),
        ("advise --from m.csv", ">&-", 0, ""),
        ("advise --from m.csv --json", ">&-", 0, ""),
        ("advise --from m.csv", "| true", 1, ""),
        ("advise --from m.csv", "<&-", 0, ""),
        ("advise --from none.csv", ">&- 2>&-", 1, ""),
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_standard_output_that_takes_nothing_ends_a_verb_without_a_traceback(
    tmp_path: Path, command: str, to: str, code: int, said: str, unbuffered: str
) -> None:
    (tmp_path / "m.csv").write_text(MEASURED)
    words = f"set -o pipefail; '{sys.executable}' -m spillway {command} {to}"
    ended = subprocess.run(
        ["bash", "-c", words], cwd=tmp_path, env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=HANGS,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (code, f"spillway: {said}\n" if said else "")


def test_a_budget_too_small_is_refused_with_a_larger_one(spillway: Command) -> None:
    refusal = sentence(spillway("train", "workloads.py:small", "--budget", "100 kB", "--steps", 2))
    assert re.search(r"needs .* in memory at once and 97\.66 KiB are allowed: .* \d+ bytes", refusal)


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    "command",
    [
        ("train", "--budget", "1MiB"), ("record", "-o", "a.step"), ("record", "-o", "a.step", "--fake"),
        ("advise", "--batches", "2,4"), ("advise", "--simulate", "a100"),
    ],
)  # fmt: skip
def test_what_a_workload_raises_is_told_in_a_sentence_with_its_line(
    spillway: Command, command: tuple[str, ...]
) -> None:
    said = sentence(spillway(command[0], "workloads.py:crashing", *command[1:]))
    line = WORKLOADS.splitlines().index(next(one for one in WORKLOADS.splitlines() if one.endswith("# here"))) + 1
    raised = r"AttributeError: '(Fake)?Tensor' object has no attribute 'no_such_name'"
    assert re.search(rf" raised {raised} \(\S*workloads\.py, line {line}\)", said), said


@pytest.mark.long
def test_a_run_that_the_system_kills_is_told_in_a_sentence(spillway: Command) -> None:
    assert sentence(spillway("train", "workloads.py:killed", "--budget", "1MiB")) == (
        "The process of the run ended after 0 steps: it was killed, as the system does when memory runs out."
    )


@pytest.mark.parametrize("command", [("nope",), ("train",), ("demo", "--steps", "0"), ("report", "a", "b"), ()])
def test_a_wrong_command_line_exits_with_2(spillway: Command, command: tuple[str, ...]) -> None:
    ended = spillway(*command)
    assert (ended.code, "Traceback" in ended.err) == (2, False)


def test_the_version_is_printed(spillway: Command) -> None:
    assert spillway("--version") == Ended(code=0, out=f"spillway {__version__}\n", err="")


def trained(spillway: Command, *options: object) -> dict[str, Any]:
    ended = spillway("train", "workloads.py:small", "--steps", 4, "--json", *options)
    assert ended.code == 0, ended.err
    assert "built" in ended.err.splitlines()
    document: dict[str, Any] = json.loads(ended.out)
    return document


@pytest.mark.long
def test_a_users_workload_trains_under_a_budget_bit_for_bit_as_without(spillway: Command) -> None:
    document = trained(
        spillway, "--budget", "1MiB", "--method", "lru", "--plain-check", "--run-file", "run.jsonl",
        "--output", "page.html",
    )  # fmt: skip
    assert document["identical"] is True
    assert document["first_difference"] is None
    assert 0 < document["peak_bytes"] <= document["budget_bytes"] == 2**20
    assert document["bytes_to_disk"] + document["recomputed_ops"] > 0
    assert (document["steps"], len(document["losses"])) == (4, 4)
    assert (document["run_file"], document["report"]) == ("run.jsonl", "page.html")
    run = read_run("run.jsonl")
    assert [step.logged["loss"] for step in run.steps] == document["losses"]
    assert "Memory over the time of step" in Path("page.html").read_text("utf-8")
    traced = spillway("report", "run.jsonl", "--output", "again.html", "--perfetto", "trace.json", "--json")
    figures = json.loads(traced.out)
    assert (figures["report"], figures["perfetto"], figures["steps"]) == ("again.html", "trace.json", 4)
    assert 0 <= figures["hidden_share"] <= 1
    names = {event["name"] for event in json.loads(Path("trace.json").read_text())["traceEvents"]}
    assert {"aten::addmm", "resident", "budget", "thread_name"} <= names


@pytest.mark.long
def test_without_a_budget_a_run_only_keeps_account(spillway: Command) -> None:
    document = trained(spillway, "--budget", "none")
    assert (document["budget_bytes"], document["bytes_to_disk"], document["recomputed_ops"]) == (None, 0, 0)
    assert document["peak_bytes"] > 2**20
    assert (document["identical"], document["ratio"], document["run_file"]) == (None, None, None)


@pytest.mark.long
def test_how_bytes_are_spilled_and_freed_can_be_chosen(spillway: Command) -> None:
    plainly = trained(spillway, "--budget", "1MiB", "--method", "lru", "--run-file", "plainly.jsonl")
    chosen = trained(
        spillway, "--budget", "1MiB", "--method", "lru", "--spill-io", "direct", "--keep-freed",
        "--spill-directory", ".", "--run-file", "chosen.jsonl",
    )  # fmt: skip
    headers = [read_run(path).header for path in ("plainly.jsonl", "chosen.jsonl")]
    assert [header["return_freed"] for header in headers] == [True, False]
    with closing(DiskTier(Path(), "direct")) as tier:  # not every file system can
        assert [header["spill_io"] for header in headers] == ["buffered", tier.io]
    assert chosen["losses"] == plainly["losses"]


@pytest.mark.long
def test_the_seed_decides_the_run(spillway: Command) -> None:
    losses = [trained(spillway, "--budget", "2MiB", "--seed", seed)["losses"] for seed in (1, 2)]
    assert losses[0] != losses[1]


@pytest.mark.long
def test_a_workload_that_is_not_twice_the_same_is_reported_and_fails(spillway: Command) -> None:
    ended = spillway("train", "workloads.py:changing", "--budget", "2MiB", "--steps", 2, "--plain-check", "--json")
    assert ended.code == 1
    assert (json.loads(ended.out)["identical"], json.loads(ended.out)["first_difference"]) == (False, 0)
    assert ended.err.splitlines()[-1] == (
        "spillway: The run under 2.00 MiB is not the plain one: it differs from the loss of step 0 on. "
        "Either the workload is not twice the same, or this is a bug in Spillway."
    )


@pytest.mark.long
def test_the_demo_has_a_row_for_every_run_and_writes_its_pages(
    spillway: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "WORKLOAD", "workloads.py:blocks")
    ended = spillway("demo", "--steps", 6, "--budgets", "0.9x, 0.8x ,0.01x", "--output", "page.html", "--json")
    assert ended.code == 0, ended.err
    plain, most, middle, refused, *methods = json.loads(ended.out)
    assert plain["budget_bytes"] is None
    assert [row["budget_bytes"] for row in (most, middle)] == [plain["peak_bytes"] * share // 100 for share in (90, 80)]
    assert [row["identical"] for row in (plain, most, middle, refused)] == [True, True, True, None]
    assert all(row["peak_bytes"] <= row["budget_bytes"] and row["ratio"] > 0 for row in (most, middle, *methods))
    assert refused["smallest_budget_bytes"] > refused["budget_bytes"]
    assert [row["method"] for row in methods] == ["mimose", "static", "checkpoint", "delta"]
    assert all(row["identical"] and row["budget_bytes"] == middle["budget_bytes"] for row in methods)
    mimose, static, checkpoint, _ = (row["recomputed_share"] for row in methods)
    assert mimose <= static <= checkpoint == 1.0
    assert "under a budget of" in Path("page.html").read_text("utf-8")
    assert "Memory against input size" in Path("page-mimose.html").read_text("utf-8")


def test_a_run_file_becomes_a_page_beside_it(spillway: Command) -> None:
    RunWriter("run.jsonl", {"budget_bytes": 100, "method": "lru"}).close()
    ended = spillway("report", "run.jsonl", "--json")
    assert json.loads(ended.out) == {
        "report": "run.html", "perfetto": None, "steps": 0, "peak_bytes": 0, "hidden_share": 0.0,
        "simulated": False,
    }  # fmt: skip
    assert "under a budget of 100 B" in Path("run.html").read_text("utf-8")


def test_a_run_file_cut_short_is_shown_up_to_its_last_whole_line(spillway: Command) -> None:
    with RunWriter("run.jsonl", {}) as run:
        run.append({"step": {}})
    Path("run.jsonl").write_bytes(Path("run.jsonl").read_bytes()[:-4])
    ended = spillway("report", "run.jsonl")
    assert (ended.code, ended.out) == (0, "0 steps: run.html\n")
    assert ended.err == "The last line of run.jsonl is incomplete, as a killed run leaves it, and was left out.\n"


def test_what_is_no_run_file_is_refused_in_a_sentence(spillway: Command) -> None:
    Path("other.txt").write_text("step,loss\n")
    assert sentence(spillway("report", "other.txt")).startswith("other.txt, line 1: this is not the first line")
    assert sentence(spillway("report", "missing.jsonl")) == "missing.jsonl: No such file or directory."
    with RunWriter("strange.jsonl", {}) as run:
        run.append({"step": {"colour": "red"}})
    assert sentence(spillway("report", "strange.jsonl")).startswith(
        "strange.jsonl, line 2: 'colour' is no field of a step report"
    )
    assert not Path("strange.html").exists()


def test_a_page_never_replaces_its_run_file(spillway: Command) -> None:
    RunWriter("run.html", {}).close()
    told = "run.html cannot be written: this command reads run.html; choose another place."
    assert sentence(spillway("report", "run.html")) == told
    assert read_run("run.html").steps == []


def test_a_trace_of_a_run_without_lanes_is_refused_before_anything_is_written(spillway: Command) -> None:
    RunWriter("run.jsonl", {}).close()
    refusal = sentence(spillway("report", "run.jsonl", "--perfetto", "trace.json"))
    assert refusal.startswith(
        "run.jsonl holds no lanes: record them with spillway.manage(..., report=ReportOptions(timeline=True"
    )
    assert sorted(path.name for path in Path().iterdir()) == ["run.jsonl", "workloads.py"]


def test_a_trace_replaces_neither_its_run_file_nor_the_page(spillway: Command) -> None:
    RunWriter("run.jsonl", {}).close()
    Path("link.jsonl").symlink_to("run.jsonl")
    for place in ("run.jsonl", "link.jsonl"):
        told = f"{place} cannot be written: this command reads run.jsonl; choose another place."
        assert sentence(spillway("report", "run.jsonl", "--perfetto", place)) == told
    told = "run.html cannot be written: this command writes run.html too; choose another place."
    assert sentence(spillway("report", "run.jsonl", "--perfetto", "run.html")) == told
    assert read_run("run.jsonl").steps == []


def begun(folder: Path, workload: str, *, steps: int) -> tuple[subprocess.Popen[str], int]:
    """Start to train in a process of its own; returns it and, when the first step runs, the number of its child."""
    (folder / "workloads.py").write_text(WORKLOADS)
    program = "import sys; from spillway.cli import main; main(sys.argv[1:])"
    arguments = ["train", f"workloads.py:{workload}", "--budget", "1MiB", "--steps", str(steps)]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    told = folder / "pid"
    wait_until(lambda: process.poll() is not None or (told.exists() and told.stat().st_size > 0))
    assert process.poll() is None, process.communicate()[1]
    return process, int(told.read_text())


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANGS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """Whether the process exists and is not waiting to be forgotten."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ctrl_c_ends_the_run_and_its_process_without_a_traceback(tmp_path: Path) -> None:
    process, child = begun(tmp_path, "endless", steps=1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANGS)
    assert (process.returncode, out, "Traceback" in err) == (130, "", False)
    assert not runs(child)


def test_a_run_ends_when_whoever_started_it_is_gone(tmp_path: Path) -> None:
    process, child = begun(tmp_path, "slow", steps=3000)
    process.kill()
    process.communicate(timeout=HANGS)
    wait_until(lambda: not runs(child))
