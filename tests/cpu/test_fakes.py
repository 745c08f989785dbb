"""What is remembered of fake tensors is what torch would tell anew."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spillway.engines.tensors import fakes
from spillway.engines.tensors.fakes import FakeMode, remembered
from spillway.engines.tensors.tally import Tally
from tests.cpu.op_samples import cases, database
from tests.shared import some_of


def described(out: Any, operands: list[Tensor]) -> list[Any]:
    """All that a result is, beside which operand it is or shows."""
    listed = list(out) if isinstance(out, list | tuple) else [out]
    facts: list[Any] = [type(out) if isinstance(out, list | tuple) else None]
    storages = [one.untyped_storage()._cdata for one in operands]
    for one in listed:
        if not isinstance(one, Tensor):
            facts.append(one)
            continue
        shown = one.untyped_storage()
        facts += [
            type(one), one.shape, one.stride(), one.storage_offset(), one.dtype, one.device, one.is_conj(),
            one.is_neg(), one.requires_grad, one.is_inference(), shown.nbytes(),
            storages.index(shown._cdata) if shown._cdata in storages else None,
            next((place for place, operand in enumerate(operands) if operand is one), None),
        ]  # fmt: skip
    return facts


class Compared(TorchDispatchMode):
    """Does every op as torch does it, and twice as it is remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.compared: Counter[str] = Counter()
        self.wrong: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if not any(isinstance(one, FakeTensor) for one in operands):
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:  # what it does a second time is another thing
            return out
        expected = described(out, operands)
        for _ in range(2):
            found = described(remembered(func, args, kwargs), operands)
            if found != expected:
                self.wrong.append(f"{func}: {expected} became {found}")
        self.compared[str(func)] += 1
        return out


def compared(ops: Iterable[Any], *, dtypes: int, samples: int) -> Compared:
    """Ops of torch's database on fake tensors: forward, backward, in place, with `out`."""
    watching = Compared()
    for op in ops:
        for case in list(cases(op, dtypes=dtypes, samples=samples)):
            for around in (contextlib.nullcontext, torch.inference_mode):
                with contextlib.suppress(Exception), around(), FakeMode(), watching:  # what needs content has none
                    case.call()
    return watching


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_what_is_remembered_is_what_torch_tells(part: int) -> None:
    fakes._outcomes.clear()
    watching = compared(some_of(database()[part::4], 0.1), dtypes=2, samples=1)
    assert not watching.wrong
    assert len(watching.compared) > 50
    assert sum(outcome is not None for outcome in fakes._outcomes.values()) > len(fakes._outcomes) / 2


class Shown(nn.Module):
    """Shows a buffer in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.register_buffer("shown", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            shown = self.shown.view(8, 8)
        out: Tensor = (self.line(x) * shown).sum()
        return out


def test_a_view_is_no_inference_tensor_where_what_it_shows_is_none() -> None:
    for _ in range(2):
        with FakeMode(), Tally():
            Shown()(torch.zeros(8, 8)).backward()


def test_a_view_of_what_was_made_smaller_does_not_make_it_larger() -> None:
    for _ in range(2):
        with FakeMode(), Tally():
            y = torch.relu(torch.empty(1 << 20))
            y.untyped_storage().resize_(0)
            assert y.view(1 << 10, 1 << 10).untyped_storage().nbytes() == 0


@pytest.mark.long(but=2)
@pytest.mark.parametrize("fault", ["strides", "dtype", "conjugated", "of"])
def test_a_wrong_memory_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one fact of results is not what is remembered."""
    made_again = fakes._made_again
    planted: dict[str, Callable[[Any], Any]] = {
        "strides": lambda made: (1,) * len(made.shape), "dtype": lambda made: torch.float64,
        "conjugated": lambda made: made.dtype.is_complex, "of": lambda made: fakes._FRESH,
    }  # fmt: skip
    fakes._outcomes.clear()
    monkeypatch.setattr(
        fakes, "_made_again",
        lambda made, operands: made_again(made._replace(**{fault: planted[fault](made), "itself": False}), operands),
    )  # fmt: skip
    names = ("mul", "conj", "view", "transpose")
    assert compared((op for op in database() if op.name in names), dtypes=3, samples=1).wrong
    fakes._outcomes.clear()
