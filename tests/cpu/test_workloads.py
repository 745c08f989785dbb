from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from itertools import chain, islice, pairwise, repeat
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from spillway.errors import WorkloadError
from spillway.subprocess_runs import child
from spillway.subprocess_runs.run import RunRequest
from spillway.workloads import WORKLOADS, Batch, Workload, deep_narrow, get, published, resnet, stdlib_text
from spillway.workloads.stdlib_text import BEGIN, END, PAD, clipped, padded
from tests.cpu.dynamic_networks import SMALL_DYNAMIC
from tests.cpu.families import difference, state_of

SMALL: dict[str, Mapping[str, object]] = {
    "stdlib-lm": {"width": 32, "layers": 2, "heads": 2, "batch": 3, "longest": 96},
    "resnet": {"width": 4, "blocks": (1, 1), "batch": 4},
    "deep-narrow": {"width": 16, "layers": 20, "batch": 24},
    **SMALL_DYNAMIC,
}


def small(name: str, seed: int = 0) -> Workload:
    return get(name, seed=seed, **SMALL[name])


def tensors(batch: Batch) -> list[Tensor]:
    return list(batch.values()) if isinstance(batch, Mapping) else list(batch)


def same(first: Iterator[Batch], second: Iterator[Batch]) -> bool:
    pairs = zip(chain(*map(tensors, first)), chain(*map(tensors, second)), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# Every workload


def test_every_workload_has_a_small_form_for_these_tests_or_is_tested_with_the_published_models() -> None:
    assert set(SMALL) == set(WORKLOADS) - set(published.BUILDERS)


@pytest.mark.long(but=3)
@pytest.mark.parametrize("name", SMALL)
def test_a_workload_carries_the_name_that_it_is_found_by(name: str) -> None:
    assert small(name).name == name


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_the_same_seed_gives_the_same_batches_every_time_they_are_asked_for(name: str) -> None:
    workload = small(name)
    assert same(workload.batches(6), workload.batches(6))
    assert same(workload.batches(6), small(name).batches(6))


@pytest.mark.parametrize("name", SMALL)
def test_fewer_steps_are_the_beginning_of_more(name: str) -> None:
    workload = small(name)
    assert len(list(workload.batches(3))) == 3
    assert same(workload.batches(3), islice(workload.batches(5), 3))


@pytest.mark.parametrize("name", SMALL)
def test_another_seed_gives_other_parameters_and_other_batches(name: str) -> None:
    first, second = small(name, seed=0), small(name, seed=1)
    assert any(not torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
    assert not all(
        a.shape == b.shape and torch.equal(a, b)
        for one, other in zip(first.batches(2), second.batches(2), strict=True)
        for a, b in zip(tensors(one), tensors(other), strict=True)
    )


@pytest.mark.parametrize("name", SMALL)
def test_drawing_batches_leaves_the_random_streams_of_the_steps_alone(name: str) -> None:
    workload = small(name)
    before = state_of(workload.model, workload.optimizers)
    assert len(list(workload.batches(4))) == 4
    assert difference(before, state_of(workload.model, workload.optimizers)) is None


@pytest.mark.long(but=8)
@pytest.mark.parametrize("name", SMALL)
def test_the_same_seed_trains_to_the_same_bits(name: str) -> None:
    def trained() -> object:
        workload = small(name)
        losses = [workload.train_step(batch) for batch in workload.batches(3)]
        return losses, state_of(workload.model, workload.optimizers)

    (first_losses, first), (second_losses, second) = trained(), trained()
    assert first_losses == second_losses
    assert difference(first, second) is None


@pytest.mark.parametrize("name", SMALL)
def test_building_seeds_the_streams_of_python_numpy_and_torch(name: str) -> None:
    def next_numbers() -> tuple[float, float, float]:
        small(name)
        return random.random(), float(numpy.random.random()), float(torch.rand(()))

    assert next_numbers() == next_numbers()


@pytest.mark.long(but=6)
@pytest.mark.parametrize("name", SMALL)
def test_training_lowers_the_loss_on_a_batch_that_comes_again(name: str) -> None:
    workload = small(name)
    (batch,) = workload.batches(1)
    losses = [float(workload.train_step(batch)) for _ in range(12)]
    # Each side of the GAN undoes some of what the other has won.
    assert losses[-1] < losses[0] - (0.001 if name == "unrolled-gan" else 0.1)


def test_a_run_has_as_many_steps_as_it_was_asked_for_however_many_batches_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endless = Workload(
        name="endless", model=nn.Linear(1, 1), optimizers=(), batches=lambda steps: repeat((torch.ones(1),)),
        loss=lambda model, batch: torch.zeros(()),
    )  # fmt: skip
    monkeypatch.setattr(child, "get", lambda name, seed: endless)
    request = RunRequest(workload="endless", seed=0, steps=3, method=None, budget_bytes=None)
    assert len(child._batches(request)) == 3


def test_a_step_runs_the_loss_backward_every_optimizer_and_clears_the_gradients() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    by = [torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.5, 0.25)]
    workload = Workload(
        name="two optimizers",
        model=model,
        optimizers=tuple(by),
        batches=lambda steps: iter([(torch.tensor([[1.0, 2.0]]),)] * steps),
        loss=lambda model, batch: model(batch[0]).sum(),
    )
    (batch,) = workload.batches(1)
    loss = workload.train_step(batch)
    assert float(loss) == 3.0
    assert not loss.requires_grad
    assert model.weight.tolist() == [[1 - 0.75, 1 - 1.5]]
    assert model.weight.grad is None


# The text of the standard library


def test_only_the_library_itself_is_read_not_its_tests_and_not_what_is_installed() -> None:
    files = stdlib_text.source_files()
    parts = {part for path in files for part in path.relative_to(stdlib_text.root()).parts}
    assert {"json", "asyncio", "random.py"} <= parts
    assert not parts & {"test", "tests", "site-packages", "dist-packages"}


def test_every_sample_is_one_function() -> None:
    samples = list(islice(stdlib_text.functions(seed=0), 300))
    assert all(text.startswith((b"def ", b"async def ", b"def\t")) for text in samples)
    assert not any(text.endswith((b" ", b"\n")) for text in samples)


def test_a_function_is_read_from_its_first_byte_to_its_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sample.py"
    source = (
        'class A:\n    é = "é"; x = 1\n    @staticmethod\n    def f():\n        return "é"\n\nasync def g(): pass\n'
    )
    file.write_text(source, encoding="utf-8")
    monkeypatch.setattr(stdlib_text, "source_files", lambda: (file,))
    found = {text.decode() for text in islice(stdlib_text.functions(seed=0), 2)}
    assert found == {'def f():\n        return "é"', "async def g(): pass"}


@pytest.mark.parametrize("content", [b"def f(:", b"def f():\n\0", b"# coding: no-such-code\ndef f(): pass"])
def test_a_file_that_is_not_python_is_passed_over(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = tmp_path / "bad.py", tmp_path / "good.py"
    bad.write_bytes(content)
    good.write_bytes(b"def g(): pass")
    monkeypatch.setattr(stdlib_text, "source_files", lambda: (bad, good))
    assert next(stdlib_text.functions(seed=0)) == b"def g(): pass"


def test_an_escape_that_python_warns_about_is_read_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "old.py"
    file.write_bytes(rb'def f(): return "\d"')
    monkeypatch.setattr(stdlib_text, "source_files", lambda: (file,))
    assert next(stdlib_text.functions(seed=0)) == rb'def f(): return "\d"'


def test_a_link_to_nowhere_is_no_source_and_no_source_at_all_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").symlink_to(tmp_path / "nowhere.py")
    monkeypatch.setattr(stdlib_text, "root", lambda: tmp_path)
    with pytest.raises(WorkloadError, match="no source of its standard library under"):
        stdlib_text.source_files.__wrapped__()


def test_the_first_batch_reads_only_as_many_files_as_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path), read_bytes(path))[1])
    next(get("stdlib-lm", width=8, layers=1, heads=1).batches(1))
    assert 0 < len(read) < len(stdlib_text.source_files()) / 4


