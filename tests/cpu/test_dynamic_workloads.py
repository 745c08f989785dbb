"""Networks whose forward differs from sample to sample: they are dynamic, and their paths are recorded."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spillway.cli import main
from spillway.errors import UsageError, WorkloadError
from spillway.pilots.architecture import Architecture
from spillway.pilots.sample_files import read_samples
from spillway.workloads import recorded, stdlib_trees
from spillway.workloads.dynamic.gates import Gate
from spillway.workloads.dynamic.tree_batches import children_of, inner_nodes, nodes_of_cells
from spillway.workloads.dynamic.tree_batches import sizes as sizes_of_trees
from spillway.workloads.named import DYNAMIC, get
from spillway.workloads.recorded import PathRecorder, record_samples
from spillway.workloads.workload import Workload
from tests.cpu.dynamic_networks import SMALL_DYNAMIC


def small(name: str, seed: int = 0) -> Workload:
    return get(name, seed=seed, **SMALL_DYNAMIC[name])


@pytest.fixture(params=SMALL_DYNAMIC)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_tree_says_which_nodes_have_children_and_how_many_are_of_each_cell() -> None:
    batch = {"types": torch.tensor([0, 1, 0, 2]), "parents": torch.tensor([1, 3, 3, -1]), "verbs": torch.tensor([0])}
    assert inner_nodes(batch, places=6) == [-1, 1, -1, 1, 0, 0]
    assert nodes_of_cells(batch, cell_of=[0, 1, 1]) == [2, 0, 2, 2]


def test_every_dynamic_workload_is_here() -> None:
    assert {own.NAME for own in DYNAMIC} == SMALL_DYNAMIC.keys()


@pytest.mark.long
def test_a_recorded_step_is_the_step_that_would_run(name: str) -> None:
    plain, recorded = small(name), small(name)
    recorder = PathRecorder(recorded)
    for batch, same in zip(plain.batches(3), recorded.batches(3), strict=True):
        assert float(plain.train_step(batch)) == recorder.sample(same).loss
    state = recorded.model.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in plain.model.state_dict().items())


@pytest.mark.long(but=1)
def test_paths_differ_and_touch_the_parameters_of_the_modules_that_run(name: str) -> None:
    recorded = record_samples(name, steps=12, **SMALL_DYNAMIC[name])
    known = recorded.architecture
    if name != "unrolled-gan":  # whose early steps may be alike
        assert known.decisions > 0
    described = {(len(sample.sizes), len(sample.structure)) for sample in recorded.samples}
    assert len(described) == 1
    model = small(name).model
    names = [one.name for one in known.parameters]
    assert names == [name for name, _ in model.named_parameters()]
    for sample in recorded.samples:
        assert len(sample.signatures) == len(sample.path) > 0
        starts = sample.path.starts
        for op in range(len(sample.path)):
            assert (sample.path.operands[starts[op] : starts[op + 1]] < op).all()
    touched = {p for op in known.ops for p in op.parameters}
    assert 0 in touched


def layers_that_ran(known: Architecture, keys: list[int]) -> set[int]:
    modules = [known.ops[key].site.module.split(".") for key in keys]
    return {int(parts[1]) for parts in modules if parts[0] == "layers"}


def test_the_layers_of_a_path_are_those_whose_gates_were_open() -> None:
    workload = small("var-bert")
    opened: list[set[int]] = []
    for number, gate in enumerate(workload.model.gates):  # type: ignore[arg-type]

        def note(module: Any, args: Any, result: Any, number: int = number) -> None:
            if result[1]:
                opened[-1].add(number)

        gate.register_forward_hook(note)
    recorder = PathRecorder(workload)
    for batch in workload.batches(8):
        opened.append(set())
        sample = recorder.sample(batch)
        assert layers_that_ran(recorder.architecture, sample.path.keys.tolist()) == opened[-1]
        assert len(sample.asked_at) == len(sample.hidden) == 3
    assert len({frozenset(one) for one in opened}) > 1


def test_the_hidden_state_and_the_embedding_are_means_of_what_the_network_has() -> None:
    workload = small("var-bert")
    batch = next(iter(workload.batches(1)))
    embedded = workload.model.embedding(batch["tokens"]).mean((0, 1))  # type: ignore[call-overload, operator]
    sample = PathRecorder(workload).sample(batch, update=False)
    assert np.allclose(sample.embedding, embedded.detach().numpy(), atol=1e-6)
    given = torch.nn.functional.layer_norm(embedded, embedded.shape)  # as the first gate scores it
    assert np.allclose(sample.hidden[0], given.detach().numpy(), atol=1e-5)


def test_a_call_within_another_is_counted_within_it() -> None:
    recorder = PathRecorder(small("tree-lstm"))
    for batch in small("tree-lstm").batches(6):
        recorder.sample(batch)
    places = {(op.site.module, op.site.call) for op in recorder.architecture.ops if "of_children" in op.site.module}
    assert all(call == 0 for _, call in places)
    assert len(places) > 1


def test_gates_are_held_open_for_their_share_while_the_network_trains() -> None:
    workload = get("var-bert", seed=0, **{**SMALL_DYNAMIC["var-bert"], "target": 0.3})
    for batch in workload.batches(60):
        workload.train_step(batch)
    recorder = PathRecorder(workload)
    paths = [recorder.sample(batch).path for batch in islice(workload.batches(200), 60, 200)]
    ran = [layers_that_ran(recorder.architecture, path.keys.tolist()) for path in paths]
    shares = [np.mean([layer in one for one in ran]) for layer in range(3)]
    assert all(0.1 < share < 0.6 for share in shares)


def test_a_gate_that_does_not_train_keeps_its_threshold() -> None:
    gate = Gate(4, 0.5).eval()
    gate(torch.randn(3, 4))
    assert float(gate.threshold) == 0
    gate.train()
    gate(torch.randn(3, 4))
    assert float(gate.threshold) != 0


def test_no_more_samples_are_recorded_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    given = small("var-lstm")
    endless = replace(given, batches=lambda steps: cycle(given.batches(2)))
    monkeypatch.setattr(recorded, "get", lambda name, **options: endless)
    assert len(record_samples("var-lstm", steps=3, frozen=True).samples) == 3


def test_a_frozen_network_stays_as_it_is() -> None:
    recorder = PathRecorder(workload := small("var-bert"))
    workload.model.eval()
    before = copy.deepcopy(workload.model.state_dict())
    first = [recorder.sample(batch, update=False).path for batch in workload.batches(4)]
    again = [recorder.sample(batch, update=False).path for batch in workload.batches(4)]
    assert [path.number for path in first] == [path.number for path in again]
    assert all(torch.equal(before[key], tensor) for key, tensor in workload.model.state_dict().items())


def test_trees_are_those_of_the_source() -> None:
    for tree in islice(stdlib_trees.trees(seed=0, largest=12), 20):
        assert len(tree.types) == len(tree.parents) <= 12
        assert tree.parents[-1] == -1
        assert stdlib_trees.NODE_TYPES[tree.types[-1]] in ("FunctionDef", "AsyncFunctionDef")
        assert all(parent > node for node, parent in enumerate(tree.parents[:-1]))
        assert 0 <= tree.verb < stdlib_trees.VERBS


def test_samples_that_there_are_none_of_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdlib_trees, "_functions", lambda: (((0,) * 9, (8,) * 8 + (-1,), "get", b"What is there."),))
    assert len(next(stdlib_trees.trees(seed=0)).types) == 9
    with pytest.raises(WorkloadError, match=r"No function of the standard library has a syntax tree of 6 to 3 nodes\."):
        next(get("tree-lstm", largest=3).batches(1))
    with pytest.raises(WorkloadError, match="has a docstring of 12 to 5 bytes"):
        get("var-bert", longest=5)
    with pytest.raises(WorkloadError, match="two or more, of which 1 cannot be the most"):
        next(get("var-lstm", longest=0).batches(1))


def test_sizes_of_a_tree() -> None:
    batch = {"types": torch.tensor([1, 1, 2, 3]), "parents": torch.tensor([2, 2, 3, -1])}
    assert children_of(batch["parents"].tolist()) == [[], [], [0, 1], [2]]
    assert sizes_of_trees(batch) == (4.0, 3.0, 2.0, 3.0)


def test_what_is_not_dynamic_is_not_recorded() -> None:
    with pytest.raises(UsageError, match="does the same for every sample"):
        record_samples("deep-narrow", steps=1, layers=2)


def test_the_command_line_records_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "samples.gz"
    with pytest.raises(SystemExit) as ended:
        main(["pilot", "record", "unrolled-gan", "--output", str(file), "--steps", "3", "--json"])
    told = json.loads(capsys.readouterr().out)
    recorded = read_samples(file)
    assert ended.value.code == 0
    assert (told["samples"], told["paths"]) == (3, len(recorded.architecture.paths))
    assert recorded.facts == {"seed": 0, "steps": 3, "frozen": False, "options": {}}
    with pytest.raises(SystemExit) as ended:
        main(["pilot", "record", "deep-narrow", "--output", str(file), "--steps", "3"])
    assert ended.value.code == 1
    assert "does the same for every sample" in capsys.readouterr().err


def test_an_embedding_that_is_not_there_is_refused() -> None:
    workload = small("var-lstm")
    assert workload.dynamism is not None
    wrong = replace(workload, dynamism=replace(workload.dynamism, embedding="embeddings"))
    with pytest.raises(UsageError, match="no module 'embeddings' that embeds"):
        PathRecorder(wrong)
