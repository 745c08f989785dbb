"""The wheel made from the source distribution is pure, has all that is no module, and trains where it is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path

import pytest

import spillway
from spillway.native import library
from tests.architecture.source import ROOT
from tests.cpu.another_process import run_python

BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
TRAIN = """
    import os
    import torch
    import spillway
    from spillway.native import library

    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters())
    with spillway.manage(model, optimizer, budget="600KiB", method="lru") as memory, memory.step():
        model(torch.ones(512, 64)).square().sum().backward()
        optimizer.step()
    assert memory.history[0].peak_bytes <= memory.allowed
    memory.report(os.environ["PAGE"])
    print(spillway.__file__, *map(library.library_path, library.PARTS), sep=os.linesep)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built without a network, from a copy: building writes beside the sources."""
    if int(version("setuptools").partition(".")[0]) < 77:
        pytest.skip(f"building takes setuptools 77 or newer, and {version('setuptools')} is installed")
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    source = _built("build_sdist", folder, folder)
    with tarfile.open(source) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return zipfile.ZipFile(_built("build_wheel", unpacked, folder))


def _built(what: str, project: Path, folder: Path) -> Path:
    built = subprocess.run(
        [sys.executable, "-c", BUILD, what, folder], cwd=project, capture_output=True, text=True, check=True
    )
    return folder / built.stdout.splitlines()[-1]


def test_it_is_pure_and_has_the_version_of_the_package(wheel: zipfile.ZipFile) -> None:
    name, number, *tags = Path(str(wheel.filename)).stem.split("-")
    assert (name, number, tags) == ("torch_spillway", spillway.__version__, ["py3", "none", "any"])
    about = Parser().parsestr(wheel.read(f"{name}-{number}.dist-info/METADATA").decode())
    assert (about["Version"], about["License-Expression"]) == (spillway.__version__, "Apache-2.0")
    assert "notebook" in about.get_all("Provides-Extra", [])
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {spillway.__version__}\n" in citation


def test_it_has_every_file_of_the_package_and_none_besides(wheel: zipfile.ZipFile) -> None:
    package = ROOT / "src" / "spillway"
    files = {path.relative_to(ROOT / "src").as_posix() for path in package.rglob("*") if path.is_file()}
    there = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert there == {name for name in files if not name.endswith(".pyc")}
    assert {
        "spillway/py.typed",
        "spillway/errors.md",
        "spillway/native/hook.cpp",
        "spillway/report/page.html.jinja",
    } <= there


@pytest.mark.long
def test_it_trains_and_reports_from_where_it_is_installed(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Its native part is of the sources in it: the one of this checkout, and so compiled already."""
    wheel.extractall(tmp_path)
    trained = run_python(TRAIN, PYTHONPATH=str(tmp_path), PAGE=str(tmp_path / "run.html"))
    file, *native = trained.stdout.splitlines()
    assert Path(file).is_relative_to(tmp_path)
    assert native == [str(library.library_path(part)) for part in library.PARTS]
    assert "highest peak" in (tmp_path / "run.html").read_text("utf-8")
