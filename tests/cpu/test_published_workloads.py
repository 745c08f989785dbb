"""Models of papers, small enough to train here, recorded as they would be at full size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import spillway
from spillway.cli import app
from spillway.errors import WorkloadError
from spillway.ir import Kind, Phase, read_step, write_step
from spillway.workloads import get

pytest.importorskip("transformers")

SMALL = {
    "bert-base": {"batch": 1, "length": 12, "layers": 1},
    "gpt2": {"batch": 1, "length": 10, "layers": 1},
    "t5": {"batch": 1, "length": 9, "layers": 1},
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SMALL)
def test_a_published_model_trains_and_fake_tensors_tell_the_same_step(name: str) -> None:
    real = spillway.record(name, **SMALL[name])
    fake = spillway.record(name, fake=True, **SMALL[name])
    # For subclasses of tensors, which fake ones are, torch adds an attention's mask out of place.
    others = {(a.name, b.name) for a, b in zip(real.step.ops, fake.step.ops, strict=True) if a.name != b.name}
    assert others == (set() if name == "bert-base" else {("aten.add_.Tensor", "aten.add.Tensor")})
    assert fake.step.plain_peak() == real.step.plain_peak()
    assert (fake.step.digest() == real.step.digest()) == (not others)
    assert (real.workload, real.size) == (name, SMALL[name]["length"])
    kinds = {storage.kind for storage in fake.step.storages}
    assert {Kind.PARAMETER, Kind.GRADIENT, Kind.OPTIMIZER_STATE, Kind.INPUT, Kind.ACTIVATION} <= kinds
    assert {op.phase for op in fake.step.ops} == set(Phase)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "gflop"), [("resnet50", 24.3), ("swin", 26.9)])
def test_a_model_of_pictures_computes_in_a_step_three_times_what_its_paper_says(name: str, gflop: float) -> None:
    # 4.1 and 4.5 billion multiply-adds a picture, twice that in operations, three times that with the backward.
    recorded = spillway.record(name, fake=True, batch=2)
    assert recorded.size == 2
    assert sum(op.flops for op in recorded.step.ops) / 2e9 == pytest.approx(gflop, rel=0.02)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_bert_base_with_its_optimizer_takes_less_than_a_megabyte(tmp_path: Path) -> None:
    recorded = spillway.record("bert-base", fake=True, batch=8, length=128)
    write_step(tmp_path / "bert.jsonl.gz", recorded)
    assert (tmp_path / "bert.jsonl.gz").stat().st_size < 10**6
    assert read_step(tmp_path / "bert.jsonl.gz") == recorded
    parameters = sum(s.nbytes for s in recorded.step.storages if s.kind is Kind.PARAMETER)
    assert parameters == pytest.approx(4 * 109.5e6, rel=0.01)
    assert {"bert.encoder.layer.0.attention.self.query", "bert.encoder.layer.11.output.dense"} <= {
        op.module for op in recorded.step.ops if op.phase is Phase.BACKWARD
    }


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_the_same_seed_gives_the_same_model_and_batches_which_draw_from_a_stream_of_their_own(name: str) -> None:
    one, two, other = (get(name, seed=seed, **SMALL[name]) for seed in (3, 3, 4))
    assert one.name == name
    assert all(map(torch.equal, one.model.parameters(), two.model.parameters()))
    before = torch.get_rng_state()
    batches = [[dict(batch) for batch in workload.batches(2)] for workload in (one, two, other, one)]  # type: ignore[call-overload]
    assert torch.equal(before, torch.get_rng_state())
    tokens = [[batch["input_ids"] for batch in of_workload] for of_workload in batches]
    assert torch.equal(torch.stack(tokens[0]), torch.stack(tokens[1]))
    assert torch.equal(torch.stack(tokens[0]), torch.stack(tokens[3]))
    assert not torch.equal(tokens[0][0], tokens[0][1])
    assert not torch.equal(tokens[0][0], tokens[2][0])


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("bert-base", {"length": 513, "layers": 1}, "takes up to 512 tokens, not 513"),
        ("t5", {"length": -5, "layers": 1}, "takes one or more tokens in a sequence, not -5"),
        ("bert-small", {"length": 0}, "takes one or more tokens in a sequence, not 0"),
        ("bert-small", {"layers": -1}, "has one or more layers, not -1"),
        ("gpt2", {"batch": 0, "layers": 1}, "takes one or more samples in a batch, not 0"),
        ("resnet50", {"length": 5}, "takes no length, which it was given; it takes"),
        ("resnet50", {"layers": 5}, "layers of the workload resnet50 are in stages"),
        ("swin", {"width": 64}, "stages of the workload swin are of several widths"),
        ("gpt-small", {"width": 100}, "has a width that is a multiple of 64, not 100"),
        ("vit-small", {"width": 0}, "has a width that is a multiple of 64, not 0"),
    ],
)
def test_sizes_that_a_model_does_not_have_are_refused(name: str, options: dict[str, int], reason: str) -> None:
    with pytest.raises(WorkloadError, match=reason):
        get(name, **options)


@pytest.mark.parametrize("name", ["bert-small", "gpt-small", "vit-small", "t5"])
def test_a_width_widens_every_layer(name: str) -> None:
    parameters = []
    for width in (64, 128):
        model = get(name, batch=1, layers=1, width=width).model
        parameters.append(
            sum(p.numel() for p in model.parameters() if p.ndim == 2 and p.shape[0] in (width, 4 * width))
        )
    assert parameters[1] > 3 * parameters[0] > 0


def test_without_transformers_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(WorkloadError, match=r"needs transformers, which is not installed: pip install"):
        get("bert-base")


@pytest.mark.long
def test_the_verb_writes_a_file_and_says_what_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "step.jsonl.gz"
    done = CliRunner().invoke(app, ["record", "resnet", "--fake", "--batch", "4", "-o", str(path), "--json"])
    assert done.exit_code == 0, done.output
    figures, recorded = json.loads(done.stdout), read_step(path)
    assert figures["plain_peak_bytes"] == recorded.step.plain_peak()
    assert (figures["ops"], figures["fake"], figures["op_seconds"]) == (len(recorded.step.ops), True, None)
    assert recorded.facts["options"] == {"batch": 4}
    told = CliRunner().invoke(app, ["record", "resnet", "--batch", "2", "-o", str(tmp_path / "real.jsonl")])
    assert told.exit_code == 0, told.output
    assert "plain peak" in told.stdout
    assert "ops take" in told.stdout
    assert all(op.seconds for op in read_step(tmp_path / "real.jsonl").step.ops)


def test_an_unwritable_output_is_refused_before_anything_runs(tmp_path: Path) -> None:
    words = ["-m", "spillway", "record", "resnet", "-o", str(tmp_path / "no" / "step.jsonl")]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "there is no directory" in done.stderr
    assert done.stderr.count("\n") == 1
