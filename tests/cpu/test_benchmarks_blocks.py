"""The benchmarks of the block engine and its sessions at their quick sizes. No time is looked at here."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

from tests.cpu.benchmarks_quick import quick, rows_by


@pytest.mark.long
def test_block_exactness_compares_models_under_every_action_mixed_and_revoked() -> None:
    pytest.importorskip("transformers")
    from spillway.methods.actions import LOSSLESS
    from tests.cpu.block_ways import WAYS

    result = quick("block_exactness")
    rows = rows_by(result, "model")
    assert list(rows) == ["GPT-2", "ALBERT", "stochastic-depth"]
    assert set(WAYS) == {action.value for action in LOSSLESS} | {"mixed", "keep, revoked", "mixed, revoked"}
    for row in rows.values():
        assert [row[way].split(",")[0] for way in WAYS] == ["identical"] * len(WAYS)
        assert row["counts"]["recompute"]["recomputes"] == row["counts"]["recompute"]["calls"] > 0
        assert row["counts"]["offload"]["offloaded"] > 0
        assert row["counts"]["keep, revoked"]["revoked"] > 0
    assert any("revoked in the backward" in row["counts"]["keep, revoked"] for row in rows.values())
    assert [check.measured for check in result.checks] == [0, 0, 18]


@pytest.mark.long
def test_block_mixtures_draws_them_on_the_engine_and_in_sessions() -> None:
    result = quick("block_mixtures")
    assert {row["where"] for row in result.rows} == {"engine", "session"}
    assert sum(row["runs"] for row in result.rows) == sum(row["identical"] for row in result.rows) == 17
    assert [check.measured for check in result.checks][:2] == [0, 0]


def test_compression_measures_bytes_bias_and_training() -> None:
    result = quick("compression")
    assert [row["what"] for row in result.rows] == ["held"] * 3 + ["gradient"] * 2 + ["training"] * 2
    assert [row["bits"] for row in result.rows] == [2, 4, 8, 4, 4, "plain", 4]
    assert 0.1 < result.rows[1]["ratio"] < 0.3
    assert all(row["bias"] > 0 for row in result.rows if row["what"] == "gradient")
    assert [check.at_most for check in result.checks] == [0.25, 1.2, 1.2, 0.02]


def test_compression_tells_of_values_that_are_wrong_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import compression
    from spillway.engines.blocks.quantize import Quantized

    unpack = Quantized.unpack
    monkeypatch.setattr(Quantized, "unpack", lambda self, data: unpack(self, data) + 0.01)
    wrong = compression._gradients("linear layers, ReLU", 100)
    assert wrong["bias"] > compression.BIAS


def test_block_exactness_tells_of_a_second_run_that_is_not_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from benchmarks import block_exactness
    from spillway.engines.environment import Environment

    monkeypatch.setattr(Environment, "__call__", lambda self, wanted: contextlib.nullcontext())
    monkeypatch.setattr(block_exactness, "WAYS", {"recompute": block_exactness.WAYS["recompute"]})
    size = dataclasses.replace(block_exactness.BENCHMARK.quick, architectures=("GPT-2",), families=())
    result = block_exactness.BENCHMARK.measured(size, lambda text: None)
    assert result.rows[0]["recompute"].startswith("RecomputeError: The second run of call 0 of transformer.h.")
    assert [check.measured for check in result.checks] == [1, 0, 19]


@pytest.mark.long
def test_block_cost_counts_the_python_calls_that_an_idle_engine_adds() -> None:
    pytest.importorskip("transformers")
    result = quick("block_cost")
    competitors = ["plain", "bypassed", "kept, to be revoked", "recomputed", "torch.utils.checkpoint"]
    assert [row["competitor"] for row in result.rows] == competitors * 2
    for row in result.rows:
        assert row["seconds"] > 0
        if row["competitor"] == "bypassed":
            assert 0 < row["added_per_call"] <= 12 < row["ops"] / row["blocks"]
        elif row["competitor"] == "kept, to be revoked":
            assert row["added_per_call"] > 20
    assert [check.at_most for check in result.checks] == [1.01, 1.01, 12, 1.02, 1.02] * 2


@pytest.mark.long
def test_mimose_speed_trains_all_competitors_to_the_same_losses_under_one_budget() -> None:
    result = quick("mimose_speed")
    rows = rows_by(result, "competitor")
    assert list(rows) == ["plain", "mimose", "static", "checkpoint"]
    assert all(row["identical"] for row in rows.values())
    budget = rows["mimose"]["budget_bytes"]
    assert all(rows[name]["peak_bytes"] <= budget for name in ("mimose", "static", "checkpoint"))
    assert rows["checkpoint"]["peak_bytes"] < budget < rows["plain"]["peak_bytes"]
    assert rows["mimose"]["recomputed_share"] <= rows["static"]["recomputed_share"] < 1
    assert [check.at_most for check in result.checks] == [0.85, 0.95, 0, 0]


@pytest.mark.long
def test_mimose_budget_measures_the_peak_of_every_step() -> None:
    result = quick("mimose_budget")
    (row,) = result.rows
    assert (row["over"], row["refused"], row["differing_losses"]) == (0, 0, 0)
    assert 0.5 < row["used"] <= 1
    assert 0 < row["recomputed_share"] < 1
    assert row["sizes"] > row["plans"] >= 4


@pytest.mark.long
def test_mimose_convergence_compares_every_loss_and_the_state_at_the_end() -> None:
    result = quick("mimose_convergence")
    _, row = result.rows
    assert row["differing"] == 0
    assert row["recomputed_blocks"] > 0
    assert [check.measured for check in result.checks] == [0] * 4


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["block_programs", "block_refusals"])
def test_programs_and_refusals_of_the_block_engine_have_none_that_are_wrong(name: str) -> None:
    result = quick(name)
    block_methods = ["checkpoint", "mimose", "mimose-published"]
    assert [row["method"] for row in result.rows] == ["auto"] * (name == "block_refusals") + block_methods
    assert all(check.measured == 0 for check in result.checks)
