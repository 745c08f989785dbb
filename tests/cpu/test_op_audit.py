from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from spillway.engines.tensors import ops
from spillway.engines.tensors.ops import NEVER_REPLAYED
from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.memory.budget import UNLIMITED
from spillway.methods import LRU
from tests.cpu.fronts import stand_before
from tests.cpu.op_audit import Audit
from tests.cpu.op_samples import MORE, Case, cases, database
from tests.shared import FULL_AUDIT

"""Six dtypes and four samples of each op, instead of two and one."""


def everything() -> Iterator[Case]:
    yield from MORE
    for op in database():
        yield from cases(op, dtypes=6 if FULL_AUDIT else 2, samples=4 if FULL_AUDIT else 1)


def audited(found: Iterable[Case]) -> Audit:
    """The cases, each in a step of its own; what fails without the engine too is left out."""
    engine = TensorEngine(LRU(short_chain=32, worth=float("inf")), UNLIMITED)
    audit = Audit(engine)
    stand_before(engine, audit.front)
    try:
        for case in found:
            run_one(audit, case)
    finally:
        engine.close()
    return audit


def run_one(audit: Audit, case: Case) -> None:
    audit.case, audit.cases = case.name, audit.cases + 1
    torch.default_generator.manual_seed(0)
    audit.engine.begin_step([])
    versions, failure = None, None
    try:
        versions = case.call()
    except Exception as error:
        failure = error
    audit.engine.end_step()
    if failure is not None and not fails_alone(case, type(failure)):
        audit.found["failures"][f"{type(failure).__name__}: {failure}"].add(case.name)
    if isinstance(versions, list) and versions != case.call():
        audit.found["versions"]["other versions than without the engine"].add(case.name)


def fails_alone(case: Case, kind: type[Exception]) -> bool:
    try:
        case.call()
    except kind:
        return True
    return False


@pytest.fixture(scope="module")
def audit(request: pytest.FixtureRequest) -> Iterator[Audit]:
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")  # the database tries what is deprecated too
        audit = audited(everything())
    yield audit
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(
            f"\nop audit: {audit.cases} cases, {len(audit.seen)} overloads seen, {len(audit.replayed)} replayed, "
            f"{len(audit.restored)} dropped and restored"
        )


def complaints(audit: Audit, topic: str) -> dict[str, list[str]]:
    return {what: sorted(where)[:3] for what, where in sorted(audit.found[topic].items())}


@pytest.mark.long
def test_every_op_is_replayed_bit_for_bit_or_stands_in_the_table_of_those_that_are_not(audit: Audit) -> None:
    assert complaints(audit, "replays") == {}


@pytest.mark.long
def test_no_op_creates_more_bytes_than_were_expected_of_it(audit: Audit) -> None:
    assert complaints(audit, "sizes") == {}


@pytest.mark.long
def test_no_op_writes_what_neither_its_schema_nor_the_tables_name(audit: Audit) -> None:
    assert complaints(audit, "writes") == {}


@pytest.mark.long
def test_the_account_knows_every_storage_that_an_op_leaves_behind(audit: Audit) -> None:
    assert complaints(audit, "account") == {}


@pytest.mark.long
def test_writes_in_place_count_as_versions_as_often_as_without_the_engine(audit: Audit) -> None:
    assert complaints(audit, "versions") == {}


@pytest.mark.long
def test_no_op_fails_under_the_engine_that_runs_without_it(audit: Audit) -> None:
    assert complaints(audit, "failures") == {}


@pytest.mark.long
def test_the_audit_covers_what_it_is_said_to_cover(audit: Audit) -> None:
    assert len(audit.seen) >= 1000
    assert len(audit.replayed) >= 950
    assert len(audit.restored) >= 920


def test_every_op_that_is_never_replayed_has_a_reason_and_exists() -> None:
    for name, reason in NEVER_REPLAYED.items():
        assert hasattr(torch.ops.aten, name.removeprefix("aten::")), name
        assert len(reason.split()) > 3, name


@pytest.fixture(scope="module")
def liars() -> Iterator[Any]:
    """Ops that do each what the audit is there to find."""
    library = torch.library.Library("spillway_liars", "DEF")
    calls, attempts = itertools.count(), itertools.count()

    def drifts(x: Tensor) -> Tensor:
        return x + next(calls)

    def scribbles(x: Tensor) -> Tensor:
        x.add_(1.0)
        return x.clone()

    def understates(x: Tensor) -> Tensor:
        return torch.cat([x, x, x])

    def gives_up(x: Tensor) -> Tensor:
        if next(attempts) % 2:
            raise RuntimeError("once is enough")
        return x.clone()

    def aliases(x: Tensor) -> Tensor:
        return x.clone()

    for implementation in (drifts, scribbles, understates, gives_up):
        library.define(f"{implementation.__name__}(Tensor x) -> Tensor")
    library.define("aliases(Tensor(a) x) -> Tensor(a)")
    for implementation in (drifts, scribbles, understates, gives_up, aliases):
        library.impl(implementation.__name__, implementation, "CPU")
        library.impl(implementation.__name__, torch.empty_like, "Meta")
    yield torch.ops.spillway_liars
    library._destroy()


@pytest.mark.parametrize(
    ("liar", "topic"),
    [
        ("drifts", "replays"),
        ("scribbles", "writes"),
        ("understates", "sizes"),
        ("gives_up", "replays"),
        ("aliases", "account"),
    ],
)
def test_an_op_that_lies_is_found_out(monkeypatch: pytest.MonkeyPatch, liars: Any, liar: str, topic: str) -> None:
    monkeypatch.setattr(ops, "OWN_OPS", ops.OWN_OPS | {"spillway_liars"})  # any other custom op is never run again
    audit = audited([Case(liar, lambda: getattr(liars, liar)(torch.ones(64, 64)))])
    assert any(liar in what for what in audit.found[topic])


def test_an_op_that_fails_only_under_the_engine_is_found_out() -> None:
    attempts = itertools.count()

    def fails_first() -> None:
        if next(attempts) == 0:
            raise RuntimeError("not this time")

    assert list(audited([Case("first", fails_first)]).found["failures"]) == ["RuntimeError: not this time"]
