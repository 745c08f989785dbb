"""Plain PyTorch, DDP and `fully_shard` in two processes: what holds, and what happens where one cannot go on."""

from __future__ import annotations

import atexit
import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from spillway.errors import ModelError
from tests.architecture.documents import blocks
from tests.cpu.integration_matrix import Row, Trained, cells, check
from tests.cpu.integration_processes import STEPS, train
from tests.cpu.process_judge import Group, GroupDied, group
from tests.shared import HANGS

pytestmark = pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available(), reason="this torch has no gloo"
)
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "ddp_torchrun.py"
PROGRAM = "tests.cpu.integration_processes"
TOGETHER = 10.0
"""Seconds within which all ranks stop. They take some tenths of one; by itself a collective would wait for a minute."""


@functools.cache
def two() -> Group:
    """Two processes, started when they are asked for the first time."""
    folder = tempfile.TemporaryDirectory()
    processes = Group(2, Path(folder.name), PROGRAM)
    atexit.register(folder.cleanup)
    atexit.register(processes.kill)
    return processes


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    yield
    two().kill()


def ask(**asked: Any) -> list[dict[str, Any]]:
    """What each rank answers."""
    return [torch.load(answer["file"], weights_only=False) for answer in two().ask(**asked)]


def alone(situation: str, method: str | None, budget: int | None) -> Trained:
    return Trained(**train("plain", situation, method, budget))


def together(kind: str, situation: str, method: str | None, budget: int | None) -> Trained:
    if kind.startswith("FSDP2") and method == "lru":
        method = "mimose"  # which keeps everything, if nothing is in want of room
    answers = ask(what="train", kind=kind, situation=situation, method=method, budget=budget)
    for answer in answers:
        if "error" in answer:
            raise (ModelError if answer["refused"] else AssertionError)(answer["error"].partition(": ")[2])
    return Trained(
        told=[one for answer in answers for one in answer["told"]],
        state={f"{name} of rank {rank}": one for rank in (0, 1) for name, one in answers[rank]["state"].items()},
        peaks=[peak for answer in answers for peak in answer["peaks"]],
    )


MATRIX = {
    "plain PyTorch": Row(alone),
    "DDP x2": Row(functools.partial(together, "DDP x2")),
    "FSDP2 x2": Row(functools.partial(together, "FSDP2 x2")),
    "Lightning, DDP x2": Row(functools.partial(together, "Lightning, DDP x2")),
}


@pytest.mark.long
@pytest.mark.parametrize(("name", "situation"), cells(MATRIX))
def test_the_table_says_what_happens(name: str, situation: str) -> None:
    check(MATRIX, name, situation)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["DDP", "FSDP2", "FSDP2, parts", "FSDP2, parts alone"])
def test_ranks_with_other_plans_train_as_they_do_without_a_session(kind: str) -> None:
    plain = ask(what="train", kind=kind, situation="", method=None, budget=None)
    found = ask(what="forced", kind=kind, actions=["KEEP", "RECOMPUTE"], agrees=True)
    for rank in range(2):
        assert same(plain[rank]["told"], found[rank]["told"])
    # Where a second run gathers parts they agree: all blocks run again in both.
    mine = 5 if "parts" in kind else 0
    assert [answer["again"] for answer in found] == [[mine] * STEPS, [5] * STEPS]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "method", "closes"),
    [("DDP", "lru", False), ("DDP", "auto", True), ("FSDP2", "mimose", False), ("plain", "delta", True),
     ("Lightning", "delta", False)],
)  # fmt: skip
def test_where_one_rank_cannot_go_on_all_stop_with_its_sentence(kind: str, method: str, closes: bool) -> None:
    answers = ask(what="refused", kind=kind, method=method, budgets=[1 << 30, 1 << 19], closes=closes)
    assert answers[0]["told"] == answers[1]["told"]
    assert apart(answers) <= TOGETHER
    (name, sentence, rank), again = answers[0]["told"]
    assert (name, rank) == ("BudgetInfeasible", 1)
    assert sentence.startswith("Rank 1 stops all ranks: Op ")
    assert "512.00 KiB are allowed" in sentence
    assert again == (name, sentence, rank)


