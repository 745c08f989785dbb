"""`spillway calibrate`, and the shapes of ops that it lives on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spillway.advisor.calibrating import NETWORKS, workload_of
from spillway.cli import main
from spillway.costs import read_device, write_device
from spillway.costs.device import DEVICES
from spillway.engines.tensors.ops import OpInfo
from spillway.recording.formulas import shape_of
from spillway.recording.steps import record_step
from spillway.workloads.recorded import record


@pytest.mark.parametrize(
    ("layer", "given", "shape"),
    [
        (nn.Linear(5, 7, bias=False), (3, 5), (1, 3, 7, 5)),
        (nn.Linear(5, 7), (3, 5), (1, 3, 7, 5)),
        (nn.Conv2d(6, 8, (3, 5), 2, groups=2), (2, 6, 11, 13), (2, 6, 8, 25, 3, 5, 2, 2)),
        (nn.Conv1d(6, 8, 3, padding=1), (2, 6, 11), (2, 6, 8, 11, 1, 3, 1, 1)),
        (nn.ConvTranspose2d(6, 8, 2, 2), (2, 6, 5, 5), (2, 8, 6, 25, 2, 2, 2, 1)),
        (nn.BatchNorm2d(6), (2, 6, 5, 5), (6,)),
    ],
)
def test_an_op_is_recorded_with_its_shape(layer: nn.Module, given: tuple[int, ...], shape: tuple[int, ...]) -> None:
    x = torch.ones(given, requires_grad=True)
    step = record_step(lambda: layer(x).sum().backward(), models=layer)
    shapes = [op.shape for op in step.ops if op.shape]
    assert shapes[0] == shape
    if len(shape) != 4:  # a convolution or a norm goes back in one op, a product in products of other shapes
        assert shapes == [shape, shape]


def test_batched_products_are_counted() -> None:
    one, other = torch.ones(2, 3, 4), torch.ones(2, 4, 5)
    step = record_step(lambda: torch.bmm(one, other))
    assert [op.shape for op in step.ops] == [(2, 3, 5, 4)]


def test_products_in_another_type_are_counted() -> None:
    one = torch.ones(3, 4, dtype=torch.bfloat16, device="meta")
    made = torch.mm(one, one.t(), out_dtype=torch.float32)
    info = OpInfo(torch.ops.aten.mm.dtype)
    assert shape_of(info, (one, one.t(), torch.float32), made) == (1, 3, 3, 4)


@pytest.mark.parametrize("op", [torch.ops.aten.cudnn_batch_norm, torch.ops.aten.cudnn_batch_norm_backward])
def test_batch_norms_of_gpus_have_channels(op: Any) -> None:
    assert shape_of(OpInfo(op.default), (torch.ones(2, 6, 5, 5), torch.ones(2, 6, 5, 5)), None) == (6,)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_trains(name: str) -> None:
    workload = workload_of(name, 4, "cpu")
    batch = next(iter(workload.batches(1)))
    losses = [float(workload.train_step(batch)) for _ in range(6)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("size", [2, 25])
def test_a_network_has_any_size(name: str, size: int) -> None:
    workload = workload_of(name, size, "cpu")
    assert workload.train_step(next(iter(workload.batches(1)))).isfinite()


@pytest.fixture
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from spillway.advisor import calibrating

    monkeypatch.setattr(calibrating, "measure", lambda directory: DEVICES["v100"])


def verb(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0), capsys.readouterr().out


@pytest.mark.long
@pytest.mark.usefixtures("known_machine")
def test_a_calibrated_machine_is_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.json"
    code, out = verb(capsys, "calibrate", "-o", str(file), "--sizes", "4", "--json")
    told = json.loads(out)
    assert code == 0
    assert [one["network"] for one in told["networks"]] == list(NETWORKS)
    device, facts = read_device(file)
    assert facts["sizes"] == [4]
    assert device.host_seconds == 0
    efficiency = device.efficiency
    assert efficiency is not None
    assert efficiency.step_spread[0] < 1 < efficiency.step_spread[1]
    assert "5 networks" in efficiency.source


def test_what_is_simulated_for_a_device_file_has_its_intervals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from spillway.ir.step_files import write_step

    recorded = record(lambda: workload_of("linear layers", 4, "cpu"), fake=True)
    write_step(tmp_path / "step.jsonl", recorded)
    write_device(tmp_path / "t4.json", DEVICES["t4"])
    words = ("--methods", "keep-all,lru", "--budgets", "0.8x,1x", "--device", str(tmp_path / "t4.json"))
    code, out = verb(capsys, "compare", str(tmp_path / "step.jsonl"), *words, "--processes", "1", "--json")
    rows = json.loads(out)
    assert code == 0
    for row in rows:
        if row["overhead"] is not None:
            low, high = row["seconds_range"]
            assert low < row["seconds"] < high
            assert row["overhead_range"][0] <= row["overhead"] <= row["overhead_range"][1]


@pytest.mark.parametrize("sizes", ["big", "4,1", ","])
def test_sizes_are_numbers(capsys: pytest.CaptureFixture[str], tmp_path: Path, sizes: str) -> None:
    with pytest.raises(SystemExit):
        main(["calibrate", "-o", str(tmp_path / "x.json"), "--sizes", sizes])
    assert "--sizes takes whole numbers from 2 on" in capsys.readouterr().err


def test_halves_are_autocast_around_the_loss() -> None:
    workload = workload_of("linear layers", 4, "cpu", half=True)
    batch = next(iter(workload.batches(1)))
    assert F.softplus(workload.train_step(batch)).isfinite()
