"""Devices: their numbers and sources, files of them, and how a name becomes one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spillway.calibration.named_device import device_of
from spillway.costs import DEVICES, read_device, write_device
from spillway.errors import FileFormatError, UsageError
from spillway.units import GiB

# fp32 TFLOP/s, GB/s of memory, GB/s of the link, and what of the papers' facts the source must tell.
FACTS = {
    "p100-nvlink": (10.6, 732, 34, "assumed"),
    "v100-pcie": (14, 900, 12, "PAPAYA"),
    "v100": (15.7, 900, 12, "p3.2xlarge"),
    "t4": (8.1, 320, 12, "PCIe 3.0"),
    "k80": (2.8, 240, 12, "one of its two GPUs"),
    "v100-nvlink": (15.7, 900, 50, "37 to 75"),
    "a100": (19.5, 2039, 22.4, "arXiv:2203.15980"),
    "a100-physical": (19.5, 2039, 11.2, "one direction"),
    "rtx6000": (16.3, 672, 12, "DyNN-Offload"),
    "h200": (67, 4800, 50, "assumed"),
}
A100 = DEVICES["a100"]


def test_every_device_of_the_papers_is_there_and_no_other() -> None:
    assert list(DEVICES) == list(FACTS)


@pytest.mark.parametrize("name", FACTS)
def test_a_device_has_the_numbers_of_its_source_and_states_it(name: str) -> None:
    device, (flops, memory, link, told) = DEVICES[name], FACTS[name]
    assert (device.flops_per_second, device.bytes_per_second) == (flops * 1e12, memory * 1e9)
    assert device.out_per_second == device.in_per_second == link * 1e9
    assert told in device.source
    assert "data sheet" in device.source
    assert "Link: " in device.source


def test_the_two_readings_of_the_links_of_an_a100_differ_in_the_link_alone() -> None:
    physical = DEVICES["a100-physical"]
    assert physical.out_per_second == A100.out_per_second / 2 == 0.35 * 32e9
    same = replace(physical, name="a100", source=A100.source, out_per_second=22.4e9, in_per_second=22.4e9)
    assert same == A100


def test_a_copy_takes_its_bytes_over_the_link_and_something_besides() -> None:
    device = replace(A100, out_per_second=1e9, in_per_second=2e9, copy_seconds=1e-5)
    assert device.out_seconds(10**9) == pytest.approx(1.00001)
    assert device.in_seconds(10**9) == pytest.approx(0.50001)


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan")])
def test_a_device_without_a_rate_is_refused(rate: float) -> None:
    said = "Device 'a100' needs rates from 0.001 to 1e+24 a second, those of its link among them, and times from 0 to "
    with pytest.raises(UsageError, match=re.escape(f"{said}1000000 seconds; got bytes_per_second={rate}.")):
        replace(A100, bytes_per_second=rate)
    with pytest.raises(UsageError, match=re.escape(f"; got out_per_second={rate}, in_per_second={rate}.")):
        replace(A100, out_per_second=rate, in_per_second=rate)


# Names


@pytest.mark.parametrize("name", ["a100", "A100"])
def test_a_device_is_found_by_its_name_in_any_case(name: str) -> None:
    assert device_of(name) is A100


def test_a_device_is_itself() -> None:
    assert device_of(A100) is A100


def test_an_unknown_name_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(UsageError, match=re.escape(f"choose one of here, {', '.join(DEVICES)}, or a device's .json")):
        device_of("b300")


def test_a_preset_is_found_without_torch_and_this_machine_is_not() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from spillway.calibration.named_device import device_of; device_of('h200')\n"
        "try: device_of('here')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("SpillwayError Measuring this machine takes torch, which cannot be imported")


# Files


def test_a_device_in_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "lab.json"
    mine = replace(A100, name="lab", duplex=False, memory=40 * GiB)
    write_device(path, mine, {"measured": "today"})
    assert read_device(path) == (mine, {"measured": "today"})
    assert device_of(str(path)) == mine
    assert [found.name for found in tmp_path.iterdir()] == ["lab.json"]


def test_a_home_that_nobody_has_is_no_file() -> None:
    with pytest.raises(UsageError, match=re.escape("There is no file ~nobody-at-all/lab.json")):
        device_of("~nobody-at-all/lab.json")


def changed(path: Path, **changes: Any) -> None:
    document = json.loads(path.read_text("utf-8"))
    for key, value in changes.items():
        part, name = (document["device"], key) if key in document["device"] else (document, key)
        part[name] = value
    path.write_text(json.dumps(document), "utf-8")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": "spillway run"}, "this is no 'spillway device' file"),
        ({"version": 1}, "it is of version 1, and this Spillway reads 6"),
        ({"device": []}, "[] is no device"),
        ({"memory": 1.5}, "memory of the device is 1.5, not a whole number from 0"),
        ({"memory": True}, "memory of the device is True, not a whole number"),
        ({"out_per_second": "fast"}, "out_per_second of the device is 'fast', not a number"),
        ({"duplex": 1}, "duplex of the device is 1, neither true nor false"),
        ({"out_per_second": 0}, "seconds; got out_per_second=0."),
        ({"device": {}}, "the device lacks name, flops_per_second"),
    ],
)
def test_a_file_that_is_no_device_is_told_apart(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = tmp_path / "lab.json"
    write_device(path, A100)
    changed(path, **changes)
    with pytest.raises(FileFormatError, match=re.escape(said)):
        read_device(path)


def test_a_device_with_a_figure_that_none_has_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "lab.json"
    write_device(path, A100)
    path.write_text(path.read_text("utf-8").replace('"duplex"', '"tensor_cores": 1, "duplex"'), "utf-8")
    with pytest.raises(FileFormatError, match="'tensor_cores' is no field of a device"):
        device_of(str(path))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null"])
def test_a_file_of_anything_else_is_told_apart(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "lab.json"
    path.write_bytes(content)
    with pytest.raises(FileFormatError):
        read_device(path)


def test_a_file_that_is_not_there_is_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no file"):
        device_of(str(tmp_path / "lab.json"))


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "lab.json"
    with pytest.raises(TypeError):
        write_device(path, A100, {"what": object()})
    assert list(tmp_path.iterdir()) == []
