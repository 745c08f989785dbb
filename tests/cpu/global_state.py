"""What a process has once: random streams, settings, handlers. Run as a program, it reports whose first use changes any
of it, each first use in a forked child of a process that has imported torch and nothing of ours."""

from __future__ import annotations

import contextlib
import decimal
import gc
import io
import locale
import logging
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from spillway.workloads import Workload

WATCHED = (torch.Tensor, torch.UntypedStorage, torch.autograd.Function, nn.Module, torch.optim.Optimizer)


def snapshot() -> dict[str, Any]:
    """Everything of which a process has one, by name, in values that can be compared."""
    return {
        "random": random.getstate(),
        "numpy": repr(numpy.random.get_state(legacy=False)),
        "torch": torch.get_rng_state().tolist(),
        "dtype and device": (torch.get_default_dtype(), torch.get_default_device()),
        "threads of torch": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "multithreaded backward": torch.autograd.is_multithreading_enabled(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "precision": (
            torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled, torch.backends.mkldnn.deterministic,
            torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled(),
        ),
        "autocast": (
            torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled(),
        ),
        "printing": (vars(torch._tensor_str.PRINT_OPTS).copy(), repr(numpy.get_printoptions()), numpy.geterr()),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "hooks for all modules": [
            len(hooks) for name, hooks in vars(torch.nn.modules.module).items()
            if name.startswith("_global_") and hasattr(hooks, "__len__")
        ],
        "stance": torch._dynamo.eval_frame._stance,
        "warnings": (list(warnings.filters), warnings.showwarning, torch.is_warn_always_enabled()),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "environment": dict(os.environ),
        "interpreter": (
            sys.getrecursionlimit(), sys.getswitchinterval(), sys.excepthook, sys.displayhook, sys.unraisablehook,
            threading.excepthook, sys.gettrace(), sys.getprofile(), list(sys.path), sys.stdout, sys.stderr,
            sys.get_int_max_str_digits(), sys.flags,
        ),
        "garbage": (gc.get_threshold(), gc.isenabled(), gc.get_debug(), gc.get_freeze_count(), list(gc.callbacks)),
        "locale and decimal": (locale.setlocale(locale.LC_ALL), repr(decimal.getcontext())),
        "logging": (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
        "directory": (os.getcwd(), tempfile.tempdir or tempfile.gettempdir()),
        "limits": [resource.getrlimit(value) for name, value in vars(resource).items() if name.startswith("RLIMIT_")],
        "processors": (os.sched_getaffinity(0), os.nice(0)),
        "running threads": [thread.name for thread in threading.enumerate()],
        "classes": [dict(vars(one)) for one in WATCHED],
        "functions of torch": {name: value for name, value in vars(torch).items() if callable(value)},
    }  # fmt: skip


WITHIN_A_SESSION = {"classes", "functions of torch", "running threads"}
"""What an open session changes and puts back when it closes."""
WITHIN_A_STEP = WITHIN_A_SESSION | {"signals", "stance"}
"""What a watched step does besides."""


class Audit:
    """Compares the process with what it was at the start, after every call."""

    def __init__(self) -> None:
        self._before = snapshot()
        self.found: list[str] = []

    def look(self, after: str, permitted: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        now = snapshot()
        for name, value in now.items():
            if value != self._before[name] and name not in permitted:
                self.found.append(f"{after}: {name}")
                self._before[name] = value

    @contextlib.contextmanager
    def step(self, session: Any, batch: Tensor | None) -> Iterator[None]:
        with session.step(batch):
            self.look("entering a step", WITHIN_A_STEP)
            yield
            self.look("the step's work", WITHIN_A_STEP)
        self.look("leaving a step", WITHIN_A_SESSION)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(torch.tanh(self.one(x)))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def training(audit: Audit, material: Material, budget: str | None, method: str, **told: Any) -> None:
    import spillway

    audit.look("import spillway")
    model, optimizer, batch = material
    with io.StringIO() as said, contextlib.redirect_stderr(said):
        report = spillway.ReportOptions(**told)
        session = spillway.manage(model, optimizer, budget=budget, method=method, report=report)
    audit.look("manage", WITHIN_A_SESSION)
    for _ in range(3):
        with audit.step(session, batch):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.log(loss=loss)
    with tempfile.TemporaryDirectory() as folder:
        session.report(Path(folder) / "page.html")
    audit.look("report", WITHIN_A_SESSION)
    session.close()
    audit.look("close")


def refused(audit: Audit, material: Material, method: str, budget: str) -> None:
    import spillway

    model, optimizer, batch = material
    session = spillway.manage(model, optimizer, budget=budget, method=method)
    try:
        with session.step(batch):
            model(batch).square().mean().backward()
            optimizer.step()
    except spillway.BudgetInfeasible:
        audit.look("a refusal", WITHIN_A_SESSION)
    else:
        audit.found.append("it was not refused")
    session.close()
    audit.look("close")


def small() -> Workload:
    """A workload of next to nothing, whose steps and whose making draw from every stream."""
    from spillway.workloads import Workload

    model = Chain()

    def loss(model: torch.nn.Module, batch: Any) -> Tensor:
        noise = torch.rand(8, 64) * random.random() * numpy.random.rand()
        summed: Tensor = model(batch[0] + noise).sum()
        return summed

    return Workload(
        name="small", model=model, optimizers=(torch.optim.SGD(model.parameters(), 0.1),),
        batches=lambda steps: iter([(torch.zeros(8, 64),)] * steps), loss=loss,
    )  # fmt: skip


def on_paper(audit: Audit, material: Material) -> None:
    import spillway

    recorded = spillway.record(small, fake=True)
    audit.look("record with fakes")
    spillway.record(small)
    audit.look("record")
    spillway.record("deep-narrow", fake=True, layers=2)
    audit.look("record by name")
    for method in ("delta", "dtr"):
        spillway.simulate(recorded, 0.9, method)
        audit.look(f"simulate {method}")
    for method in ("sqrt-n", "swap-prefetch"):
        with contextlib.suppress(spillway.BudgetInfeasible):
            spillway.plan(recorded, budget=0.9, method=method)
        audit.look(f"plan {method}")


Material = tuple[nn.Module, torch.optim.Optimizer, Tensor]
CASES: dict[str, Callable[[Audit, Material], None]] = {
    "account": lambda audit, material: training(audit, material, None, "lru"),
    "lru": lambda audit, material: training(audit, material, "600KiB", "lru", timeline=True, live=True),
    "delta": lambda audit, material: training(audit, material, "600KiB", "delta"),
    "delta-published": lambda audit, material: training(audit, material, "600KiB", "delta-published"),
    "dtr": lambda audit, material: training(audit, material, "600KiB", "dtr"),
    "mimose": lambda audit, material: training(audit, material, "16MiB", "mimose", live=True),
    "mimose-published": lambda audit, material: training(audit, material, "16MiB", "mimose-published"),
    "checkpoint": lambda audit, material: training(audit, material, "16MiB", "checkpoint"),
    "refused by the tensor engine": lambda audit, material: refused(audit, material, "lru", "64KiB"),
    "refused by the block engine": lambda audit, material: refused(audit, material, "mimose", "64KiB"),
    "on paper": on_paper,
}


def main() -> None:
    model = Chain()
    material = model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), torch.randn(256, 64)
    for name, case in CASES.items():
        sys.stdout.flush()
        child = os.fork()
        if child:
            if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
                print(f"{name}: it died")
            continue
        try:
            audit = Audit()
            case(audit, material)
            for line in audit.found:
                print(f"{name}: {line}")
            print(f"{name} ended")
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)


if __name__ == "__main__":
    main()
