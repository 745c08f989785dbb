"""Any step under any method on paper: it ends with figures or a refusal, and what is drawn is what was counted."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from spillway.errors import BudgetInfeasible
from spillway.methods import METHODS, Checkmate, method_named
from spillway.simulation.allocators import ALLOCATORS
from spillway.simulation.paper_machine import TIERS, Tier
from spillway.simulation.simulated_engine import Simulation, simulate
from tests.pure.recorded import DEVICE
from tests.pure.training_steps import any_step

QUICK = sorted(name for name in METHODS if name != Checkmate.name)
"""All but the one that searches by the clock."""


def consistent(ran: Simulation, allowed: int) -> None:
    """The timeline holds every storage that the account counted, from the step's beginning to its end."""
    assert ran.peak_bytes <= allowed or ran.status != "ok"
    assert ran.timeline.peak() <= ran.peak_bytes
    if not ran.bytes_in_beside:  # what is on its way in counts from its beginning, and is drawn when it is there
        assert ran.timeline.peak() == ran.peak_bytes
        assert ran.timeline.resident()[-1][1] >= ran.end_bytes


@settings(max_examples=250)
@given(
    seed=st.integers(0, 1 << 16),
    method=st.sampled_from([*QUICK, *["delta", "delta-published"] * 3]),
    share=st.one_of(st.floats(0.3, 1.0), st.floats(0.85, 1.0)),
    slow=st.sampled_from([1.0, 1.0, 0.01]),
    tier=st.sampled_from(TIERS),
    allocator=st.sampled_from(sorted(ALLOCATORS)),
    steps=st.integers(1, 3),
)
@example(seed=134, method="delta-published", share=0.9, slow=0.01, tier="host", allocator="chunks", steps=2)
@example(seed=96, method="delta", share=0.95, slow=0.01, tier="host", allocator="caching", steps=2)
def test_any_method_on_any_step_ends_with_figures_or_a_refusal(
    seed: int, method: str, share: float, slow: float, tier: Tier, allocator: str, steps: int
) -> None:
    step = any_step(seed)
    allowed = max(int(step.plain_peak() * share), 1)
    device = replace(
        DEVICE, in_per_second=DEVICE.in_per_second * slow, out_per_second=DEVICE.out_per_second * slow, op_seconds=0.0
    )
    try:
        ran = simulate(
            step, allowed=allowed, method=method_named(method), device=device, tier=tier, allocator=allocator,
            steps=steps,
        )  # fmt: skip
    except BudgetInfeasible as error:
        event("no plan")
        assert error.allowed == allowed < error.smallest_budget
        return
    event(ran.status)
    assert bool(ran.why) == (ran.status != "ok")
    if ran.status == "ok":
        consistent(ran, allowed)
