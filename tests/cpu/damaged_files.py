"""Files of every kind that a verb reads, one thing in each changed, and how the verb that reads it ends."""

from __future__ import annotations

import contextlib
import gc
import gzip
import io
import json
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, Final, Self, final
from unittest.mock import patch
from zipfile import ZIP_DEFLATED, ZipFile

from typer.main import get_command

import spillway
from spillway import cli
from spillway.advisor.bench import AbstractBench, Trial
from spillway.advisor.real import cache_file
from spillway.calibration import measured
from spillway.cli import advise, main
from spillway.costs.device import DEVICES
from spillway.costs.device_files import write_device
from spillway.costs.roofline import timed
from spillway.errors import SpillwayError
from spillway.ir import Recorded, RunWriter, Step, write_step
from spillway.pilots.decisions import DecisionPilot
from spillway.pilots.pilot_files import SavedPilot, write_pilot
from spillway.pilots.program import Program
from spillway.pilots.sample_files import RecordedSamples, write_samples
from spillway.report import html
from spillway.simulation.plan_and_simulate import report_of, simulate
from tests.cpu.mutations import SCRIPTS, changed_cells, changed_document, changed_lines, changed_source, odd_bytes
from tests.pure.gated_network import GatedNetwork
from tests.pure.training_steps import training_step
from tests.shared import without_page

PATIENCE: Final = 60
"""Seconds after which a call counts as one that does not end."""

WORKLOAD: Final = """
import torch
from spillway.workloads import Workload, seed_everything

def build(*, seed=0, batch=2, width=3):
    seed_everything(seed)
    model = torch.nn.Linear(width, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def batches(steps):
        for _ in range(steps):
            yield (torch.ones(batch, width),)
    def loss(model, batch):
        return model(batch[0]).square().mean()
    return Workload(name="own", model=model, optimizers=(optimizer,), batches=batches, loss=loss, size=batch)
"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of file."""

    name: str
    whole: bytes
    """One that is read."""
    change: Callable[[bytes, Random], bytes]
    """Makes something else of it."""
    call: Callable[[Path, Random], None]
    """Has a verb read it. Raises what the verb raises."""
    ending: str = ""
    """Of the file's name."""
    at: Path | None = None
    """Where it lies, if that is how it is found."""
    share: float = 1.0
    """How many of these there are beside those of other kinds."""


def ends_of(kind: Kind, folder: Path, files: int, odd: list[str], *, bomb: bool) -> dict[str, Any]:
    ends: Counter[str] = Counter()
    first = _ending(kind, folder, kind.whole, Random(0))[0]
    if first != "read":
        odd.append(f"{kind.name} unchanged: {first}")
    special = [*_special(folder, kind, bomb=bomb)]
    for number in range(files):
        if not number % 100:
            gc.collect()
        random = Random(f"{kind.name} {number}")
        content: bytes | Path = special[number] if number < len(special) else kind.change(kind.whole, random)
        ended, why = _ending(kind, folder, content, random)
        ends[ended] += 1
        if ended not in ("read", "refused"):
            odd.append(f"{kind.name} {number}: {ended}: {why[-300:]}")
    counted = ("read", "refused", "traceback", "not_a_sentence", "script", "endless")
    return {"kind": kind.name, "files": files} | {name: ends[name] for name in counted}