def apart(answers: list[dict[str, Any]]) -> float:
    """Seconds from the first rank that stopped to the last."""
    first = [answer["raised"][0] for answer in answers]
    return max(first) - min(first)


@pytest.mark.long
def test_of_three_ranks_that_wait_for_each_other_all_stop(tmp_path: Path) -> None:
    with group(3, tmp_path, PROGRAM) as processes:
        asked = {"what": "refused", "kind": "DDP", "method": "delta", "budgets": [1 << 30, 1 << 30, 1 << 19]}
        answers = [torch.load(answer["file"], weights_only=False) for answer in processes.ask(**asked)]
    assert [answer["told"] == answers[0]["told"] for answer in answers] == [True] * 3
    assert apart(answers) <= TOGETHER
    assert answers[0]["told"][0][1].startswith("Rank 2 stops all ranks: ")


@pytest.mark.long
def test_a_rank_that_nobody_can_call_out_of_its_collective_says_the_sentence_and_ends() -> None:
    asked = {"what": "refused", "kind": "DDP", "method": "lru", "budgets": [1 << 30, 1 << 19]}
    code, said = two().ending(0, **asked, blind=True)
    assert code == 1
    assert said.startswith("Rank 1 stops all ranks: Op ")


LISTENING = """
import torch
from spillway.session import ranks
ranks.POLL_INTERVAL = 0.0  # at the end of the process the thread is most likely in a call of the store's
store = torch.distributed.TCPStore("127.0.0.1", 0, 1, True)
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
listening = ranks.Ranks(torch.distributed.group.WORLD)
"""


@pytest.mark.long
def test_a_process_that_ends_with_an_open_session_ends_well() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LISTENING], capture_output=True, text=True, timeout=HANGS, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


PEAK = """
        print(f"rank {rank}, peak {max(step.peak_bytes for step in steps.session.history)}")
"""
STEPS_OF_EXAMPLE = ["--steps", "2"]


@functools.cache
def told_by_example(*way: str, without: bool = False) -> list[str]:
    """The losses of all ranks that the example prints, or the same script without its two lines; and peaks."""
    script = EXAMPLE.read_text()
    first, second = (line for line in script.splitlines() if "AutomaticSteps" in line)
    assert first.endswith("  # the first line")
    assert second.endswith("  # the second line")
    last = "    dist.destroy_process_group()\n"
    plain = script.replace(f"{first}\n", "").replace(second, "    if True:")
    telling = script.replace("):  # the second", ") as steps:  # the").replace(last, PEAK + last)
    answers = ask(what="example", script=plain if without else telling, options=[*way, *STEPS_OF_EXAMPLE])
    return [line for answer in answers for line in answer["said"].splitlines() if line]


@pytest.mark.long
@pytest.mark.parametrize("way", [[], ["--shard"]])
def test_the_example_has_the_losses_of_the_same_script_without_its_two_lines(way: list[str]) -> None:
    losses = told_by_example(*way, without=True)
    assert len(losses) == 4
    told = told_by_example(*way)
    assert [line for line in told if "loss" in line] == losses
    peaks = [int(line.rpartition("peak ")[2]) for line in told if "peak" in line]
    assert len(peaks) == 2
    assert 0 < max(peaks) <= 160 << 20


@pytest.mark.long
def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    """By the command of the page on integrations."""
    (shown,) = blocks((ROOT / "docs" / "integrations.md").read_text("utf-8"), "sh")
    command = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command += [*shown.split()[1:], *STEPS_OF_EXAMPLE]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    losses = re.findall(r"rank \d, step \d: loss [\d.]+", done.stdout)
    assert sorted(losses) == sorted(told_by_example(without=True))


@pytest.mark.long
def test_ranks_that_do_not_agree_would_gather_other_parts() -> None:
    """The planted fault: nobody is asked."""
    kind = "FSDP2, parts"
    plain = ask(what="train", kind=kind, situation="", method=None, budget=None)
    try:
        found = ask(what="forced", kind=kind, actions=["KEEP", "RECOMPUTE"], agrees=False)
    except GroupDied:
        return
    assert any("error" in one or not same(two["told"], one["told"]) for one, two in zip(found, plain, strict=True))


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))
