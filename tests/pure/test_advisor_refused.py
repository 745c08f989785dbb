"""What a campaign does with steps that fail, and what is answered where nothing can be fitted; without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from spillway.advisor.bench import Trial
from spillway.advisor.campaign import Campaign
from spillway.advisor.measurements import read_measurements, write_measurements
from spillway.advisor.verdict import advise, sentence
from spillway.errors import SpillwayError, TrialError, WorkloadError
from tests.pure.advisor_made import LIMIT, MB, Made, bench, finished, flat_at_first, line


class Refusing(Made):
    """Steps of some sizes fail."""

    refuses: Callable[[str, int], bool] = staticmethod(lambda method, size: False)
    error: type[SpillwayError] = TrialError

    def measure(self, method: str, size: int) -> Trial:
        trial = super().measure(method, size)
        if self.refuses(method, size):
            raise self.error(f"{method} fails at {size}.")
        return trial


def refusing(refuses: Callable[[str, int], bool]) -> Refusing:
    names = ("plain", "swap")
    made = Refusing({name: line(50 * MB, 100 * MB) for name in names}, {name: line(1, 1) for name in names})
    made.refuses = refuses
    return made


def test_what_fails_at_one_sample_is_begun_with_two() -> None:
    made = refusing(lambda method, size: size == 1)
    campaign = finished(Campaign(made, ["plain", "swap"], LIMIT))
    assert made.sizes("plain")[:3] == [1, 2, 4]
    assert made.sizes("swap")[:2] == [2, 4], "plain training has shown it"
    assert campaign.faults == {"plain at batch 1": "plain fails at 1."}
    assert all(row.fitted is not None for row in advise(campaign.experiment(), LIMIT))


@pytest.mark.parametrize("error", [TrialError, SpillwayError])
@pytest.mark.parametrize("batches", [(), (2, 4, 8)])
def test_what_fails_at_larger_sizes_is_answered_from_smaller_ones(
    error: type[SpillwayError], batches: tuple[int, ...]
) -> None:
    made = refusing(lambda method, size: size > 4)
    made.error = error
    campaign = finished(Campaign(made, ["plain", "swap"], LIMIT, batches=batches))
    assert campaign.faults == {f"{method} at batch 8": f"{method} fails at 8." for method in campaign.methods}
    assert sorted(made.sizes("plain")) == ([2, 4, 8] if batches else [1, 2, 3, 4, 8])
    assert all(row.predicted is not None for row in advise(campaign.experiment(), LIMIT))


def test_a_size_between_others_that_fails_is_asked_for_once() -> None:
    made = refusing(lambda method, size: size % 2 == 1)
    campaign = finished(Campaign(made, ["plain"], 500 * MB))
    assert len(made.sizes("plain")) == len(set(made.sizes("plain")))
    assert set(campaign.samples("plain").peaks) >= {2, 4, 6}


def test_only_what_fails_at_every_size_is_not_measured() -> None:
    made = refusing(lambda method, size: method == "swap")
    campaign = finished(Campaign(made, ["plain", "swap"], LIMIT))
    assert campaign.faults == {"swap": "swap fails at 2."}
    assert not campaign.trials["swap"]
    for batches, last in (((), 2), ((3, 5), 5)):
        with pytest.raises(SpillwayError, match=f"plain fails at {last}"):
            list(Campaign(refusing(lambda *_: True), ["plain"], LIMIT, batches=batches).run())


def test_the_same_fault_of_several_methods_is_told_once() -> None:
    class Blockless(Made):
        def measure(self, method: str, size: int) -> Trial:
            if method != "plain":
                raise SpillwayError("No blocks were found.")
            return super().measure(method, size)

    made = Blockless({"plain": line(50 * MB, 100 * MB)}, {"plain": line(1, 1)})
    campaign = finished(Campaign(made, ["plain", "checkpoint", "swap", "compress"], LIMIT))
    assert campaign.faults == {
        "checkpoint": "No blocks were found.",
        "swap": "for the same reason as checkpoint.",
        "compress": "for the same reason as checkpoint.",
    }
    best = advise(campaign.experiment(), LIMIT)[0].predicted
    assert best is not None
    answer = sentence(advise(campaign.experiment(), LIMIT))
    assert f"plain training reaches {best.throughput:.4g} samples/s at batch {best.size}" in answer
    assert answer.endswith("because no method was measured.")


@pytest.mark.parametrize("batches", [(), (2, 4)])
def test_a_workload_whose_batches_ignore_the_size_is_refused(batches: tuple[int, ...]) -> None:
    class Fixed(Made):
        def measure(self, method: str, size: int) -> Trial:
            return replace(super().measure(method, size), by_kind={"input": MB})

    grown = line(50 * MB, 100 * MB)
    made = Fixed({"plain": line(0, 300 * MB)}, {"plain": line(0, 1)})
    with pytest.raises(
        WorkloadError, match=r"does not follow it: its batches of \d and of \d samples have the same 976"
    ):
        list(Campaign(made, ["plain"], LIMIT, batches=batches).run())
    assert len(made.asked) == 2
    made.before["plain"] = grown  # inputs of natural lengths may be alike by chance
    finished(Campaign(made, ["plain"], LIMIT, batches=batches, longest=2))


def test_peaks_that_were_not_seen_to_grow_are_not_said_to_be_missing(tmp_path: Path) -> None:
    made = bench(plain=flat_at_first(300, 1, 100), swap=flat_at_first(300, 1, 100))
    campaign = finished(Campaign(made, ["plain", "swap"], LIMIT, batches=[1, 2, 4]))
    rows = advise(campaign.experiment(), LIMIT)
    assert "because the peak of plain training was not seen to grow with the batch, up to batch 4" in sentence(rows)
    for row in rows:
        assert row.warnings == (
            "Its peak was not seen to grow with the batch up to batch 4, so that no line is fitted: it takes "
            "larger batches.",
        )
    assert campaign.unknown == {}, "how long a step may take decides nothing"
    peaks = {method: dict.fromkeys((1, 2, 4), 300 * MB) for method in campaign.methods}
    write_measurements(tmp_path / "m.csv", [campaign.experiment()], [peaks])
    (read,) = read_measurements(tmp_path / "m.csv")
    assert sentence(advise(read, LIMIT)) == sentence(rows)
    flat_swap = bench(plain=line(50 * MB, 100 * MB), swap=flat_at_first(300, 1, 100))
    rows = advise(finished(Campaign(flat_swap, ["plain", "swap"], LIMIT, batches=[1, 2, 4])).experiment(), LIMIT)
    assert "because no method's peak was seen to grow with the batch" in sentence(rows)