def _special(folder: Path, kind: Kind, *, bomb: bool) -> Iterator[bytes | Path]:
    """What is no such file at all."""
    pipe = folder / "pipe"
    if not pipe.exists():
        os.mkfifo(pipe)
    if kind.at is not None:  # it is found by its name
        return
    yield from (b"", b"\0" * 5000, folder, pipe, Path("/dev/zero"), folder / "missing")
    if bomb and kind.name == "step":
        yield gzip.compress(b"0" * (1 << 30) + b"00", compresslevel=1)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """What earlier calls left is not collected where a file is nested so deeply that finalizers have no room on the
    stack, and say so: a process that reads one file has nothing of others."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _ending(kind: Kind, folder: Path, content: bytes | Path, random: Random) -> tuple[str, str]:
    """How the verb ends on a file with that content, or on that path, and what it said."""
    path = content if isinstance(content, Path) else kind.at or folder / f"file{kind.ending}"
    for page in folder.glob("page*"):
        page.unlink()
    if isinstance(content, bytes):
        path.write_bytes(content)
    out, error = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), _patience(), _uncollected():
            kind.call(path, random)
    except SystemExit as ended:
        code = ended.code
    except SpillwayError as refusal:
        code, text = 1, f"spillway: {refusal}\n"
        error.write(text)
    except TimeoutError:
        return "endless", ""
    except BaseException as raised:
        if isinstance(raised, KeyboardInterrupt):
            raise
        return "traceback", f"{type(raised).__name__}: {raised}"
    else:
        code = 0
    pages = "".join(page.read_text("utf-8") for page in folder.glob("page*.html"))
    if any(script in pages for script in SCRIPTS):
        return "script", ""
    if "Traceback" in error.getvalue() or "This is a bug" in error.getvalue():
        return "traceback", error.getvalue()
    said = "".join(f"{line}\n" for line in without_page(error.getvalue()))
    if kind.name == "workload":
        said = "".join(said.splitlines(keepends=True)[-1:])  # it may print, and warn, before that
    sentence = (
        said.startswith("spillway: ") and said.endswith(".\n") and said.count("\n") == 1 and said[:-1].isprintable()
    )
    if code in (1, 2) and sentence:
        return "refused", said
    return ("read", "") if not code else ("not_a_sentence", said)


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    def over(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# ---------------------------------------------------------------------- kinds


def kinds_in(folder: Path) -> Sequence[Kind]:
    step = timed(training_step(3, layers=3), DEVICES["a100"])
    facts = {"batch": 3, "options": {"length": [1, 2]}}
    write_step(folder / "good.jsonl", Recorded(step=step, workload="small", size=3, facts=facts))
    write_device(folder / "good.json", DEVICES["a100"], {"key": 1})
    stepped, device = ((folder / name).read_bytes() for name in ("good.jsonl", "good.json"))
    network = GatedNetwork(3)
    learned = RecordedSamples(
        architecture=network.architecture, samples=tuple(network.samples(16)), facts={"seed": 0, "options": {"a": [1]}}
    )
    write_samples(folder / "good.gz", learned)
    samples = (folder / "good.gz").read_bytes()
    trials, machine = cache_file(_KEY), measured._cache(measured._key(Path(tempfile.gettempdir())))
    return (
        Kind(name="run", whole=_run_file(folder, step), change=changed_lines, call=_report, share=4.0),
        Kind(name="step", whole=stepped, change=changed_lines, call=_step_verb, share=4.0),
        Kind(name="step, compressed", whole=gzip.compress(stepped), change=_compressed, call=_step_verb, ending=".gz"),
        Kind(name="device", whole=device, change=changed_document, call=_device_verb, ending=".json", share=2.0),
        Kind(name="log", whole=_log(), change=changed_lines, call=_step_verb, ending=".log", share=2.0),
        Kind(name="log, zipped", whole=_zipped(_log()), change=_rezipped, call=_zip_verb, ending=".zip"),
        Kind(name="measurements", whole=_MEASURED, change=changed_cells, call=_from_verb, ending=".csv", share=2.0),
        Kind(name="remembered trials", whole=_trials(), change=changed_lines, call=_advise_verb, at=trials, share=2.0),
        Kind(name="remembered machine", whole=_machine(device), change=changed_document, call=_here_verb, at=machine),
        Kind(name="workload", whole=WORKLOAD.encode(), change=changed_source, call=_record_verb, ending=".py",
             share=0.5),
        Kind(name="samples", whole=samples, change=_compressed, call=_train_verb, ending=".gz"),
        Kind(name="pilot", whole=_pilot_file(folder, network), change=_compressed, call=_show_verb, ending=".gz"),
    )  # fmt: skip


_KEY: Final = {"machine": "none", "spillway": spillway.__version__}
_MEASURED: Final = (
    "hardware,network,algorithm,batch_size,peak_mb,ips,batch_time_s,layer_num,hidden_size,fp16,source\n"
    + "".join(
        f"v100,bert,{method},{size},{500 + each * size},{speed * size / (size + 3)},,12,768,0,a/mem_r.json\n"
        for method, each, speed in (("plain", 90, 40), ("ckpt", 30, 33), ("swap", 25, 12))
        for size in (1, 2, 4, 8)
    )
    + "v100,bert,plain,16,1,-1,,12,768,0,a/mem_r.json\n"
).encode()  # fmt: skip


@final
class _Bench(AbstractBench):
    """In place of one that measures: what the file does not say is the same every time."""

    name, hardware = "own", "this CPU"
    facts: Mapping[str, Any] = {"hardware": "this CPU", "gradient_bytes": 4096, "device_bytes": None}

    def __init__(self, *arguments: object, **options: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def key(self) -> dict[str, Any]:
        return {"machine": "none"}

    def measure(self, method: str, size: int) -> Trial:
        slower, each = (1.0, 90_000) if method == "plain" else (1.3, 30_000)
        return Trial(method=method, size=size, peak=500_000 + each * size, seconds=slower * (size + 3) * 1e-3)


@contextlib.contextmanager
def elsewhere(folder: Path) -> Iterator[None]:
    """Caches lie in that folder, nothing is measured, and what every call would make anew is made once."""
    with (
        patch.object(cli, "app", get_command(cli.app)),
        patch.object(html, "template", cache(html.template)),
        patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder)}),
        patch.object(advise, "RealBench", _Bench),
        patch.object(measured, "measure", lambda directory: replace(DEVICES["a100"], name="here")),
    ):
        (folder / "spillway").mkdir()
        yield


def _run_file(folder: Path, step: Step) -> bytes:
    ran = simulate(step, 0.7, "delta")
    report = replace(report_of(ran), logged={"loss": 1.5, "norm": 2.0}, refusals={"not away": 3}, input_size=[3, 4])
    with RunWriter(
        folder / "run", {"budget_bytes": 5, "method": "lru", "workload": "small", "options": {"a": [1]}}
    ) as run:
        for number in range(3):
            run.append({"step": replace(report, step=number).to_json()})
        run.append({"timeline": ran.timeline.to_json()})
    return (folder / "run").read_bytes()


def _pilot_file(folder: Path, network: GatedNetwork) -> bytes:
    pilot = DecisionPilot(Program(network.architecture), width=3)
    pilot.fit(network.samples(16), epochs=1)
    write_pilot(folder / "pilot", SavedPilot(pilot=pilot, facts={"samples": 16}))
    return (folder / "pilot").read_bytes()


def _log() -> bytes:
    lines: list[dict[str, Any]] = [{"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"}]
    for name in ("w", "x"):
        lines += [{"INSTRUCTION": "CONSTANT", "NAME": name}, {"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": "8192"}]
    lines.append({"INSTRUCTION": "COPY", "SRC": "w", "DST": "p"})
    for number, args in enumerate((["x", "p"], ["a0"], ["a0", "a1"], ["a2", "p"])):
        if number == 2:
            lines.append({"INSTRUCTION": "ANNOTATE", "ANNOTATION": "BACKWARD"})
        made = f"a{number}"
        lines += [
            {"INSTRUCTION": "CALL", "NAME": "mm", "ARGS": args, "RESULT": [made], "TIME": "50000"},
            {"INSTRUCTION": "MEMORY", "NAME": made, "MEMORY": "8192"},
            {"INSTRUCTION": "ALIAS", "NAME": made, "ALIAS": "-1"},
        ]
    lines.append({"INSTRUCTION": "MUTATE", "NAME": "add_", "ARGS": ["p", "a3"], "MUTATE": [0], "TIME": "900"})
    lines.append({"INSTRUCTION": "COPY_FROM", "SRC": "a3", "DST": "a2"})
    lines += [{"INSTRUCTION": "RELEASE", "NAME": name} for name in ("a0", "a1")]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def _zipped(content: bytes, name: str = "small.log") -> bytes:
    out = io.BytesIO()
    with ZipFile(out, "w", ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return out.getvalue()


def _rezipped(whole: bytes, random: Random) -> bytes:
    if random.random() < 0.5:
        return odd_bytes(whole, random)
    return _zipped(changed_lines(_log(), random))


def _compressed(whole: bytes, random: Random) -> bytes:
    if random.random() < 0.3:
        return odd_bytes(whole, random)
    changed = gzip.compress(changed_lines(gzip.decompress(whole), random))
    return changed if random.random() < 0.7 else odd_bytes(changed, random)


def _trials() -> bytes:
    records: list[dict[str, Any]] = [{"key": _KEY}, {"facts": dict(_Bench.facts)}]
    for method, size in product(("plain", "checkpoint"), (2, 4, 8)):
        records.append({"trial": replace(_Bench().measure(method, size), by_kind={"activations": 5}).to_json()})
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def _machine(device: bytes) -> bytes:
    return json.dumps(
        json.loads(device) | {"facts": {"key": dict(measured._key(Path(tempfile.gettempdir())))}}
    ).encode()


# ---------------------------------------------------------------------- verbs


def _report(path: Path, random: Random) -> None:
    page = path.parent / "page.html"
    main(["report", str(path), "--output", str(page), "--perfetto", str(page.with_name("page.json"))])


def _step_verb(path: Path, random: Random) -> None:
    page, way = str(path.parent / "page.html"), random.randrange(20)
    if way == 0:
        main(["compare", str(path), "--methods", "lru,swap", "--budgets", "0.7", "--processes", "1", "-o", page,
              "--bounds"])  # fmt: skip
    elif way < 5:
        main(["plan", str(path), "--budget", "1.0", "--method", random.choice(("swap", "sqrt-n", "zero-offload"))])
    elif way < 8:
        main(["compare", str(path), "--methods", "dtr,uvm", "--budgets", "0.7", "--processes", "1", "--json"])
    else:
        main(["simulate", str(path), "--budget", "0.7", "--method", random.choice(("lru", "delta")), "--allocator",
              random.choice(("exact", "caching")), *(["--measured"] if way < 12 else [])])  # fmt: skip


def _zip_verb(path: Path, random: Random) -> None:
    main(["simulate", f"{path}:{random.choice(('small', 'small.log', 'other'))}", "--budget", "0.7"])


def _device_verb(path: Path, random: Random) -> None:
    good = str(path.parent / "good.jsonl")
    if random.random() < 0.03:
        main(["compare", good, "--device", str(path), "--methods", "lru", "--budgets", "0.7", "--processes", "1", "-o",
              str(path.parent / "page.html"), "--no-bounds"])  # fmt: skip
    else:
        main([*random.choice((["simulate", good], ["plan", good, "--method", "swap"])), "--budget", "1.0", "--device",
              str(path)])  # fmt: skip


def _here_verb(path: Path, random: Random) -> None:
    main(["simulate", str(path.parent.parent / "good.jsonl"), "--budget", "0.7", "--device", "here"])


def _from_verb(path: Path, random: Random) -> None:
    page = ["-o", str(path.parent / "page.html")] if random.random() < 0.05 else ["--json"] * (random.random() < 0.3)
    devices = ["--devices", "1,4", "--gradients", "1MB", "--link", "1GB/s"] * (random.random() < 0.2)
    main(["advise", "--from", str(path), *page, *devices])


def _train_verb(path: Path, random: Random) -> None:
    kind = random.choice(("decisions", "published"))
    trained = str(path.with_name("trained"))
    main(["pilot", "train", str(path), "-o", trained, "--pilot", kind, "--width", "2", "--epochs", "1"])


def _show_verb(path: Path, random: Random) -> None:
    judged = ["--samples", str(path.with_name("good.gz"))] if random.random() < 0.5 else []
    main(["pilot", "show", str(path), *judged, *["--architecture"] * (random.random() < 0.2)])


def _advise_verb(path: Path, random: Random) -> None:
    page = ["-o", str(path.parent.parent / "page.html")] if random.random() < 0.03 else []
    main(["advise", "own", "--memory", "2MB", "--batches", "2,4,8", "--methods", "checkpoint", *page])


def _record_verb(path: Path, random: Random) -> None:
    main(["record", f"{path}:build", "--fake", "-o", str(path.parent / "recorded")])
