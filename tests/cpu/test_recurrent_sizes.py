"""What layers of oneDNN's LSTM create is never more than was expected, in every dtype that they are there for."""

from __future__ import annotations

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
            self.seen.append((name, sum(made.untyped_storage().nbytes() for made in out), expected))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
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
