"""Pilots of a dynamic network: what they foresee, who acts, and files of what they have learned."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spillway.calibration.named_device import device_of
from spillway.cli import main
from spillway.errors import FileFormatError, UsageError
from spillway.ir.sealed import sealed
from spillway.pilots import decisions, pilot_files
from spillway.pilots.decisions import EPOCHS, ROWS, DecisionPilot
from spillway.pilots.lines import Follower
from spillway.pilots.mlp import Mlp
from spillway.pilots.paths import Sample
from spillway.pilots.pilot_files import SavedPilot, read_pilot, renumbered, write_pilot
from spillway.pilots.prefetching import Forward, on_demand, stalls
from spillway.pilots.program import OPEN, RUNS, SKIPPED, Program
from spillway.pilots.referee import Referee, modelled_seconds
from spillway.pilots.sample_files import RecordedSamples, text_of, write_samples
from spillway.pilots.simple_pilots import Frequency, LastOfSize, Nearest, ProgramOrder
from spillway.pilots.ten_vectors import BLOCKS, TEN, PublishedPilot, touches_of
from tests.pure.gated_network import BYTES, WIDTH, GatedNetwork

DEVICE = replace(device_of("rtx6000"), copy_seconds=0.0)
COPY = 2 * BYTES / DEVICE.in_per_second
"""Seconds that the parameters of a layer take to come in."""


def right(pilot: DecisionPilot | Frequency, samples: list[Sample], program: Program) -> float:
    found = [(pilot.foresee(one).probabilities > 0.5) == (program.bits(one.path) > 0.5) for one in samples]
    return float(np.mean(found))


def referee_of(program: Program, *others: DecisionPilot) -> Referee:
    simple = (ProgramOrder(program), Frequency(program), LastOfSize(program), Nearest(program))
    return Referee(program, [*simple, *others], device=DEVICE, room=6 * BYTES)


# ---------------------------------------------------------------------- the perceptron


def test_one_input_gives_what_many_give() -> None:
    mlp = Mlp([5, 16, 16, 3], seed=1)
    inputs = np.random.default_rng(0).normal(2, 3, (10, 5)).astype(np.float32)
    mlp.standardize(inputs)
    for row, outputs in zip(inputs, mlp.layers(inputs)[-1], strict=True):
        np.testing.assert_allclose(mlp.one(row), outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("loss", "rule"), [("squares", "sgd"), ("logits", "adam"), ("logits", "sgd")])
def test_a_step_goes_down_the_gradient(loss: str, rule: str) -> None:
    random = np.random.default_rng(0)
    mlp = Mlp([4, 8, 2], seed=0)
    inputs, targets = random.normal(size=(32, 4)).astype(np.float32), random.integers(0, 2, (32, 2)).astype(np.float32)
    counts = np.ones_like(targets)
    before = [matrix.copy() for matrix in mlp.weights]
    losses = [mlp.learn(inputs, targets, counts, loss=loss, rule=rule, rate=1e-3) for _ in range(50)]  # type: ignore[arg-type]
    assert losses[-1] < losses[0]
    # The first step of plain descent is the gradient, which finite differences give too.
    if rule == "sgd":
        mlp.weights = [matrix.copy() for matrix in before]
        mlp._prepare()
        base = mlp.learn(inputs, targets, counts, loss=loss, rule="sgd", rate=1.0)  # type: ignore[arg-type]
        slope = before[0][1, 2] - mlp.weights[0][1, 2]
        mlp.weights = [matrix.copy() for matrix in before]
        mlp.weights[0][1, 2] += 1e-2
        mlp._prepare()
        moved = mlp.learn(inputs, targets, counts, loss=loss, rule="sgd", rate=0.0)  # type: ignore[arg-type]
        assert (moved - base) / 1e-2 == pytest.approx(slope, abs=5e-3)


def test_hidden_layers_begin_as_hidden_layers_however_wide_the_outputs_are() -> None:
    narrow, wide = Mlp([8, 5, 5], seed=0), Mlp([8, 5, 6], seed=0)
    np.testing.assert_array_equal(narrow.weights[0], wide.weights[0])


def test_outputs_that_do_not_count_teach_nothing() -> None:
    mlp = Mlp([3, 4, 2], seed=0)
    inputs, counts = np.ones((8, 3), np.float32), np.zeros((8, 2), np.float32)
    counts[:, 0] = 1
    last = mlp.weights[-1][:, 1].copy()
    mlp.learn(inputs, np.ones((8, 2), np.float32), counts, loss="squares", rule="sgd", rate=0.1)
    assert (mlp.weights[-1][:, 1] == last).all()


def test_a_wider_perceptron_says_what_it_said() -> None:
    mlp = Mlp([3, 6, 2], seed=0)
    inputs = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    said = mlp.layers(inputs)[-1]
    mlp.widen(5, 3)
    found = mlp.layers(np.concatenate([inputs, np.ones((4, 2), np.float32)], axis=1))[-1]
    np.testing.assert_allclose(found[:, :2], said, rtol=1e-5)
    assert (found[:, 2] == 0).all()


# ---------------------------------------------------------------------- programs


def test_layers_come_in_the_order_of_the_program_whatever_was_seen_first() -> None:
    network = GatedNetwork(6)
    network.samples(60)
    program = Program(network.architecture)
    layers = [
        network.architecture.ops[key].site.module for key in program.order if network.architecture.ops[key].parameters
    ]
    assert layers == ["embedding", *(f"layers.{layer}" for layer in range(6) for _ in range(2)), "head"]
    assert program.decisions == 6
    assert sorted(program.nbytes) == [BYTES, BYTES, *[2 * BYTES] * 6]


def test_a_program_that_grows_says_the_same_as_one_that_was_grown() -> None:
    network = GatedNetwork(6)
    growing = Program(network.architecture)
    for _ in range(40):
        network.samples(1)
        growing.follow()
    whole = Program(network.architecture)
    assert (growing.order, growing.runs, growing.nbytes) == (whole.order, whole.runs, whole.nbytes)


def test_what_a_path_has_passed_is_resolved() -> None:
    network = GatedNetwork(4)
    samples = network.samples(40)
    program = Program(network.architecture)
    for sample in samples[:10]:
        bits = program.bits(sample.path)
        whole = program.known_after(sample.path, len(sample.path))
        assert set(whole.tolist()) <= {RUNS, SKIPPED}
        assert ((whole == RUNS) == (bits > 0)).all()
        assert (program.known_after(sample.path, 1) == OPEN).all()
        first = program.known_after(sample.path, int(sample.asked_at[0]) + 2)
        order = np.argsort(program.first_rank[1:])
        assert first[order[0]] == (RUNS if bits[order[0]] else SKIPPED)
        assert (first[order[1:]] == OPEN).all()


# ---------------------------------------------------------------------- pilots


def test_the_decision_pilot_foresees_what_frequency_cannot() -> None:
    network = GatedNetwork(6, seed=3)
    samples = network.samples(700)
    program = Program(network.architecture)
    pilot, frequency = DecisionPilot(program, width=64), Frequency(program)
    pilot.fit(samples[:500], epochs=6)
    for sample in samples[:500]:
        frequency.learn(sample)
    later = samples[500:]
    assert right(pilot, later, program) > right(frequency, later, program) + 0.2


def test_the_structure_of_an_input_tells_what_its_embedding_does_not() -> None:
    network = GatedNetwork(6, seed=3)
    samples = network.samples(700)
    program = Program(network.architecture)
    blank = [replace(one, embedding=one.embedding * 0, hidden=one.hidden * 0) for one in samples]
    told = [replace(one, structure=tuple(2 * program.bits(one.path) - 1)) for one in blank]
    found = []
    for samples in (blank, told):
        pilot = DecisionPilot(program, width=64)
        pilot.fit(samples[:500], epochs=6)
        found.append(right(pilot, samples[500:], program))
    assert found[0] < 0.7 < 0.98 < found[1]


@pytest.mark.parametrize("structure", [(), (1.0, 0.0, 1.0)])
def test_samples_that_are_described_otherwise_are_refused(structure: tuple[float, ...]) -> None:
    network = GatedNetwork(3, seed=1)
    samples = [replace(one, structure=(1.0, 0.0)) for one in network.samples(4)]
    pilot = DecisionPilot(Program(network.architecture), width=4)
    pilot.fit(samples, epochs=1)
    settings = pilot.settings()
    of_before = {name: settings[name] for name in ("width", "hidden")}
    for one in (pilot, *(DecisionPilot.of_arrays(pilot.program, pilot.arrays(), had) for had in (settings, of_before))):
        one.foresee(samples[0])
        with pytest.raises(UsageError, match="numbers a sample, and this one has"):
            one.foresee(replace(samples[0], structure=structure))


def test_few_samples_are_learned_as_long_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "BATCHES", 64)
    network = GatedNetwork(3, seed=1)
    samples = network.samples(640)
    program = Program(network.architecture)
    rows = sum(len(one.hidden) + 1 for one in samples[:64])
    assert DecisionPilot(program, width=4).fit(samples[:64]) == 64 // -(-rows // ROWS) > EPOCHS
    assert DecisionPilot(program, width=4).fit(samples[:64] * 10) == EPOCHS
    assert DecisionPilot(program, width=4).fit(samples, epochs=2) == 2


def test_what_is_resolved_is_certain_and_the_next_decision_is_clearer() -> None:
    network = GatedNetwork(6, seed=3)
    samples = network.samples(700)
    program = Program(network.architecture)
    pilot = DecisionPilot(program, width=64)
    pilot.fit(samples[:500], epochs=6)
    order = np.argsort(program.first_rank[1:])
    upfront, ahead = [], []
    for sample in samples[500:]:
        bits = program.bits(sample.path)
        begun = pilot.foresee(sample, asked=3).probabilities.copy()
        assert (begun[order[:3]] == bits[order[:3]]).all()
        ahead.append((begun[order[3]] > 0.5) == (bits[order[3]] > 0.5))
        upfront.append((pilot.foresee(sample).probabilities[order[3]] > 0.5) == (bits[order[3]] > 0.5))
    assert np.mean(ahead) > np.mean(upfront)


def test_a_pilot_that_has_learned_nothing_is_undecided_and_grows_with_what_is_seen() -> None:
    network = GatedNetwork(5)
    program = Program(network.architecture)
    pilot = DecisionPilot(program, width=16)
    for sample in network.samples(80):
        assert len(pilot.foresee(sample).probabilities) <= max(program.decisions, 1)
        pilot.learn(sample)
    assert pilot.mlp is not None
    assert pilot.mlp.widths[-1] == program.decisions == 5


def test_what_hangs_on_nothing_that_is_known_is_foreseen_as_well_as_by_how_often_it_runs() -> None:
    """Another learner takes chance for knowledge, and lines have many inputs to do that with."""
    random, follower, decisions, steps = np.random.default_rng(0), Follower(), 32, 400
    follower.widen(16, 0, decisions)
    usual = random.uniform(0.6, 0.95, decisions)
    right, frequent = [], []
    for _ in range(steps):
        follower.expect(random.normal(size=16).astype(np.float32))
        said = follower.conclude(random.normal(1, 3, decisions).astype(np.float32))
        bits = (random.uniform(size=decisions) < usual).astype(np.float32)
        right.append((said > 0) == (bits > 0))
        frequent.append(bits > 0)
        follower.learn(bits)
    assert np.mean(right[steps // 2 :]) > np.mean(frequent[steps // 2 :]) - 0.01


def test_calibration_makes_an_over_confident_pilot_less_so() -> None:
    network = GatedNetwork(4)
    network.samples(40)
    pilot = DecisionPilot(Program(network.architecture), width=16)
    pilot.calibrate()
    assert pilot.temperature == 1  # nothing was foreseen
    logits = np.full(4, 4, np.float32)
    for wrong in range(4):  # sure of all, and right in three of four
        pilot._foreseen.append((logits, (np.arange(4) != wrong).astype(np.float32)))
    pilot.calibrate()
    assert 1 / (1 + np.exp(-4 / pilot.temperature)) == pytest.approx(0.75, abs=0.03)


def test_paths_of_the_last_of_a_size_and_of_the_nearest_come_back() -> None:
    network = GatedNetwork(6)
    one, *others = network.samples(30)
    program = Program(network.architecture)
    last, nearest = LastOfSize(program), Nearest(program)
    assert last.foresee(one).path is None
    for sample in (one, *others):
        last.learn(sample)
        nearest.learn(sample)
    assert last.foresee(one).path is others[-1].path
    assert nearest.foresee(one).path is one.path


def test_a_nearest_that_has_forgotten_still_names_the_path_of_its_row() -> None:
    network = GatedNetwork(6)
    samples = network.samples(530)
    program = Program(network.architecture)
    nearest = Nearest(program)
    for sample in samples:
        nearest.learn(sample)
    assert all(nearest.foresee(sample).path is sample.path for sample in samples[-512:])


@pytest.mark.parametrize("kind", [Nearest, DecisionPilot])
def test_a_step_of_which_nothing_can_be_told_spoils_no_other(kind: type[Nearest | DecisionPilot]) -> None:
    network = GatedNetwork(4)
    samples, program = network.samples(100), Program(network.architecture)
    hidden = np.full_like(samples[40].hidden, np.nan)
    samples[40] = replace(samples[40], embedding=np.full(WIDTH, np.inf, np.float32), hidden=hidden)
    pilot = kind(program)
    for sample in samples:
        pilot.foresee(sample, 0)
        pilot.foresee(sample, 1)
        pilot.learn(sample)
    for sample in samples[50:]:
        foreseen = pilot.foresee(sample)
        assert np.isfinite(foreseen.probabilities).all()
        assert foreseen.path in (None, sample.path)


def test_samples_that_were_asked_nothing_do_not_hide_that_others_were() -> None:
    network = GatedNetwork(4)
    samples = network.samples(40)
    asked_nothing = replace(samples[-1], hidden=np.zeros((0, 0), np.float32), asked_at=np.zeros(0, np.int32))
    pilot = DecisionPilot(Program(network.architecture), width=8)
    pilot.fit([*samples[:-1], asked_nothing], epochs=1)
    assert pilot.redirects
    assert pilot.settings()["hidden"] == WIDTH


# ---------------------------------------------------------------------- the published pilot


def test_a_forward_without_ops_has_a_label_of_zeros() -> None:
    network = GatedNetwork(3)
    (sample,) = network.samples(1)
    empty = replace(sample, path=network.architecture.path([], [0], []), signatures=np.zeros(0, np.int32))
    pilot = PublishedPilot(Program(network.architecture), allowed=BYTES, width=16)
    assert (pilot.label(empty) == 0).all()


def test_the_published_pilot_refuses_samples_that_are_described_otherwise() -> None:
    network = GatedNetwork(3)
    samples = network.samples(8)
    pilot = PublishedPilot(Program(network.architecture), allowed=BYTES, width=16)
    pilot.fit(samples, epochs=1)
    with pytest.raises(UsageError, match="has learned from 9 numbers a sample, and this one has 10"):
        pilot.foresee(replace(samples[0], sizes=(1.0, 2.0)))


def test_labels_sum_to_the_ops_of_the_path_and_are_found_again() -> None:
    network = GatedNetwork(6)
    samples = network.samples(60)
    program = Program(network.architecture)
    pilot = PublishedPilot(program, allowed=12 * BYTES, width=32)
    pilot.fit(samples, epochs=2)
    for sample in samples:
        label = pilot.label(sample)
        assert label.reshape(BLOCKS, TEN)[:, 0].sum() == len(sample.path)
        found = pilot.mapped(label)
        # Layers have one signature here, so that the label of a path may be that of another: section 2 of the paper's
        # vectors cannot tell siblings apart.
        assert found is not None
        assert len(found) == len(sample.path)


def test_an_op_that_no_buffer_holds_has_a_block_of_its_own_in_a_label() -> None:
    network = GatedNetwork(3)
    (sample,) = network.samples(1)
    label = PublishedPilot(Program(network.architecture), allowed=BYTES, width=16).label(sample)
    assert label.reshape(BLOCKS, TEN)[:, 0].sum() == len(sample.path)


def test_a_prediction_that_is_no_label_is_mapped_to_one_of_as_many_ops() -> None:
    network = GatedNetwork(6)
    samples = network.samples(60)
    pilot = PublishedPilot(Program(network.architecture), allowed=12 * BYTES, width=16)
    pilot.fit(samples, epochs=1)
    label = pilot.label(samples[0]).copy()
    label[1] += 1
    found = pilot.mapped(label)
    assert found is not None
    assert len(found) == len(samples[0].path)


def test_a_misprediction_is_not_made_twice() -> None:
    network = GatedNetwork(6)
    samples = network.samples(60)
    pilot = PublishedPilot(Program(network.architecture), allowed=12 * BYTES, width=16)
    pilot.fit(samples, epochs=1)
    wrong = next(sample for sample in samples if pilot.foresee(sample).path is not sample.path)
    pilot.foresee(wrong)
    pilot.learn(wrong)
    assert pilot.foresee(wrong).path is wrong.path
    assert pilot.cached == 1


def test_a_forward_touches_parameters_and_results() -> None:
    network = GatedNetwork(2)
    (sample,) = network.samples(1)
    program = Program(network.architecture)
    touches = touches_of(program, sample)
    assert touches.ops == len(sample.path)
    first = touches.storages[: touches.starts[1]]
    assert touches.nbytes[first].tolist() == [BYTES, 4096]  # the embedding's weight, and what it creates


# ---------------------------------------------------------------------- fetching ahead


def forward(visits: list[int], *, seconds: float, room: int = 3) -> Forward:
    groups = max(visits) + 1
    return Forward(
        visits=visits, seconds=[seconds] * len(visits), copying=[1.0] * groups, nbytes=[1] * groups, room=room
    )


def test_on_demand_every_copy_is_waited_for() -> None:
    assert stalls(forward([0, 1, 2, 3], seconds=1.0), on_demand) == 4.0


def test_what_is_known_comes_in_beside_what_computes() -> None:
    visits = [0, 1, 2, 3]
    assert stalls(forward(visits, seconds=1.0), lambda at: visits[at:]) == 1.0


def test_what_stays_is_not_fetched_again() -> None:
    visits = [0, 1, 0, 1, 0]
    assert stalls(forward(visits, seconds=1.0), on_demand) == 2.0
    assert stalls(forward(visits, seconds=1.0, room=1), on_demand) == 5.0


def test_what_is_wrong_costs_the_copy_that_is_under_way_and_no_more() -> None:
    waited = stalls(forward([0, 1, 4], seconds=0.5, room=2), lambda at: [0, 2, 3][at:] if at == 0 else ())
    # Group 2 is on its way when group 1 is wanted, which waits for both.
    assert waited == 1.0 + 1.5 + 1.0


def test_no_foresight_passes_the_room() -> None:
    visits = [0, 1, 2, 3, 4, 5]
    assert stalls(forward(visits, seconds=10.0, room=2), lambda at: visits[at:]) == 1.0


# ---------------------------------------------------------------------- the referee


def test_the_floor_acts_until_another_is_better_and_the_best_acts_then() -> None:
    network = GatedNetwork(8, seed=1)
    program = Program(network.architecture)
    referee = referee_of(program, DecisionPilot(program, width=64))
    assert referee.acting is referee.pilots[0]
    for sample in network.samples(350):
        referee.learn(sample, np.full(len(sample.path), COPY / 2))
    assert referee.acting is referee.pilots[-1]
    record = referee.record
    assert record.known_seconds <= record.stall_seconds <= record.on_demand_seconds
    assert record.mispredictions >= len(record.last) > 0
    assert record.misprediction_seconds >= sum(one.seconds for one in record.last) - 1e-9
    assert {one.pilot for one in record.last} <= {pilot.name for pilot in referee.pilots}


def test_nobody_acts_where_fetching_ahead_makes_stalls_longer() -> None:
    network = GatedNetwork(8, seed=1)
    program = Program(network.architecture)
    referee = Referee(program, [ProgramOrder(program)], device=DEVICE, room=6 * BYTES)
    for sample in network.samples(60):
        referee.learn(sample, np.full(len(sample.path), COPY / 100))
    assert referee.standings["program order"].score < 0
    assert referee.acting is None


def test_among_those_that_spare_as_much_the_one_that_is_right_acts() -> None:
    network = GatedNetwork(8, seed=1)
    program = Program(network.architecture)
    referee = referee_of(program)
    samples = network.samples(1) * 60  # one path, and so much room that nothing is to be spared by knowing it
    referee.room = 1 << 40
    for sample in samples:
        referee.learn(sample, np.full(len(sample.path), 10.0))
    assert referee.acting is not None
    assert referee.standings[referee.acting.name].hit_rate > 0.9


def test_a_referee_without_pilots_or_room_is_refused() -> None:
    program = Program(GatedNetwork(2).architecture)
    with pytest.raises(UsageError, match="needs pilots of different names"):
        Referee(program, [], device=DEVICE, room=1)
    with pytest.raises(UsageError, match="room of 1 byte"):
        Referee(program, [ProgramOrder(program)], device=DEVICE, room=0)


def test_seconds_of_signatures_are_those_of_the_roofline() -> None:
    network = GatedNetwork(2)
    network.samples(10)
    found = modelled_seconds(network.architecture, DEVICE)
    assert len(found) == len(network.architecture.signatures)
    assert (found > 0).all()


# ---------------------------------------------------------------------- files


def trained(kind: str) -> tuple[SavedPilot, list[Sample], GatedNetwork]:
    network = GatedNetwork(4)
    samples = network.samples(80)
    program = Program(network.architecture)
    made: DecisionPilot | PublishedPilot
    if kind == "decisions":
        made = DecisionPilot(program, width=16)
    else:
        made = PublishedPilot(program, allowed=12 * BYTES, width=16)
    made.fit(samples, epochs=2)
    return SavedPilot(pilot=made, facts={"samples": 80}), samples, network


@pytest.mark.parametrize("kind", ["decisions", "published"])
def test_a_pilot_comes_back_as_it_was(kind: str, tmp_path: Path) -> None:
    saved, samples, network = trained(kind)
    write_pilot(tmp_path / "p.gz", saved)
    found = read_pilot(tmp_path / "p.gz", network="gated")
    assert (found.pilot.name, found.facts) == (kind, {"samples": 80})
    again = renumbered(
        RecordedSamples(architecture=network.architecture, samples=tuple(samples), facts={}),
        found.pilot.program.architecture,
    )
    for one, other in zip(samples, again, strict=True):
        np.testing.assert_array_equal(
            saved.pilot.foresee(one).probabilities, found.pilot.foresee(other).probabilities
        )  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["p.gz"]


@pytest.mark.parametrize("kind", ["decisions", "published"])
def test_a_pilot_that_is_damaged_anywhere_or_cut_is_refused_in_a_sentence(kind: str, tmp_path: Path) -> None:
    saved, _, _ = trained(kind)
    path = tmp_path / "p"
    write_pilot(path, saved)
    content = gzip.decompress(path.read_bytes())
    lines = content.splitlines(keepends=True)
    random = np.random.default_rng(0)
    for place in [*random.integers(0, len(content), 20).tolist(), 0, len(content) - 2]:
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(random.integers(0, 7))
        path.write_bytes(bytes(damaged))
        with pytest.raises(FileFormatError, match=r"p, line \d+: "):
            read_pilot(path)
    for count in range(len(lines)):
        path.write_bytes(b"".join(lines[:count]))
        with pytest.raises(FileFormatError, match=r"p, line \d+: "):
            read_pilot(path)


@pytest.mark.parametrize(
    ("kind", "array", "shape", "sentence"),
    [
        ("decisions", "mlp.layer0", [], "are not the layers of a perceptron"),
        ("decisions", "mlp.layer1", [], "are not the layers of a perceptron"),
        ("decisions", "calibration", [2], "logits cannot be divided by 0"),
        ("published", "transformer.layer0", [], "are not the layers of a perceptron"),
        ("published", "paths", [], "labels of 240 numbers are needed"),
    ],
)
def test_arrays_that_are_none_of_a_pilot_are_refused_in_a_sentence(
    kind: str, array: str, shape: list[int], sentence: str, tmp_path: Path
) -> None:
    records = list(pilot_files._records(trained(kind)[0]))
    zeros = {"shape": shape, "content": text_of(np.zeros(shape, np.float32))}
    changed = [record | zeros if record.get("array") == array else record for record in records]
    (tmp_path / "p").write_bytes(sealed(changed))
    with pytest.raises(FileFormatError, match=sentence):
        read_pilot(tmp_path / "p")


def test_a_pilot_of_another_network_or_a_newer_version_is_refused(tmp_path: Path) -> None:
    saved, _, _ = trained("decisions")
    path = tmp_path / "p"
    write_pilot(path, saved)
    with pytest.raises(FileFormatError, match="this is a pilot of the network 'gated', and one of 'other' is needed"):
        read_pilot(path, network="other")
    content = gzip.decompress(path.read_bytes())
    path.write_bytes(content.replace(b'"version":1', b'"version":2', 1))
    with pytest.raises(FileFormatError, match="written in version 2 of the format, and this Spillway reads up to 1"):
        read_pilot(path)


def test_a_pilot_that_has_learned_nothing_is_not_written(tmp_path: Path) -> None:
    pilot = DecisionPilot(Program(GatedNetwork(2).architecture))
    with pytest.raises(UsageError, match="has learned nothing"):
        write_pilot(tmp_path / "p", SavedPilot(pilot=pilot, facts={}))
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- the command line


@pytest.fixture
def samples_file(tmp_path: Path) -> Path:
    network = GatedNetwork(4)
    samples = tuple(network.samples(60))
    path = tmp_path / "samples.gz"
    write_samples(path, RecordedSamples(architecture=network.architecture, samples=samples, facts={}))
    return path


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.mark.parametrize("kind", ["decisions", "published"])
def test_a_pilot_is_trained_and_shown(kind: str, samples_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pilot = samples_file.with_name("pilot.gz")
    given = ("--pilot", kind, "--width", "16", "--epochs", "2", "--json")
    code, out, _ = answer(capsys, "pilot", "train", str(samples_file), "-o", str(pilot), *given)
    assert code == 0
    document = json.loads(out)
    assert (document["pilot"], document["network"], document["judged"]["samples"]) == (kind, "gated", 15)
    assert {one["pilot"] for one in document["judged"]["standings"]} >= {"program order", "frequency", "1-NN", kind}
    code, out, _ = answer(capsys, "pilot", "show", str(pilot), "--samples", str(samples_file))
    assert code == 0
    assert "program order" in out
    assert f"{kind} pilot of gated (transformer), 16 wide: 4 decisions" in out


@pytest.mark.parametrize("option", ["--room", "--device"])
def test_what_cannot_be_judged_is_refused_before_a_pilot_is_trained(
    option: str, samples_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pilot = samples_file.with_name("pilot.gz")
    code, out, err = answer(capsys, "pilot", "train", str(samples_file), "-o", str(pilot), option, "no")
    assert (code, out) == (1, "")
    assert "'no'" in err
    assert not pilot.exists()


def test_a_pilot_too_wide_for_this_machine_is_told_in_one_sentence(
    samples_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pilot, width = samples_file.with_name("pilot.gz"), str(10**13)
    code, _, err = answer(capsys, "pilot", "train", str(samples_file), "-o", str(pilot), "--width", width)
    assert (code, err) == (1, f"spillway: There is not enough memory for a pilot whose layers are {width} wide.\n")


def test_what_is_no_pilot_is_told_in_one_sentence(samples_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = answer(capsys, "pilot", "show", str(samples_file))
    assert (code, out) == (1, "")
    assert "line 1: this is not the first line of a pilot file" in err
