"""Literal plans for a literal step, with literal verdicts: a rule's name, or a peak in bytes."""

from __future__ import annotations

import pickle
import re
import sys
from dataclasses import replace

import pytest

from spillway.errors import PlanRejected
from spillway.ir import Gap, Home, Host, Kind, Op, Phase, Plan, Recompute, Rule, Step, Value, verify
from spillway.ir import StorageInfo as Info
from tests.pure.counted_lines import grows_no_faster_than_n_log_n, lines_run
from tests.pure.linear_graphs import linear_step

# Sizes are powers of two, so that a sum of bytes says which storages it is made of. Values by name:
W, X, A, B, B1, C, L, G, GW, W1 = range(10)
STEP = Step(
    storages=(
        WEIGHT := Info(
            id=0,
            nbytes=1,
            kind=Kind.PARAMETER,
            alive_from=0,
            alive_until=8,
            present_at_start=True,
            present_at_end=True,
        ),
        INPUT := Info(id=1, nbytes=2, kind=Kind.INPUT, alive_from=0, alive_until=3, present_at_start=True),
        Info(id=2, nbytes=4, kind=Kind.ACTIVATION, alive_from=0, alive_until=7),
        Info(id=3, nbytes=8, kind=Kind.ACTIVATION, alive_from=1, alive_until=6),
        Info(id=4, nbytes=16, kind=Kind.ACTIVATION, alive_from=2, alive_until=7),
        Info(id=5, nbytes=32, kind=Kind.TEMPORARY, alive_from=4, alive_until=6),
        Info(id=6, nbytes=64, kind=Kind.TEMPORARY, alive_from=5, alive_until=7),
        Info(id=7, nbytes=128, kind=Kind.GRADIENT, alive_from=6, alive_until=8),
    ),
    values=(
        Value(id=W, storage=0, version=0),
        Value(id=X, storage=1, version=0),
        Value(id=A, storage=2, version=0),
        Value(id=B, storage=3, version=0),
        Value(id=B1, storage=3, version=1),
        Value(id=C, storage=4, version=0),
        Value(id=L, storage=5, version=0),
        Value(id=G, storage=6, version=0),
        Value(id=GW, storage=7, version=0),
        Value(id=W1, storage=0, version=1),
    ),
    ops=(
        Op(number=0, name="mm", phase=Phase.FORWARD, reads=(X, W), creates=(A,)),
        Op(number=1, name="dropout", phase=Phase.FORWARD, reads=(A,), creates=(B,), seeded=True),
        Op(number=2, name="mul", phase=Phase.FORWARD, reads=(B, X), creates=(C,)),
        Op(number=3, name="relu_", phase=Phase.FORWARD, reads=(B,), creates=(B1,)),
        Op(number=4, name="ctc_loss", phase=Phase.FORWARD, reads=(B1, C), creates=(L,), replayable=False),
        Op(number=5, name="ctc_loss_backward", phase=Phase.BACKWARD, reads=(L, B1), creates=(G,)),
        Op(number=6, name="mm_backward", phase=Phase.BACKWARD, reads=(G, C, A), creates=(GW,)),
        Op(number=7, name="add_", phase=Phase.OPTIMIZER, reads=(W, GW), creates=(W1,)),
    ),
)
PLAIN_PEAK = 213  # During op 6: W, A, C, G and GW.


def gap(value: int, start: int, end: int, home: Home) -> Gap:
    return Gap(value=value, start=start, end=end, home=home)


def plan(*gaps: Gap, step: Step = STEP, projected: int = 10**6) -> Plan:
    return Plan(step=step.digest(), allowed=projected, projected=projected, gaps=gaps)


def rule_broken(given: Plan, allowed: int = 10**6, *, step: Step = STEP) -> str | None:
    """The verdict: the rule that the plan breaks, or None."""
    try:
        verify(given, step, allowed)
    except PlanRejected as rejected:
        return rejected.rule
    return None


