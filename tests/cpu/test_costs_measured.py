"""This machine as a device: measured once, remembered, measured again where what was remembered is no good."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spillway.calibration import measured, watching
from spillway.calibration.named_device import device_of
from spillway.costs import DEVICES, HERE, Device
from spillway.memory.budget import UNLIMITED
from spillway.methods import LRU, Delta
from spillway.tiers.speed import Speed
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
    again = measured.this_machine(refresh=True)
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


def with_another_spillway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "__version__", "9.9.9")


@pytest.mark.parametrize("change", [with_two_threads, with_another_torch, with_another_spillway, on_another_machine])
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


@pytest.mark.long
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
    """Python takes 3 ms an op, 10 ms a storage, 2 ms a question, 4 ms a copy beside ops, and longer after long ops."""
    roots = {shape: 0.001 * 2**number for number, shape in enumerate(watching._SHAPES)}  # of the seconds of an op

    def steps(trainer: Any) -> Iterator[watching._Step]:
        pressed, follows = trainer.allowed < MiB, trainer.policy is None
        foresees = not follows and trainer.policy.foresees
        handled, questions = 8 * pressed, (50 if foresees else 3) * pressed
        early = (6 * follows + 2 * foresees) * pressed
        python = 0.3 + 10e-3 * handled + 2e-3 * questions + 4e-3 * early
        python *= 1 + watching.COLD_ROOT * roots[trainer.shape]
        yield watching._Step(
            plain=1.0, seconds=1.0 + 0.6 + 0.1 + python, stalled=0.6, recomputing=0.1, ops=100, copies=4,
            handled=handled, questions=questions, early=early, bytes_out=MiB, bytes_in=MiB,
        )  # fmt: skip

    def remembered(trainer: Any, shape: Any, policy: Any, allowed: int, directory: Path) -> None:
        trainer.shape, trainer.policy, trainer.allowed = shape, policy, allowed

    monkeypatch.setattr(watching._Trainer, "__init__", remembered)
    monkeypatch.setattr(
        watching._Trainer,
        "following",
        lambda shape, allowed, directory: watching._Trainer(shape, None, allowed, directory),
    )
    monkeypatch.setattr(watching._Trainer, "op_seconds", lambda trainer: [roots[trainer.shape] ** 2] * 100)
    monkeypatch.setattr(watching._Trainer, "peak", lambda trainer: MiB + 1)
    monkeypatch.setattr(watching._Trainer, "steps", steps)
    found = watching.measure_watching(tmp_path, Speed(out=10 * MiB, back=5 * MiB))
    assert found == pytest.approx((3e-3, 10e-3, 2e-3, 4e-3, (0.6 - 0.1 - 0.2) / 4))


@pytest.mark.parametrize(
    ("steps", "law"),
    [
        ([((100, 1.0), 0.5, 1.0), ((100, 2.0), 0.6, 1.0)], (4e-3, 0.1)),
        ([((100, 1.0), 0.5, 1.0), ((100, 2.0), 0.4, 1.0)], (4.5e-3, 0.0)),  # it cannot fall with the length of ops
        ([((100, 1.0), 0.1, 1.0), ((100, 4.0), 0.5, 1.0)], (0.0, 2.1 / 17)),
        ([((100, 1.0), 0.5, 1.0), ((100, 2.0), 0.4, 0.1)], (405e-3 / 101, 0.0)),  # the second counts a hundredfold
        ([((100, 1.0), -0.1, 1.0), ((100, 2.0), 0.0, 1.0)], (0.0, 0.0)),  # a disturbed machine
        ([((100, 1.0), 0.5, 0.0)], (0.0, 0.0)),
        ([((1, 0, 0), 0.1, 1.0), ((1, 1, 0), 0.3, 1.0), ((1, 1, 1), 0.6, 1.0)], (0.1, 0.2, 0.3)),
    ],
)
def test_the_costs_of_things_are_told_apart_and_none_is_below_0(
    steps: list[tuple[tuple[float, ...], float, float]], law: tuple[float, ...]
) -> None:
    assert watching._law(steps) == pytest.approx(law)


@pytest.mark.long
def test_a_small_model_is_watched_and_pressed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(watching, "_ROUNDS", 1)
    shape = watching._Shape(16, rows=256)
    trainer = watching._Trainer(shape, LRU(), UNLIMITED, tmp_path)
    peak, seconds = trainer.peak(), trainer.op_seconds()
    (watched,) = watching._Trainer(shape, LRU(), peak - 1, tmp_path).steps()
    (pressed,) = watching._Trainer(shape, LRU(), peak // 2, tmp_path).steps()
    (asking,) = watching._Trainer(shape, Delta(), peak // 2, tmp_path).steps()
    (planned,) = watching._Trainer.following(shape, peak // 4, tmp_path).steps()
    picture = watching._Shape(2, rows=4, channels=8)
    (convolved,) = watching._Trainer(picture, LRU(), UNLIMITED, tmp_path).steps()
    assert convolved.ops > 50
    (empty,) = watching._Trainer.following(shape, peak, tmp_path).steps()
    assert watched.ops == pressed.ops == planned.ops == empty.ops == len(seconds) > 500
    assert pressed.early == 0 < asking.early < planned.early
    assert max(empty.handled, empty.early) < 10
    assert min(seconds) > 0
    assert watched.handled < 10 < pressed.handled
    assert min(pressed.copies, pressed.bytes_out, pressed.bytes_in, pressed.stalled) > 0
    assert pressed.questions < 5 * pressed.handled < asking.questions
