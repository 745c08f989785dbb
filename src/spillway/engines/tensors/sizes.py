"""How many bytes an op is about to create.

Asked only when room is short. Three sources, best first: what the same call created before; torch's meta functions; and,
where those do not exist because the size depends on the content, an upper bound. What a call really created is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, final

import torch

from spillway.engines.tensors.calls import operands
from spillway.engines.tensors.ops import OpInfo
from spillway.units import Bytes

_SLACK: Bytes = 64
"""Per created tensor: meta functions forget the odd scalar (`total_weight` of a loss)."""

Formula = Callable[[Sequence[Any]], Bytes]


def _nonzero(args: Sequence[Any]) -> Bytes:
    return int(args[0].numel()) * max(args[0].dim(), 1) * 8


def _selected(args: Sequence[Any]) -> Bytes:
    return int(args[0].numel()) * args[0].element_size() + _SLACK


def _unique(args: Sequence[Any]) -> Bytes:
    return int(args[0].numel()) * (args[0].element_size() + 16) + _SLACK


def _indexed(args: Sequence[Any]) -> Bytes:
    """A boolean index selects at most everything; whole-number indices broadcast to one shape."""
    source, indices = args[0], [index for index in args[1] if index is not None]
    picks = max((index.numel() for index in indices if index.dtype not in (torch.bool, torch.uint8)), default=1)
    return int(source.numel()) * source.element_size() * max(int(picks), 1)


def _repeated(args: Sequence[Any]) -> Bytes:
    return int(args[0].sum()) * 8


def _counted(args: Sequence[Any]) -> Bytes:
    largest = int(args[0].max()) + 1 if args[0].numel() else 0
    return max(largest, int(args[2]) if len(args) > 2 else 0) * 8


def _ctc(args: Sequence[Any]) -> Bytes:
    log_probs, targets = args[0], args[1]
    return int(log_probs.shape[0] * log_probs.shape[1]) * (2 * int(targets.numel()) + 1) * 8


def _packed(args: Sequence[Any]) -> Bytes:
    return int(args[0].numel()) * args[0].element_size() + int(args[1].numel()) * int(args[0].shape[0]) * 8


def _rnn_layer(args: Sequence[Any]) -> Bytes:
    """Output, states and the workspace of a oneDNN recurrent layer: gates, states and cell per step, in and out."""
    steps_by_batch = int(args[0].shape[0] * args[0].shape[1])
    hidden = int(args[1].shape[0])
    return 16 * (steps_by_batch + int(args[0].shape[1])) * hidden + (1 << 20)


def _rnn_layer_backward(args: Sequence[Any]) -> Bytes:
    tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
    return 2 * sum(int(t.numel()) * t.element_size() for t in tensors) + (1 << 20)


FORMULAS: Final[Mapping[str, Formula]] = MappingProxyType(
    {
        "aten::nonzero": _nonzero,
        "aten::argwhere": _nonzero,
        "aten::nonzero_numpy": _nonzero,
        "aten::masked_select": _selected,
        "aten::_unique": _unique,
        "aten::_unique2": _unique,
        "aten::unique_dim": _unique,
        "aten::unique_consecutive": _unique,
        "aten::unique_dim_consecutive": _unique,
        "aten::index": _indexed,
        "aten::repeat_interleave": _repeated,
        "aten::bincount": _counted,
        "aten::_ctc_loss": _ctc,
        "aten::_pack_padded_sequence": _packed,
        "aten::mkldnn_rnn_layer": _rnn_layer,
        "aten::mkldnn_rnn_layer_backward": _rnn_layer_backward,
    }
)
"""Upper bounds for ops that have no meta function, or one that is too low."""

DEPENDS_ON_CONTENT: Final = frozenset(FORMULAS) - {"aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"}
"""Ops whose size is not a function of their arguments' shapes: never remembered."""


@final
class Sizes:
    """Bytes that calls create, by a key of everything about the arguments but their content."""

    def __init__(self) -> None:
        self._known: dict[Any, Bytes] = {}
        self.surprises = 0
        """How often a call created more than was expected of it."""

    def expected(self, info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Bytes]:
        """A key for `learn`, and the bytes that the call will create at most."""
        if info.name in DEPENDS_ON_CONTENT and _needs_formula(info, args):
            return None, FORMULAS[info.name](args)
        key = (info.func, _key(args), _key(kwargs) if kwargs else None)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._estimate(info, args, kwargs)
        return key, known

    def learn(self, key: Any, created: Bytes) -> None:
        """What the call really created."""
        if key is None:
            return
        if created > self._known[key]:
            self.surprises += 1
        self._known[key] = created

    def _estimate(self, info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> Bytes:
        formula = FORMULAS.get(info.name)
        if formula is not None and info.name not in DEPENDS_ON_CONTENT:
            return formula(args)
        try:
            return _meta_bytes(info, args, kwargs)
        except Exception:  # a custom op without a meta function fails in whatever way it likes
            return 2 * sum(tensor.nbytes for _, tensor, _ in operands(info, args, kwargs)) + _SLACK


def _needs_formula(info: OpInfo, args: Sequence[Any]) -> bool:
    if info.name != "aten::index":
        return True
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(_key(element) for element in value)
    if isinstance(value, dict):
        return tuple((name, _key(element)) for name, element in value.items())
    return (type(value), value) if isinstance(value, bool | int | float) else value


def _meta_bytes(info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> Bytes:
    meta_args = [_to_meta(value) for value in args]
    meta_kwargs = {name: _to_meta(value) for name, value in kwargs.items()}
    if any(argument.name == "device" for argument in info.func._schema.arguments):
        meta_kwargs["device"] = torch.device("meta")
    operand_storages = [tensor.untyped_storage() for _, tensor, _ in operands(info, meta_args, meta_kwargs)]
    given = {storage._cdata: storage.nbytes() for storage in operand_storages}
    created: dict[int, Bytes] = {}
    stack = [info.func(*meta_args, **meta_kwargs)]
    while stack:
        result = stack.pop()
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            if storage._cdata not in given:
                created[storage._cdata] = storage.nbytes() + _SLACK
        elif isinstance(result, list | tuple):
            stack.extend(result)
    grown = {storage._cdata: storage.nbytes() - given[storage._cdata] for storage in operand_storages}
    return sum(created.values()) + sum(max(growth, 0) for growth in grown.values())


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return [_to_meta(element) for element in value]
    if isinstance(value, torch.device):
        return torch.device("meta")
    return None if isinstance(value, torch.Generator) else value