def counted_peak(given: Plan, *, step: Step = STEP) -> int:
    """The smallest number of bytes under which the plan verifies."""
    return next(nbytes for nbytes in range(10**4) if rule_broken(given, nbytes, step=step) is None)


LATE_INPUT = replace(STEP, storages=(WEIGHT, replace(INPUT, alive_until=4), *STEP.storages[2:]))
LATER_INPUT = replace(STEP, storages=(WEIGHT, replace(INPUT, alive_until=5), *STEP.storages[2:]))

# A step that fills what outlives it without reading it. Values by name:
M, T, M1, U = range(4)
FILL = Step(
    storages=(
        replace(WEIGHT, kind=Kind.OPTIMIZER_STATE, alive_until=3),
        Info(id=1, nbytes=2, kind=Kind.ACTIVATION, alive_from=0, alive_until=3),
        Info(id=2, nbytes=4, kind=Kind.ACTIVATION, alive_from=2, alive_until=3),
    ),
    values=(
        Value(id=M, storage=0, version=0),
        Value(id=T, storage=1, version=0),
        Value(id=M1, storage=0, version=1),
        Value(id=U, storage=2, version=0),
    ),
    ops=(
        Op(number=0, name="randn", phase=Phase.FORWARD, reads=(), creates=(T,), seeded=True),
        Op(number=1, name="copy_", phase=Phase.FORWARD, reads=(T,), creates=(M1,)),
        Op(number=2, name="mul", phase=Phase.BACKWARD, reads=(T,), creates=(U,)),
    ),
)

# The same, but that T outlives it, and that nothing reads T after op 1.
KEPT_FILL = replace(
    FILL,
    storages=(FILL.storages[0], replace(FILL.storages[1], present_at_end=True), FILL.storages[2]),
    ops=(*FILL.ops[:2], replace(FILL.ops[2], reads=())),
)

# A step in which two values are read together twice. Values by name:
V, P, Q, R, S, Z = range(6)
TWINS = Step(
    storages=(
        replace(WEIGHT, alive_until=5),
        *(
            Info(id=number, nbytes=2**number, kind=Kind.ACTIVATION, alive_from=number - 1, alive_until=5)
            for number in range(1, 6)
        ),
    ),
    values=tuple(Value(id=number, storage=number, version=0) for number in range(6)),
    ops=(
        Op(number=0, name="relu", phase=Phase.FORWARD, reads=(V,), creates=(P,)),
        Op(number=1, name="gelu", phase=Phase.FORWARD, reads=(V,), creates=(Q,)),
        Op(number=2, name="add", phase=Phase.FORWARD, reads=(P, Q), creates=(R,)),
        Op(number=3, name="tanh", phase=Phase.FORWARD, reads=(V,), creates=(S,)),
        Op(number=4, name="mul", phase=Phase.FORWARD, reads=(P, Q), creates=(Z,)),
    ),
)

# The same, but that nothing reads V after op 1, and that the last op fills its storage anew.
FILLED_TWINS = replace(
    TWINS,
    values=(*TWINS.values, Value(id=6, storage=0, version=1)),
    ops=(*TWINS.ops[:3], replace(TWINS.ops[3], reads=()), replace(TWINS.ops[4], creates=(Z, 6))),
)


def test_an_empty_plan_needs_the_plain_peak() -> None:
    assert counted_peak(plan()) == STEP.plain_peak() == PLAIN_PEAK


@pytest.mark.parametrize(
    ("gaps", "peak"),
    [
        # W is read by no op from 1 to 6, and so is not there during op 6, the fullest.
        ([gap(W, 1, 7, Host())], 212),
        # Before op 6 there are W, A, C, G, the held X and the temporaries, and GW is not there yet.
        ([gap(A, 2, 6, Recompute(ops=(0,), held=(X,), temporaries=1000))], 1087),
        # Replays run one by one: the smaller temporaries are gone when the larger come.
        (
            [
                gap(A, 2, 6, Recompute(ops=(0,), held=(X,), temporaries=1000)),
                gap(C, 5, 6, Recompute(ops=(1, 2), held=(X,), temporaries=900)),
            ],
            1087,
        ),
        # A gap that is over counts no more, one that has not begun counts not yet.
        ([gap(A, 2, 3, Host()), gap(A, 3, 4, Host())], PLAIN_PEAK),
    ],
)
def test_bytes_are_counted_op_by_op(gaps: list[Gap], peak: int) -> None:
    assert counted_peak(plan(*gaps)) == peak


