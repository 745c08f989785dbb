"""This machine as a device: measured once, remembered, measured again where what was remembered is no good."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spillway.costs import DEVICES, HERE, Device, measured, watching
from spillway.costs.finding import device_of
from spillway.engines.controller import UNLIMITED
from spillway.engines.tiers.speed import Speed
from spillway.methods import LRU, Delta
from spillway.units import KiB, MiB

FOUND = replace(DEVICES["a100"], name=HERE, source="measured: by a test")


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """The directories that were measured, one for every time; figures are remembered in a folder of the test's own."""
    asked: list[Path] = []

    def measure(directory: Path) -> Device:
        asked.append(directory)
        return replace(FOUND, flops_per_second=float(len(asked)))

    monkeypatch.setattr(measured, "measure", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return asked


def remembered(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "cache" / "spillway").glob("machine-*.json")
    return path


def test_a_machine_is_measured_once(times: list[Path], tmp_path: Path) -> None:
    first = measured.this_machine()
    assert (measured.this_machine(), device_of("here"), device_of("HERE")) == (first, first, first)
    assert len(times) == 1


def test_a_machine_is_measured_again_when_that_is_asked_for(times: list[Path], tmp_path: Path) -> None:
    first = measured.this_machine()
    again = device_of("here", refresh=True)
    assert len(times) == 2
    assert measured.this_machine() == again != first


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"null", b'{"format": "spillway device", "version": 9}'])
def test_a_damaged_file_is_measured_anew_and_mended(times: list[Path], tmp_path: Path, content: bytes) -> None:
    measured.this_machine()
    remembered(tmp_path).write_bytes(content)
    again = measured.this_machine()
    assert len(times) == 2
    assert measured.this_machine() == again
    assert len(times) == 2


def test_figures_that_cannot_be_are_not_believed(times: list[Path], tmp_path: Path) -> None:
    measured.this_machine()
    path = remembered(tmp_path)
    document = json.loads(path.read_text("utf-8"))
    document["device"]["bytes_per_second"] = -1
    path.write_text(json.dumps(document), "utf-8")
    measured.this_machine()
    assert len(times) == 2


def test_figures_of_another_machine_under_the_same_name_are_not_believed(times: list[Path], tmp_path: Path) -> None:
    measured.this_machine()
    path = remembered(tmp_path)
    document = json.loads(path.read_text("utf-8"))
    document["facts"]["key"]["processor"] = "another"
    path.write_text(json.dumps(document), "utf-8")
    measured.this_machine()
    assert len(times) == 2


def with_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def with_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.9.9")


def on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "another")


@pytest.mark.parametrize("change", [with_two_threads, with_another_torch, on_another_machine])
def test_what_the_figures_depend_on_is_measured_apart(
    times: list[Path], monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None]
) -> None:
    measured.this_machine()
    change(monkeypatch)
    measured.this_machine()
    assert len(times) == 2
    monkeypatch.undo()


def test_every_spill_directory_is_measured_apart(times: list[Path], tmp_path: Path) -> None:
    measured.this_machine()
    measured.this_machine(directory=tmp_path)
    assert times[1:] == [tmp_path]


def test_without_a_place_to_remember_the_machine_is_measured_all_the_same(
    times: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    measured.this_machine()
    measured.this_machine()
    assert len(times) == 2


def test_figures_lie_below_the_home_directory_by_default(
    times: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/paths/are/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    measured.this_machine()
    assert len(list((tmp_path / ".cache" / "spillway").glob("machine-*.json"))) == 1


def test_what_is_measured_here_is_a_device_with_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(measured, "PATIENCE", 0.0)
    monkeypatch.setattr(measured, "_LARGE", 64 * KiB)
    monkeypatch.setattr(measured, "_SIDE", 32)
    monkeypatch.setattr(watching, "_ROUNDS", 1)
    for name in ("tier_speed", "disk_speed"):
        speed = getattr(measured, name)
        monkeypatch.setattr(measured, name, lambda directory, speed=speed: speed(directory, MiB))
    device = measured.measure(tmp_path)
    assert (device.name, device.duplex) == (HERE, False)
    assert device.copy_seconds > 0
    assert f"1 thread; link: the spill file in {tmp_path}" in device.source
    assert device.memory > 64 * MiB
    assert list(tmp_path.iterdir()) == []


def test_what_watching_costs_is_told_apart_from_copies_and_recomputing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    alone = {"plain": 1.0, "ops": 100, "bytes_out": MiB, "bytes_in": MiB}
    steps = {
        "watched": watching._Step(seconds=1.5, stalled=0.0, recomputing=0.0, copies=0, handled=0, looks=0, **alone),
        "pressed": watching._Step(seconds=3.0, stalled=0.6, recomputing=0.1, copies=4, handled=8, looks=0, **alone),
        "looking": watching._Step(seconds=3.2, stalled=0.6, recomputing=0.1, copies=4, handled=8, looks=10, **alone),
    }
    order = iter(steps.values())
    monkeypatch.setattr(watching._Trainer, "peak", lambda self: 2 * MiB)
    monkeypatch.setattr(watching._Trainer, "steps", lambda self: iter([next(order)] * 3))
    found = watching.measure_watching(tmp_path, Speed(out=10 * MiB, back=5 * MiB))
    assert found.op == pytest.approx(0.5 / 100)
    assert found.storage == pytest.approx((3.0 - 1.0 - 0.6 - 0.1 - 0.5) / 8)
    assert found.look == pytest.approx(0.2 / 10)
    assert found.copy == pytest.approx((0.6 - 0.1 - 0.2) / 4)


def test_a_small_model_is_watched_and_pressed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(watching, "_ROUNDS", 1)
    peak = watching._Trainer(LRU(), UNLIMITED, tmp_path).peak()
    (watched,) = watching._Trainer(LRU(), peak - 1, tmp_path).steps()
    (pressed,) = watching._Trainer(LRU(), peak // 2, tmp_path).steps()
    (looking,) = watching._Trainer(Delta(), peak // 2, tmp_path).steps()
    assert watched.ops == pressed.ops > 500
    assert watched.handled < 10 < pressed.handled
    assert min(pressed.copies, pressed.bytes_out, pressed.bytes_in, pressed.stalled) > 0
    assert (pressed.looks, looking.looks > 10) == (0, True)