@pytest.mark.parametrize("options", [{"batch": 0}, {"batch": -1}, {"longest": 0}, {"grouped": 0}])
def test_batches_of_nothing_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(WorkloadError, match=rf"one or more of each; got .*{'='.join(map(str, *options.items()))}\b"):
        get("stdlib-lm", width=8, layers=1, heads=1, **options).batches(1)


def test_lengths_change_from_step_to_step_and_stay_within_the_longest() -> None:
    lengths = [batch["inputs"].shape[1] for batch in get("stdlib-lm", width=8, layers=1, heads=1).batches(24)]
    changes = sum(a != b for a, b in pairwise(lengths))
    assert changes >= 20
    assert max(lengths) <= 384
    assert max(lengths) > 2 * min(lengths)


def test_functions_grouped_by_length_need_less_padding() -> None:
    def padding(grouped: int) -> int:
        batches = stdlib_text.batches(8, seed=0, batch=8, longest=512, grouped=grouped)
        return sum(int((batch["inputs"] == PAD).sum()) for batch in batches)

    assert padding(1) > 2 * padding(8)


def test_a_batch_is_padded_at_the_end_and_its_targets_are_one_token_ahead() -> None:
    batch = padded([b"ab", b"abcd"])
    assert batch["inputs"].tolist() == [[BEGIN, 97, 98, END, PAD], [BEGIN, 97, 98, 99, 100]]
    assert batch["targets"].tolist() == [[97, 98, END, PAD, PAD], [97, 98, 99, 100, END]]