def test_what_waits_elsewhere_counts_not_even_if_it_is_held() -> None:
    held = gap(A, 3, 6, Recompute(ops=(0,), held=(X,)))
    counted = plan(held, gap(X, 3, 4, Host()), gap(W, 3, 4, Host()), step=LATER_INPUT)
    assert list(sys.modules[verify.__module__]._during(counted, LATER_INPUT))[3] == 24  # B and C


def test_what_waits_elsewhere_at_the_end_may_stay_there() -> None:
    assert counted_peak(plan(gap(M1, 2, 3, Host()), step=FILL), step=FILL) == 6


def test_a_recipe_that_ends_with_the_step_is_replayed_after_the_last_op() -> None:
    home = Recompute(ops=(1,), held=(T,), temporaries=100)
    assert counted_peak(plan(gap(M1, 2, 3, home), step=FILL), step=FILL) == 103


@pytest.mark.parametrize(
    ("gaps", "step"),
    [
        # Both ends of what is possible: right after the op that creates it, and up to the op that reads it.
        ([gap(A, 2, 6, Host())], STEP),
        ([gap(X, 1, 2, Host())], STEP),
        ([gap(W, 1, 7, Host()), gap(A, 2, 4, Host()), gap(A, 4, 6, Host())], STEP),
        # A gap that begins where a leaf dies holds it in time.
        ([gap(A, 3, 6, Recompute(ops=(0,), held=(X,)))], STEP),
        ([gap(C, 3, 4, Recompute(ops=(1, 2), held=(X,), temporaries=8))], STEP),
        # A leaf that is back before the same op is there.
        ([gap(A, 2, 6, Recompute(ops=(0,), held=(X,))), gap(W, 1, 6, Host())], STEP),
        # One gap takes over from another what both hold.
        ([gap(A, 2, 5, Recompute(ops=(0,), held=(X,))), gap(A, 5, 6, Recompute(ops=(0,), held=(X,)))], STEP),
        # What is dead or written over, unread, when the gap ends does not come back, and needs no recipe.
        ([gap(X, 3, 4, Recompute(ops=()))], LATE_INPUT),
        ([gap(M, 0, 1, Recompute(ops=()))], FILL),
        ([gap(R, 3, 5, Recompute(ops=()))], TWINS),
        # What outlives the step does come back.
        ([gap(M1, 2, 3, Recompute(ops=(1,)))], KEPT_FILL),
        # Of the recipe's outputs P and Q are there at once.
        ([gap(R, 3, 4, Recompute(ops=(0, 1, 2), temporaries=6))], TWINS),
        # A source may wait elsewhere since before the step.
        ([gap(M, 0, 1, Host())], FILL),
        # Each needs the other's storage, and neither waits for the other.
        ([gap(P, 3, 4, Recompute(ops=(0,))), gap(Q, 3, 4, Recompute(ops=(1,)))], TWINS),
        ([gap(P, 3, 4, Recompute(ops=(0, 2), temporaries=8)), gap(Q, 3, 4, Host())], TWINS),
        ([gap(P, 3, 4, Recompute(ops=(0,))), gap(V, 2, 3, Host())], FILLED_TWINS),
    ],
)
def test_a_plan_that_could_run_is_accepted(gaps: list[Gap], step: Step) -> None:
    assert rule_broken(plan(*gaps, step=step), step=step) is None


