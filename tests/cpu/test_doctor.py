"""`spillway doctor`: a line for everything, problems with what helps, and 1 where nothing can be trained."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spillway.cli import main
from spillway.doctor import on_spill, on_torch
from spillway.tiers import speed
from spillway.units import MiB


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *map(str, arguments)])
    written = capsys.readouterr()
    return ended.value.code, written.out, written.err


def test_every_topic_has_a_sentence_and_facts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_torch, "SAMPLE", MiB)
    monkeypatch.setattr(speed.tier_speed, "__defaults__", (2 * speed.PIECE,))
    monkeypatch.setattr(speed.disk_speed, "__defaults__", (2 * speed.PIECE,))
    code, out, err = run(capsys, "--spill-directory", tmp_path, "--json")
    assert (code, err) == (0, "")
    findings: dict[str, Any] = {finding["topic"]: finding for finding in json.loads(out)}
    cuda = [topic for topic in findings if topic.startswith("CUDA")]
    others = ["memory", "allocator", "huge pages", "spill directory", "disk speed"]
    assert list(findings) == ["torch", "native part", "threads", "kernels", "memory copy", *cuda, *others]
    assert all(finding["sentence"].endswith(".") for finding in findings.values())
    assert findings["torch"]["facts"]["version"] == torch.__version__
    assert findings["torch"]["facts"]["_swap_data_ptr_"] is True
    assert findings["threads"]["facts"]["computing"] == torch.get_num_threads()
    assert findings["memory copy"]["facts"]["bytes_per_second"] > 0
    measured = findings["disk speed"]["facts"]
    assert all(measured[name] > 0 for name in ("copy_out", "copy_in", "disk_write", "disk_read"))
    assert os.listdir(tmp_path) == []


def test_nothing_is_measured_where_that_was_not_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object) -> None:
        raise AssertionError

    for place, name in ((on_spill, "tier_speed"), (on_spill, "disk_speed"), (on_torch, "fastest")):
        monkeypatch.setattr(place, name, measured)
    code, out, _ = run(capsys, "--no-measure", "--spill-directory", tmp_path)
    assert code == 0
    assert "spill directory" in out
    assert "speed" not in out


def test_a_problem_stands_under_its_line_with_what_helps(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_spill, "file_system", lambda directory: "tmpfs")
    code, out, _ = run(capsys, "--no-measure", "--spill-directory", tmp_path)
    lines = out.splitlines()
    (place,) = [number for number, line in enumerate(lines) if "is a tmpfs, which is RAM itself" in line]
    assert lines[place].lstrip().startswith("! ")
    assert lines[place - 1].startswith("spill directory")
    assert (
        lines[place + 1].strip()
        == "Name another directory, on a disk, with SpillOptions(directory=...) or --spill-directory."
    )
    assert code == 0, "slow is not impossible"


def test_a_directory_that_is_missing_ends_with_1_and_a_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = run(capsys, "--no-measure", "--json", "--spill-directory", tmp_path / "missing")
    assert code == 1
    assert json.loads(out)[-1]["problems"][0]["fatal"] is True, "what was found is told all the same"
    assert err.startswith("spillway: Nothing can be trained under a budget here: ")
    assert "No such file or directory" in err


def test_a_torch_that_is_too_old_ends_with_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_torch, "CAN_SWAP", False)
    code, _, err = run(capsys, "--no-measure", "--spill-directory", tmp_path)
    assert code == 1
    assert "cannot exchange a storage's bytes in place, which models on the CPU need. Use torch 2.13 or newer." in err


def test_threads_that_leave_no_processor_to_the_workers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_torch, "cores", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert on_torch.threads().problems == []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    (problem,) = on_torch.threads().problems
    assert problem.what.startswith("Ops use 4 threads on 4 processors")
    assert problem.fix.startswith("OMP_NUM_THREADS=3 leaves them one")


def test_how_many_compiled_kernels_are_kept_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_torch.kernels({}).facts == {"onednn_kept": 1024}
    fewer = on_torch.kernels({"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "DNNL_PRIMITIVE_CACHE_CAPACITY": "8"})
    assert fewer.facts == {"onednn_kept": 64}
    assert "up to 64 compiled kernels" in fewer.sentence
    for nothing in ("0", "many"):  # which oneDNN reads as 0
        none = on_torch.kernels({"DNNL_PRIMITIVE_CACHE_CAPACITY": nothing})
        assert none.facts == {"onednn_kept": 0}
        assert "keeps no compiled kernels" in none.sentence
        assert "grows" not in none.sentence
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert on_torch.kernels({}).facts == {"onednn_kept": 0}


def on_a_device(monkeypatch: pytest.MonkeyPatch, *, allocator: str = "native", free: Any = lambda number: None) -> None:
    """No device here: what torch would say of one is put in its place, and what is made of it is looked at."""
    cuda = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 1, get_device_name=lambda number: "A100",
        mem_get_info=lambda number: free(number) or (60 << 30, 80 << 30), get_allocator_backend=lambda: allocator,
    )  # fmt: skip
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(on_torch, "link_rates", lambda *_: (20 << 30, 22 << 30))
    monkeypatch.setattr("spillway.engines.tensors.devices.usable_memory", lambda: 64 << 30)
    monkeypatch.setattr(on_torch, "_locked_limit", lambda: 8 << 20)


def test_a_device_is_described_with_its_link_and_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_device(monkeypatch)
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    (finding,) = on_torch.devices(measure=True, environment=settings)
    told = "A100, 60.00 GiB of 80.00 GiB free, pinned copies out at 20.00 GiB/s and in at 22.00 GiB/s. What leaves"
    assert finding.sentence.startswith(told)
    assert "a session takes up to 32.00 GiB unless SpillOptions(host_budget=...) says otherwise" in finding.sentence
    assert "a process may lock 8.00 MiB here" in finding.sentence
    assert "expandable_segments is on: odd pieces of memory hardly count." in finding.sentence
    assert finding.sentence.endswith("The allocator is set up by PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.")
    facts = ("expandable_segments", "allocator", "host_budget", "locked_memory_limit")
    assert [finding.facts[name] for name in facts] == [True, "native", 32 << 30, 8 << 20]
    assert finding.problems == []
    (plain,) = on_torch.devices(measure=False, environment={})
    assert "copy_out" not in plain.facts
    assert "expandable_segments is off" in plain.sentence
    assert plain.sentence.endswith("No setting of the allocator is in the environment.")


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("", False),
        ("expandable_segments:True", True),
        ("max_split_size_mb:64, expandable_segments: true", True),
        ("expandable_segments:False,max_split_size_mb:64", False),
    ],
)
def test_expandable_segments_are_found_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, asked: str, found: bool
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert on_torch.expandable_segments({"PYTORCH_CUDA_ALLOC_CONF": asked}) == found


@pytest.mark.parametrize("on", [True, False])
def test_every_fact_that_matters_has_a_note(monkeypatch: pytest.MonkeyPatch, on: bool) -> None:
    monkeypatch.setattr(on_torch, "CAN_SWAP", on)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", on)
    facts = {"allocator": "native", "expandable_segments": on, "chunk": 2 << 20, "host_behind": on}
    notes = " ".join(on_torch.notes(facts))
    assert ("point at pinned host memory" in notes) == on
    assert ("expandable_segments is on" in notes) == on
    assert ("not recomputed" in notes) == on
    assert ("chunks of 2.00 MiB; host memory can stand" in notes) == on


def test_an_allocator_that_is_not_torchs_own_is_named() -> None:
    facts = {"allocator": "cudaMallocAsync", "expandable_segments": True, "chunk": 0, "host_behind": None}
    notes = " ".join(on_torch.notes(facts))
    assert "The allocator is cudaMallocAsync" in notes
    assert "odd pieces" not in notes
    assert "is not to be had here" in notes


def test_a_process_without_a_limit_on_locked_memory_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_device(monkeypatch)
    monkeypatch.setattr(on_torch, "_locked_limit", lambda: None)
    (finding,) = on_torch.devices(measure=False, environment={})
    assert "a process locks as much memory as it likes here" in finding.sentence


def test_an_allocator_that_nobody_tried_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_device(monkeypatch, allocator="cudaMallocAsync")
    (finding,) = on_torch.devices(measure=False, environment={"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"})
    (problem,) = finding.problems
    assert problem.what.startswith("The allocator is cudaMallocAsync: Spillway reads its counters as those of torch's")
    assert "PYTORCH_ALLOC_CONF" in problem.fix
    assert not problem.fatal


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has nothing left."),
        RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."),
    ],
)
def test_a_link_that_cannot_be_measured_is_a_problem_and_no_error(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise error

    on_a_device(monkeypatch)
    monkeypatch.setattr(on_torch, "link_rates", fails)
    (finding,) = on_torch.devices(measure=True, environment={})
    (problem,) = finding.problems
    assert "could not be measured: CUDA" in problem.what
    assert problem.what.endswith("out of memory.")
    assert not problem.fatal
    assert finding.sentence.startswith("A100, 60.00 GiB of 80.00 GiB free. What leaves")


def test_a_device_that_cannot_be_asked_is_a_problem_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(number: int) -> None:
        raise RuntimeError("CUDA error: device is busy")

    on_a_device(monkeypatch, free=fails)
    (finding,) = on_torch.devices(measure=True, environment={})
    assert finding.sentence == "It cannot be used."
    (problem,) = finding.problems
    assert problem.what == "torch finds device 0 and cannot ask it: CUDA error: device is busy."
