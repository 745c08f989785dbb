"""What layers of oneDNN's LSTM create is what was expected, in every dtype that they are there for."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spillway.engines.tensors.sizes import FORMULAS
from spillway.units import Bytes


class Beside(TorchDispatchMode):
    """Notes what oneDNN's layers were expected to create, and what they did."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Bytes, Bytes]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        expected = FORMULAS[name](args) if "mkldnn_rnn_layer" in name else 0
        out = func(*args, **(kwargs or {}))
        if expected:
            self.seen.append((name, sum(made.untyped_storage().nbytes() for made in out if made is not None), expected))
        return out


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("steps", "batch", "width", "hidden"), [(16, 1, 32, 32), (7, 3, 20, 33), (16, 2, 64, 128)])
def test_no_more_is_created_than_expected(dtype: torch.dtype, steps: int, batch: int, width: int, hidden: int) -> None:
    # Gradients are in full precision whatever the layer's is: half of them was expected on processors with bfloat16.
    layer = torch.nn.LSTM(width, hidden).to(dtype)
    given = torch.ones(steps, batch, width, dtype=dtype, requires_grad=True)
    with Beside() as beside:
        layer(given)[0].float().sum().backward()
    if not beside.seen:
        pytest.skip(f"oneDNN has no LSTM of {dtype} on this processor")
    assert [name for name, *_ in beside.seen] == ["aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"]
    assert [name for name, created, expected in beside.seen if created > expected] == []


@pytest.mark.long(but=1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_forward_creates_what_was_expected_to_the_byte(dtype: torch.dtype) -> None:
    drawn = random.Random(0)
    with Beside() as beside:
        for _ in range(60):
            width, hidden = (drawn.choice([1, 16, 64, 255, 256, 257, 512, drawn.randint(2, 300)]) for _ in "in")
            layer = torch.nn.LSTM(
                width, hidden, num_layers=drawn.choice([1, 2]), bidirectional=drawn.random() < 0.3,
                batch_first=drawn.random() < 0.5,
            )  # fmt: skip
            given = torch.ones(drawn.choice([1, 2, 17]), drawn.choice([1, 5, 32]), width, dtype=dtype)
            with torch.set_grad_enabled(drawn.random() < 0.8):
                layer.to(dtype).train(drawn.random() < 0.5)(given)
    if not beside.seen:
        pytest.skip(f"oneDNN has no LSTM of {dtype} on this processor")
    assert [(created, expected) for _, created, expected in beside.seen if created != expected] == []