@pytest.mark.parametrize(
    ("gaps", "step", "rule"),
    [
        ([gap(10, 1, 2, Host())], STEP, "unknown-name"),
        ([gap(-1, 1, 2, Host())], STEP, "unknown-name"),
        ([gap(GW, 8, 9, Host())], STEP, "unknown-name"),
        ([gap(A, 2, 6, Recompute(ops=(8,)))], STEP, "unknown-name"),
        ([gap(A, 2, 6, Recompute(ops=(0,), held=(10,)))], STEP, "unknown-name"),
        ([gap(A, 0, 1, Host())], STEP, "gap-before-creation"),
        ([gap(C, 1, 4, Host())], STEP, "gap-before-creation"),
        ([gap(B, 3, 4, Host())], STEP, "gap-after-overwrite"),
        ([gap(B, 5, 6, Host())], STEP, "gap-after-overwrite"),
        ([gap(X, 3, 4, Host())], STEP, "gap-after-death"),
        ([gap(A, 7, 8, Host())], STEP, "gap-after-death"),
        ([gap(A, 1, 6, Host())], STEP, "gap-over-read"),
        ([gap(A, 2, 7, Host())], STEP, "gap-over-read"),
        ([gap(W, 0, 1, Host())], STEP, "gap-over-read"),
        ([gap(A, 2, 5, Host()), gap(A, 4, 6, Host())], STEP, "overlapping-gaps"),
        ([gap(A, 2, 6, Host()), gap(A, 2, 6, Host())], STEP, "overlapping-gaps"),
        ([gap(A, 2, 6, Recompute(ops=(), held=(X,)))], STEP, "recipe-without-value"),
        ([gap(A, 2, 6, Recompute(ops=(1,), held=(X,)))], STEP, "recipe-without-value"),
        ([gap(W, 1, 7, Recompute(ops=(0,), held=(X,)))], STEP, "recipe-without-value"),
        ([gap(C, 3, 4, Recompute(ops=(1, 2, 4), held=(X,), temporaries=8))], STEP, "not-replayable"),
        # The recipe reads B before it creates it.
        ([gap(C, 3, 4, Recompute(ops=(2, 1), held=(X,), temporaries=8))], STEP, "cyclic-recipe"),
        # The recipe reads what it is to bring back.
        ([gap(P, 3, 4, Recompute(ops=(2, 0), temporaries=8))], TWINS, "cyclic-recipe"),
        # The recipe runs the very op that waits for it.
        ([gap(P, 3, 4, Recompute(ops=(0, 4), temporaries=32))], TWINS, "cyclic-recipe"),
        # Each replay reads what the other brings back.
        (
            [
                gap(P, 3, 4, Recompute(ops=(0, 2), temporaries=8)),
                gap(Q, 3, 4, Recompute(ops=(1, 2), temporaries=8)),
            ],
            TWINS,
            "cyclic-recipe",
        ),
        # The leaf is not there: it is in a gap, or was when it died, or is in one that does not come back.
        ([gap(A, 2, 6, Recompute(ops=(0,), held=(X,))), gap(W, 1, 7, Host())], STEP, "missing-leaf"),
        ([gap(A, 3, 6, Recompute(ops=(0,), held=(X,))), gap(X, 3, 4, Host())], LATE_INPUT, "missing-leaf"),
        ([gap(P, 3, 4, Recompute(ops=(0,))), gap(V, 2, 4, Host())], FILLED_TWINS, "missing-leaf"),
        ([gap(M1, 2, 3, Recompute(ops=(1,))), gap(T, 2, 3, Host())], KEPT_FILL, "missing-leaf"),
        # The leaf is dead: not held, held by another gap only, or by this one too late.
        ([gap(A, 2, 6, Recompute(ops=(0,)))], STEP, "missing-leaf"),
        ([gap(A, 2, 3, Recompute(ops=(0,)))], STEP, "missing-leaf"),
        ([gap(C, 3, 4, Recompute(ops=(1, 2), temporaries=8))], STEP, "missing-leaf"),
        ([gap(A, 4, 6, Recompute(ops=(0,), held=(X,)))], STEP, "missing-leaf"),
        (
            [gap(A, 2, 4, Recompute(ops=(0,), held=(X,))), gap(A, 5, 6, Recompute(ops=(0,), held=(X,)))],
            STEP,
            "missing-leaf",
        ),
        # The leaf has been overwritten, held or not: B by op 3.
        ([gap(C, 3, 4, Recompute(ops=(2,), held=(X,)))], STEP, "missing-leaf"),
        ([gap(C, 3, 4, Recompute(ops=(2,), held=(X, B)))], STEP, "missing-leaf"),
        # B is a temporary of the recipe.
        ([gap(C, 3, 4, Recompute(ops=(1, 2), held=(X,), temporaries=7))], STEP, "understated-replay"),
        ([gap(P, 3, 4, Recompute(ops=(0, 2), temporaries=7)), gap(Q, 3, 4, Host())], TWINS, "understated-replay"),
        ([gap(R, 3, 4, Recompute(ops=(0, 1, 2), temporaries=5))], TWINS, "understated-replay"),
    ],
)
def test_a_plan_that_could_not_run_is_rejected_by_the_rule_it_breaks(gaps: list[Gap], step: Step, rule: str) -> None:
    assert rule_broken(plan(*gaps, step=step), step=step) == rule


