from __future__ import annotations

import tomllib

from tests.architecture.source import ROOT

PACKAGE = ROOT / "src" / "spillway"


def test_every_folder_with_modules_is_a_package_and_so_is_installed() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert sorted(str(folder) for folder in folders if not (folder / "__init__.py").exists()) == []


def test_every_file_that_is_no_module_is_installed_with_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["spillway"]
    installed = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    others = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert sorted(str(path) for path in others - installed) == []
