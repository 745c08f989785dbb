"""What the engine has to know about an ATen op before it can manage it.

Everything is read off the op's schema once; what schemas do not say stands in the tables below.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, final

import torch

from spillway.engines.tensors.bounds import bound_of
from spillway.memory.records import EXACT, NEVER, SCAFFOLD, WITHOUT_CONTENT
from spillway.units import Bytes

_FUSED: Final = frozenset(f"aten::_fused_{name}_" for name in ("adam", "adamw", "sgd", "adagrad"))
_FOREACH: Final = ("aten::_foreach_", "aten::_amp_foreach_non_finite_check_and_unscale_")

_ONE_NUMBER_EACH: Final = "scalars"
"""A tensor argument of this name holds a number for each element."""

NEVER_REPLAYED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "aten::_ctc_loss": "leaves parts of its second result unwritten",
        "aten::linalg_lstsq": "starts from uninitialised pivots with its default streams, gelsy",
        "aten::set_": "changes which storage a tensor has",
        "aten::resize_": "changes the size of a storage in place",
        "aten::resize_as_": "changes the size of a storage in place",
        "aten::_pin_memory": "asks the driver for memory",
        "aten::_use_cudnn_ctc_loss": "reads the backend's state",
    }
)
"""Ops that are never run again, and why; what they create is moved instead of dropped."""

UNINITIALISED: Final = frozenset(f"aten::{name}" for name in WITHOUT_CONTENT)
"""Ops whose result has no content yet: replayed only on the way to a later version."""

UNDECLARED_ALIASES: Final = frozenset({"aten::_unsafe_view", "aten::unsafe_split", "aten::unsafe_split_with_sizes"})
"""Views that their schema does not admit to."""

LAZY_BITS: Final = frozenset({"aten::_conj", "aten::_neg_view"})
"""Views that only set a bit on the tensor; recorded geometry does not tell it, so ops on such tensors have no
recipe."""

NESTED: Final = frozenset(
    "aten::_nested_" + name
    for name in (
        "from_padded", "from_padded_and_nested_example", "tensor_from_mask", "tensor_from_tensor_list",
        "view_from_buffer", "view_from_buffer_copy",
    )
)  # fmt: skip
"""They make nested tensors, which have bytes and no shape: what comes after them goes the long way."""

KEPT_WITHIN: Final = frozenset(f"aten::_nested_tensor_{name}" for name in ("size", "strides", "storage_offsets"))
"""They hand out what a nested tensor has within, which torch reads unseen."""

HAND_OUT_PARTS: Final = frozenset(
    f"aten::{name}"
    for name in (
        "values", "indices", "crow_indices", "col_indices", "ccol_indices", "row_indices", "_values", "_indices",
        "detach", "view_as_real",
    )
)  # fmt: skip
"""Views that make nothing of a sparse tensor either: what they return is a part that it has, or has its parts."""

NO_BYTES: Final = frozenset({"aten::_efficientzerotensor"})
"""Their result has a storage without memory; it is passed by like a view."""

RESIZES: Final = frozenset({"aten::resize_", "aten::resize_as_", "aten::set_", "aten::addbmm_"})
"""In-place ops that may change the size of what they write, besides everything with `out=`."""

SCRATCH: Final[Mapping[str, tuple[int, ...]]] = MappingProxyType(
    {
        "aten::native_batch_norm": (3, 4),
        "aten::_native_batch_norm_legit": (3, 4),
        "aten::_batch_norm_with_update": (3, 4),
        "aten::batch_norm": (3, 4),
        "aten::instance_norm": (3, 4),
        "aten::cudnn_batch_norm": (3, 4),
        "aten::miopen_batch_norm": (3, 4),
    }
)
"""Running statistics by position: written in training, often unmarked, and of no influence on the result there. A
replay gets zeros in their place."""

TRAINING_FLAG: Final[Mapping[str, int]] = MappingProxyType(
    {
        "aten::native_batch_norm": 5,
        "aten::_native_batch_norm_legit": 5,
        "aten::batch_norm": 5,
        "aten::instance_norm": 5,
        "aten::cudnn_batch_norm": 5,
        "aten::miopen_batch_norm": 5,
    }
)
"""Where an op of `SCRATCH` has its `training` argument; without one it always trains."""

UNMARKED_WRITES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"aten::mkldnn_rnn_layer_backward": ("workspace",)}
)
"""Arguments that an op writes although its schema does not say so."""

ODD_DTYPES: Final = frozenset(
    getattr(torch, name)
    for name in (
        "complex32", "complex64", "complex128", "qint8", "quint8", "qint32", "quint4x2", "quint2x4",
    )
)  # fmt: skip
"""Dtypes whose tensors are more than their geometry: a lazy conjugation, a quantizer. Ops on them are looked at one by
one (`General`)."""

OWN_OPS: Final = frozenset({"aten", "prims", "mkldnn", "quantized"})
"""Namespaces of torch's own ops. Any other op may draw random numbers or have effects that its schema does not tell, so
it is never run again."""

PLAIN_TENSORS: Final[set[type]] = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
"""Types whose bytes are one storage. Other subclasses are looked at one by one."""


NO_TENSORS: Final[set[type]] = {
    type(None), bool, int, float, complex, str, list, tuple, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size,
}  # fmt: skip
"""Types of arguments that are no tensors, for ops without lists of tensors."""


def arguments_per_element(schema: Any) -> frozenset[str]:
    """Names of the arguments that hold something for each element; none for an op that is not of this kind."""
    if schema.name not in _FUSED and not schema.name.startswith(_FOREACH):
        return frozenset()
    return frozenset(a.name for a in schema.arguments if _is_list(a.type) or a.name == _ONE_NUMBER_EACH)


def _is_list(kind: Any) -> bool:
    kind = kind.getElementType() if isinstance(kind, torch._C.OptionalType) else kind
    return isinstance(kind, torch._C.ListType)


@final
class OpInfo:
    """One overload, as the engine sees it."""

    __slots__ = (
        "bound",
        "call",
        "composite",
        "exactness",
        "fast",
        "fresh",
        "func",
        "inside",
        "name",
        "per_element",
        "resized",
        "resizes",
        "safety",
        "schema_writes",
        "scratch",
        "seeded",
        "sets_storage",
        "single",
        "takes_device",
        "tensors",
        "training",
        "uncounted",
        "varies",
        "view",
        "writes",
        "writes_statistics",
    )  # fmt: skip

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.func = func
        self.call = func._op
        """What `func` calls after a Python frame of its own."""
        self.name: str = schema.name
        self.composite = _is_composite(func)
        kinds = [_tensor_kind(argument.type) for argument in schema.arguments]
        written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        self.schema_writes = frozenset(a.name for a in written) | frozenset(UNMARKED_WRITES.get(self.name, ()))
        self.tensors = tuple(place for place, kind in enumerate(kinds) if kind == "tensor")
        self.writes = tuple(p for p, argument in enumerate(schema.arguments) if argument.name in self.schema_writes)
        self.view = self._is_view(schema)
        self.seeded = torch.Tag.nondeterministic_seeded in func.tags
        self.resizes = self.name in RESIZES or any(argument.kwarg_only for argument in written)
        self.sets_storage = self.name == "aten::set_"
        """Whether it gives a tensor another storage: what the tensor had until then is neither read nor written."""
        self.resized = self.resizes or self.name == "aten::copy_"
        """Whether it may leave another size of what it writes. Functions made of ops resize `out=` unseen and copy."""
        self.uncounted = self.name.startswith("aten::_foreach_") and bool(self.writes)
        """Whether the ops inside it, if run, count the versions of what it writes (always its first argument)."""
        self.per_element = arguments_per_element(schema)
        """Arguments that hold something for each element, of an op that may run on some elements at a time."""
        self.scratch = SCRATCH.get(self.name, ())
        self.training = TRAINING_FLAG.get(self.name)
        self.exactness = _exactness(self.name)
        returns = [_tensor_kind(result.type) for result in schema.returns]
        self.single = returns == ["tensor"]
        self.fresh = self.composite or any(
            kind is not None and result.alias_info is None for kind, result in zip(returns, schema.returns, strict=True)
        )
        """Whether it may create storages, going by the schema."""
        self.takes_device = any(argument.name == "device" for argument in schema.arguments)
        """Whether a call may say on which device its result is to be."""
        positional = not any(
            argument.kwarg_only and kind is not None for argument, kind in zip(schema.arguments, kinds, strict=True)
        )
        usual = (
            positional
            and "list" not in kinds
            and all(kind in ("tensor", None) for kind in returns)
            and not (self.composite or self.exactness == NEVER)
            and (not self.seeded or (self.writes == (0,) and not self.fresh))
            and self.name not in LAZY_BITS | NESTED
            and all(place in self.tensors for place in self.writes)
        )
        self.fast = usual and not self.scratch
        """Whether the short way suits it: every tensor is a positional argument of its own."""
        self.writes_statistics = usual and bool(self.scratch) and set(self.writes) <= set(self.scratch)
        """Whether the short way would suit it but for running statistics, which it writes."""
        self.varies: Callable[[Sequence[Any]], bool] | None = None
        """Whether a call with these arguments need not give the same bits twice, where that depends on the call."""
        self.bound, self.safety = (
            (None, 1) if self.resizes and not self.fresh else bound_of(self.name, creates=self.fresh)
        )
        """A cheap upper bound of the bytes that it creates, from its arguments, and how many times the likely size that
        is."""
        self.inside: Bytes = 0

    def takes_inside(self, nbytes: Bytes) -> None:
        """A call of it was seen to take so much for itself beside what it creates, where there was no room for that:
        its bound says so from now on, and where that is too much the call itself is looked up."""
        bound = self.bound
        if bound is not None and not self.inside:
            self.bound = lambda args: None if (created := bound(args)) is None else created + self.inside
        self.inside = nbytes

    def take_the_long_way(self) -> None:
        """The short way is not for it after all."""
        self.fast = self.writes_statistics = False

    def of_parts(self) -> OpInfo:
        """A view, where it is called with a sparse tensor: of most torch makes new parts."""
        info = copy.copy(self)
        info.view, info.fresh, info.exactness, info.bound = False, self.name not in HAND_OUT_PARTS, NEVER, None
        info.take_the_long_way()
        return info

    def _is_view(self, schema: Any) -> bool:
        """A declared view reads no bytes. Composite ops that *may* alias (`to`, `reshape`) are not views."""
        if self.name in LAZY_BITS | NESTED:
            return False
        if self.name in UNDECLARED_ALIASES | NO_BYTES | KEPT_WITHIN:
            return True
        aliases = [result.alias_info for result in schema.returns]
        return bool(aliases) and not self.composite and all(a is not None and not a.is_write for a in aliases)

    def creates(self, args: Sequence[Any]) -> bool:
        """Whether a call may need memory: what is sparse has other parts when it was written."""
        written = (args[place] for place in self.writes if place < len(args))
        sparse = any(isinstance(one, torch.Tensor) and one.layout is not torch.strided for one in written)
        return self.fresh or (self.resizes and not self.sets_storage) or sparse

    def trains(self, args: Sequence[Any]) -> bool:
        """Whether an op of `SCRATCH` is called in training."""
        return self.training is None or (len(args) > self.training and bool(args[self.training]))


def _is_composite(func: Any) -> bool:
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))
    except RuntimeError:  # some ops are known to torch's Python alone: `sym_size` of a jagged tensor
        return False


def _exactness(name: str) -> int:
    if name in NEVER_REPLAYED or name.partition("::")[0] not in OWN_OPS:
        return NEVER
    return SCAFFOLD if name in UNINITIALISED else EXACT


def _tensor_kind(kind: Any) -> str | None:
    """ "tensor", "list" (of tensors, optional ones too) or None."""
    if isinstance(kind, torch._C.OptionalType):
        return _tensor_kind(kind.getElementType())
    if isinstance(kind, torch._C.TensorType):
        return "tensor"
    if isinstance(kind, torch._C.ListType):
        return "list" if _tensor_kind(kind.getElementType()) else None
    return None