def test_a_long_function_is_clipped_to_whole_lines() -> None:
    assert clipped(b"def f():\n  a\n  b", 100) == b"def f():\n  a\n  b"
    assert clipped(b"def f():\n  a\n  b", 15) == b"def f():\n  a"
    assert clipped(b"def f():\n  a\n  b", 12) == b"def f():\n  a"
    assert clipped(b"def f():\n  a\n  b", 11) == b"def f():"


def test_a_first_line_that_is_too_long_is_clipped_where_it_must_be() -> None:
    assert clipped(b"def f():\n  a", 5) == b"def f"


@given(text=st.binary(max_size=60), length=st.integers(1, 40))
def test_what_is_clipped_is_a_beginning_that_fits(text: bytes, length: int) -> None:
    short = clipped(text, length)
    assert len(short) <= length
    assert text.startswith(short)


# The models


def test_the_language_model_does_not_look_ahead() -> None:
    model = small("stdlib-lm").model.eval()
    words = torch.arange(20).reshape(1, 20)
    changed = words.clone()
    changed[0, 12] = 77
    before, after = model(words), model(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12], after[:, 12])


def test_padding_does_not_count_in_the_loss_of_the_language_model() -> None:
    workload = small("stdlib-lm")
    model = workload.model.eval()
    alone, beside = padded([b"def f(): pass"]), padded([b"def f(): pass", b"x" * 40])
    row = {key: value[:1] for key, value in beside.items()}
    assert row["inputs"].shape[1] > alone["inputs"].shape[1]
    torch.testing.assert_close(workload.loss(model, alone), workload.loss(model, row))


def test_the_language_model_reads_and_writes_with_one_matrix() -> None:
    model = small("stdlib-lm").model
    wide = [name for name, parameter in model.named_parameters() if stdlib_text.VOCABULARY in parameter.shape]
    assert wide == ["tokens.weight"]


def test_pictures_show_bytes_of_the_library_and_labels_are_packages() -> None:
    (batch,) = get("resnet", width=4, blocks=(1,)).batches(1)
    pictures, labels = batch
    assert pictures.shape == (16, 3, resnet.SIDE, resnet.SIDE)
    assert -1 <= float(pictures.min()) < float(pictures.max()) <= 1
    assert set(labels.tolist()) <= set(range(resnet.CLASSES))
    text = bytes(((pictures[0, 0] + 1) * 127.5).round().to(torch.uint8).flatten().tolist())
    assert any(text in path.read_bytes() for path in stdlib_text.source_files())


def test_the_residual_network_has_the_layout_of_resnet_34() -> None:
    model = get("resnet").model
    assert sum(isinstance(module, resnet.BasicBlock) for module in model.modules()) == 16
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, resnet.CLASSES)


def test_the_deep_network_is_deep_narrow_and_guesses_the_byte_that_follows() -> None:
    workload = get("deep-narrow")
    assert sum(isinstance(module, deep_narrow.Layer) for module in workload.model) == 200
    (batch,) = workload.batches(1)
    windows, following = batch
    assert windows.shape == (512, 64)
    window = bytes(((windows[0] + 1) * 127.5).round().to(torch.uint8).tolist())
    source = window + bytes([int(following[0])])
    assert any(source in path.read_bytes() for path in stdlib_text.source_files())


# Finding a workload

A_WORKLOAD = """
import torch
from spillway.workloads import Workload, seed_everything

def build(seed=0, size=3):
    seed_everything(seed)
    model = torch.nn.Linear(size, 1)
    return Workload(
        name="mine",
        model=model,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1),),
        batches=lambda steps: (dict(x=torch.ones(2, size)) for _ in range(steps)),
        loss=lambda model, batch: model(batch["x"]).square().mean(),
    )
"""


def written(folder: Path, text: str, name: str = "mine.py") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_a_function_in_a_file_gives_a_workload_and_takes_the_options(tmp_path: Path) -> None:
    workload = get(f"{written(tmp_path, A_WORKLOAD)}:build", seed=3, size=5)
    assert workload.name == "mine"
    (batch,) = workload.batches(1)
    assert batch["x"].shape == (2, 5)
    assert float(workload.train_step(batch)) > float(workload.train_step(batch))


def test_a_file_may_import_its_neighbours_and_the_path_for_imports_is_as_before(tmp_path: Path) -> None:
    written(tmp_path, A_WORKLOAD, "a_neighbour_of_the_workload.py")
    file = written(
        tmp_path, "def build(seed):\n    from a_neighbour_of_the_workload import build\n    return build(seed)"
    )
    before = list(sys.path)
    assert get(f"{file}:build").name == "mine"
    assert sys.path == before