def test_a_plan_is_for_one_step() -> None:
    assert rule_broken(plan(step=FILL)) == "other-step"


def test_a_plan_over_budget_is_rejected() -> None:
    assert rule_broken(plan(), PLAIN_PEAK) is None
    assert rule_broken(plan(), PLAIN_PEAK - 1) == "over-budget"


def test_a_plan_may_not_project_less_than_it_needs() -> None:
    assert rule_broken(plan(projected=PLAIN_PEAK)) is None
    assert rule_broken(plan(projected=PLAIN_PEAK - 1)) == "understated-peak"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            plan(gap(A, 1, 6, Host())),
            "gap-over-read: value 2 during [1, 6): host holds op 1 (dropout), which reads the value.",
        ),
        (
            plan(gap(C, 3, 4, Recompute(ops=(2,), held=(X,)))),
            "missing-leaf: value 5 during [3, 4): recompute by ops 2, holding values 1, temporaries 0 B: at the replay "
            "before op 4, s3@0 has been overwritten by op 3: the version is stale.",
        ),
        (plan(), "over-budget: during op 6 (mm_backward) 213 B are resident, 212 B are allowed."),
    ],
)
def test_a_rejection_is_a_sentence_that_names_the_op(given: Plan, sentence: str) -> None:
    with pytest.raises(PlanRejected) as caught:
        verify(given, STEP, 212)
    assert str(caught.value).endswith(sentence)
    assert pickle.loads(pickle.dumps(caught.value)).rule == caught.value.rule


def test_the_note_lists_the_rules_by_name_and_in_order() -> None:
    note = sys.modules[verify.__module__].__doc__
    assert re.findall(r"^ ?\d+\. ([a-z-]+):", note or "", flags=re.MULTILINE) == list(Rule)


@pytest.mark.parametrize("recomputed", [False, True])
def test_judging_grows_no_faster_than_n_log_n(recomputed: bool) -> None:
    module, counts = sys.modules[verify.__module__], {}
    for layers in (200, 800, 3200):
        step = linear_step(layers, nbytes=8192)
        # Op v - 1 makes value v from the one before it, which stays; the last to read it is op 2 * layers - v.
        gaps = tuple(
            Gap(value=v, start=v + 1, end=2 * layers - v, home=Recompute(ops=(v - 1,)) if recomputed else Host())
            for v in range(1, layers - 1, 2)
        )
        plan = Plan(step=step.digest(), allowed=1 << 40, projected=1 << 40, gaps=gaps)
        counts[len(step.ops)] = lines_run(module, lambda: verify(plan, step, plan.allowed))  # noqa: B023
    assert grows_no_faster_than_n_log_n(counts)
