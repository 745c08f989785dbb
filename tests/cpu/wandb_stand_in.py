"""In place of Weights & Biases: what trainers of transformers and of Lightning call of it. It keeps what is logged."""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

import pytest


class Config(dict[str, Any]):
    def update(self, values: Any, allow_val_change: bool = False) -> None:  # type: ignore[override]
        super().update(values)


class Run:
    """A run; the module `wandb` hands on to the one that was begun."""

    def __init__(self, **options: Any) -> None:
        self.id, self.name, self.config, self.summary = "1", options.get("name"), Config(), dict[str, Any]()
        self.logged: list[dict[str, Any]] = []

    def log(self, numbers: dict[str, Any]) -> None:
        self.logged.append(dict(numbers))

    def define_metric(self, *names: str, **options: Any) -> None: ...

    def _label(self, **options: Any) -> None: ...


def installed(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """`wandb`, as long as the test runs; its `run` is None until somebody begins one."""
    wandb = types.ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)
    wandb.__path__ = []

    def init(**options: Any) -> Run:
        run = Run(**options)
        vars(wandb).update(run=run, config=run.config, summary=run.summary, log=run.log)
        return run

    vars(wandb).update(run=None, init=init, termwarn=lambda *_, **__: None)
    parts: dict[str, dict[str, Any]] = {
        "wandb.sdk": {}, "wandb.sdk.lib": {"RunDisabled": type("RunDisabled", (), {})},
        "wandb.sdk.lib.config_util": {"ConfigError": type("ConfigError", (Exception,), {})},
        "wandb.wandb_run": {"Run": Run},
    }  # fmt: skip
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for name, members in parts.items():
        part = types.ModuleType(name)
        vars(part).update(members, __path__=[])
        monkeypatch.setitem(sys.modules, name, part)
    return wandb