def test_a_file_named_like_a_module_is_not_taken_for_it(tmp_path: Path) -> None:
    assert get(f"{written(tmp_path, A_WORKLOAD, 'resnet.py')}:build").name == "mine"
    assert get(f"{written(tmp_path, A_WORKLOAD, 'torch.py')}:build", size=2).name == "mine"
    assert sys.modules["torch"] is torch


def refusal(name_or_file: str, **options: object) -> str:
    before = list(sys.path)
    with pytest.raises(WorkloadError) as refused:
        get(name_or_file, **options)
    assert sys.path == before
    sentence = str(refused.value)
    assert "\n" not in sentence
    assert sentence.endswith(".")
    return sentence


def test_an_unknown_name_lists_the_names() -> None:
    sentence = refusal("stdlib-ml")
    assert "'stdlib-ml'" in sentence
    assert all(name in sentence for name in WORKLOADS)


def test_an_unknown_option_of_a_known_workload_is_named() -> None:
    assert refusal("stdlib-lm", wdth=8) == (
        "The workload stdlib-lm takes no wdth, which it was given; it takes seed, width, layers, heads, batch, "
        "longest, grouped, dropout."
    )


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert f"no file {tmp_path}/absent.py" in refusal(f"{tmp_path}/absent.py:build")


@pytest.mark.parametrize("file", ["~nobody-of-that-name/absent.py", f"{'long' * 100}.py"])
def test_a_file_that_the_system_does_not_look_for_is_named(file: str) -> None:
    assert f"no file {file}" in refusal(f"{file}:build")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert f"no file {tmp_path}" in refusal(f"{tmp_path}:build")


def test_a_file_without_a_colon_is_told_what_is_missing(tmp_path: Path) -> None:
    file = written(tmp_path, A_WORKLOAD)
    assert f"write {file}:function" in refusal(str(file))


@pytest.mark.parametrize("text", [":build", "mine.py:", "mine.py:build()", "mine.py:1"])
def test_half_an_address_is_shown_a_whole_one(text: str) -> None:
    assert "path/to/file.py:function" in refusal(text)


def test_a_file_that_is_not_python_by_name_is_refused(tmp_path: Path) -> None:
    assert "has to end in .py" in refusal(f"{written(tmp_path, A_WORKLOAD, 'mine.txt')}:build")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def build(:", "SyntaxError"),
        ("import no_such_module_anywhere", "ModuleNotFoundError: No module named 'no_such_module_anywhere' ("),
        ("raise SystemExit(2)", "SystemExit: 2 ("),
        ("raise ValueError('first line\\nsecond line')", "ValueError: first line ("),
    ],
)
def test_a_file_that_cannot_be_loaded_says_what_it_raised(text: str, said: str, tmp_path: Path) -> None:
    loaded = set(sys.modules)
    sentence = refusal(f"{written(tmp_path, text)}:build")
    assert sentence.startswith(f"Loading {tmp_path}/mine.py raised ")
    assert said in sentence
    assert set(sys.modules) == loaded


def test_a_missing_function_is_named(tmp_path: Path) -> None:
    assert "has no function 'make'" in refusal(f"{written(tmp_path, A_WORKLOAD)}:make")


def test_what_is_not_a_function_is_refused(tmp_path: Path) -> None:
    assert "not a function but an object of type int" in refusal(f"{written(tmp_path, 'build = 3')}:build")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def build(seed): return 1 / 0", "with seed=0 raised ZeroDivisionError: division by zero ("),
        ("def build(): pass", "takes no seed, which it was given; it takes nothing"),
        ("def build(seed): raise RuntimeError", "mine.py, line 1)."),
        ("import sys\ndef build(seed): sys.exit()", "raised SystemExit ("),
        ("def build(seed): return None", "returned None where"),
        ("def build(seed): return 1, 2", "returned an object of type tuple where"),
    ],
)
def test_a_function_that_gives_no_workload_says_why(text: str, said: str, tmp_path: Path) -> None:
    sentence = refusal(f"{written(tmp_path, text)}:build")
    assert f"{tmp_path}/mine.py:build" in sentence
    assert said in sentence


def test_the_error_that_a_users_function_raised_is_kept_as_the_cause(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError) as refused:
        get(f"{written(tmp_path, 'def build(seed): return 1 / 0')}:build")
    assert isinstance(refused.value.__cause__, ZeroDivisionError)


def test_a_refusal_of_the_users_own_is_passed_on_as_it_is(tmp_path: Path) -> None:
    text = "from spillway.errors import WorkloadError\ndef build(seed): raise WorkloadError('There is no data.')"
    assert refusal(f"{written(tmp_path, text)}:build") == "There is no data."
