"""How many bytes an op is about to create.

Asked only when room is short. Three sources, best first: what the same call created before; torch's meta functions;
and, where those do not exist because the size depends on the content, an upper bound. What a call really created is
learned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, cast, final

import torch
from torch.utils._pytree import tree_leaves

from spillway.engines.tensors.calls import inner_tensors, operands
from spillway.engines.tensors.ops import OpInfo
from spillway.internals.private import is_wrapper, storage_of
from spillway.units import Bytes

_SLACK: Bytes = 64
"""Per created tensor of a formula or a loss: meta functions forget the odd scalar (`total_weight`)."""

_PAGE: Bytes = 4096

_MOST_KNOWN: Final = 1 << 10
"""Calls whose size is remembered."""

Formula = Callable[[Sequence[Any]], Bytes]


def _nonzero(args: Sequence[Any]) -> Bytes:
    return int(args[0].numel() * max(args[0].dim(), 1) * 8)


def _selected(args: Sequence[Any]) -> Bytes:
    return _broadcast(args) * int(args[0].element_size()) + _SLACK


def _dense(args: Sequence[Any]) -> Bytes:
    return int(args[0].numel()) * int(args[0].element_size()) + _SLACK


def _broadcast(args: Sequence[Any]) -> int:
    return math.prod(cast(Any, torch.broadcast_shapes)(args[0].shape, args[1].shape))


def _loss(args: Sequence[Any]) -> Bytes:
    """A loss is computed element by element into the storage that its mean then keeps, at full size."""
    return _broadcast(args) * max(int(args[0].element_size()), int(args[1].element_size())) + _SLACK


def _folded(args: Sequence[Any]) -> Bytes:
    """Columns become an image in a storage that was made as large as the columns are, and keeps its size."""
    columns, image, kernel = args[:3]
    pixels = (
        int(columns.numel())
        // math.prod(columns.shape[-2:])
        * (columns.shape[-2] // math.prod(kernel))
        * math.prod(image)
    )
    return max(int(columns.numel()), int(pixels)) * int(columns.element_size()) + _SLACK


def _unfolded(args: Sequence[Any]) -> Bytes:
    """An image becomes columns in a storage that was made as large as the image is, and keeps its size."""
    image, *rules = args[:5]
    each = zip(image.shape[-2:], *([*rule, *rule][:2] for rule in rules), strict=True)
    places = [(size + 2 * around - apart * (kernel - 1) - 1) // step + 1 for size, kernel, apart, around, step in each]
    columns = int(math.prod(image.shape[:-2])) * math.prod(([*rules[0], *rules[0]])[:2]) * math.prod(places)
    return int(max(int(image.numel()), columns) * image.element_size()) + _SLACK


def _whole_storage(args: Sequence[Any]) -> Bytes:
    """A tangent has a storage as large as that of what it is the tangent of, however little of it that covers; for each
    of a batch."""
    tangent, primal = args[0], args[1]
    elements = primal.untyped_storage().nbytes() // primal.element_size()
    return int(elements * tangent.element_size() * max(tangent.numel() // max(primal.numel(), 1), 1)) + _SLACK


def _cloned_with_storage(args: Sequence[Any]) -> Bytes:
    """What is written into a view is a copy of the whole storage, of which the first argument may show a part, or every
    element several times."""
    return int(max(args[0].untyped_storage().nbytes(), args[0].numel() * args[0].element_size())) + _SLACK


def _bins(args: Sequence[Any]) -> list[int]:
    """Bins per dimension, given as numbers or as tensors of edges, one for all dimensions or one for each."""
    given = args[1] if len(args) > 1 else 100
    each = given if isinstance(given, list | tuple) else [given]
    return [int(bins.numel()) if isinstance(bins, torch.Tensor) else int(bins) for bins in each]


def _edges(args: Sequence[Any]) -> Bytes:
    return sum((bins + 1) * int(args[0].element_size()) + _SLACK for bins in _bins(args))


def _histogram(args: Sequence[Any]) -> Bytes:
    return _edges(args) + math.prod(_bins(args)) * int(args[0].element_size()) + _SLACK


def _unique(args: Sequence[Any]) -> Bytes:
    return int(int(args[0].numel()) * (args[0].element_size() + 16) + _SLACK)


def _indexed(args: Sequence[Any]) -> Bytes:
    """A boolean index selects at most everything; whole-number indices broadcast to one shape."""
    source, indices = args[0], [index for index in args[1] if index is not None]
    picks = max((index.numel() for index in indices if index.dtype not in (torch.bool, torch.uint8)), default=1)
    return int(int(source.numel()) * source.element_size() * max(int(picks), 1))


def _repeated(args: Sequence[Any]) -> Bytes:
    """Positions, of repeats alone; else slices of a tensor, which comes as one op where autograd is left out."""
    if len(args) == 1:
        return int(args[0].sum()) * 8
    source, repeats = args[0], args[1]
    return (
        int(source.numel()) * int(source.element_size()) * int(repeats if isinstance(repeats, int) else repeats.max())
    )


def _counted(args: Sequence[Any]) -> Bytes:
    largest = int(args[0].max()) + 1 if args[0].numel() else 0
    return max(largest, int(args[2]) if len(args) > 2 else 0) * 8


def _ctc(args: Sequence[Any]) -> Bytes:
    """For each step of each sequence a number for each state that its target has, and one for each sequence."""
    log_probs, targets, lengths = args[0], args[1], args[3]
    most = int(targets.shape[-1])  # of one target, or of all in a row
    longest = most if isinstance(lengths, torch.Tensor) else min(max(lengths, default=0), most)
    states = math.prod(map(int, log_probs.shape[:2])) * (2 * longest + 1)
    return (states + int(log_probs.shape[1])) * int(log_probs.element_size()) + 2 * _SLACK


def _ctc_backward(args: Sequence[Any]) -> Bytes:
    """The gradient of what the loss is of."""
    return int(args[1].numel()) * int(args[1].element_size()) + _SLACK


def _packed(args: Sequence[Any]) -> Bytes:
    return int(int(args[0].numel()) * args[0].element_size() + int(args[1].numel()) * int(args[0].shape[0]) * 8)


def _bags(args: Sequence[Any]) -> Bytes:
    """A row for each bag, which bag each index is in and one more, and how many and which are in each."""
    table, indices, bags = args[0], int(args[1].numel()), int(args[2].numel())
    row, largest = int(table.shape[-1]), len(args) > 4 and args[4] == 2
    return bags * (row * int(table.element_size()) + 8 + 8 * (row if largest else 1)) + 8 * (indices + 1) + 4 * _SLACK


def _sparse_product(args: Sequence[Any]) -> Bytes:
    """The product of a sparse and a dense matrix, and where its largest or smallest terms stood."""
    return int(args[0].shape[0] * args[1].shape[1]) * (int(args[1].element_size()) + 8) + 2 * _SLACK


def _sparse(args: Sequence[Any]) -> Bytes:
    """All elements in another layout: a number for each dimension beside each, or pointers to rows or columns."""
    tensor = args[0]
    pointers: Bytes = 8 * (sum(map(int, tensor.shape)) + 2) * math.prod(map(int, tensor.shape[:-2]))
    if tensor.layout is not torch.strided:
        return 2 * _widened(tensor) + pointers + 4 * _SLACK
    return int(tensor.numel()) * (int(tensor.element_size()) + 8 * max(int(tensor.dim()), 2)) + pointers + 4 * _SLACK


def _wrapped(args: Sequence[Any]) -> Bytes:
    """Indices and values that are there become the parts of a sparse tensor."""
    return _SLACK


def _sparse_square(args: Sequence[Any]) -> Bytes:
    """The product of two sparse matrices: in a row no more than the other has columns."""
    left, right = args[:2]
    rows, columns = int(left.shape[0]), int(right.shape[1])
    numbers = min(rows * columns, int(left._nnz()) * columns, int(right._nnz()) * rows)
    return numbers * (int(left.element_size()) + 16) + 8 * (rows + columns + 2) + 4 * _SLACK


def _picked(args: Sequence[Any]) -> Bytes:
    """A part of a sparse tensor, which has parts of its own."""
    return sum(int(part.numel()) * int(part.element_size()) for part in inner_tensors(args[0]))


def _turned(args: Sequence[Any]) -> Bytes:
    """Other numbers of dimensions, and values in another order; the parts of compressed layouts trade places."""
    return _picked(args) if args[0].layout is torch.sparse_coo else 0


def _unsqueezed(args: Sequence[Any]) -> Bytes:
    """A number more for each element of a sparse tensor."""
    return 8 * (int(args[0].sparse_dim()) + 1) * int(args[0]._nnz())


def _ternary_lists(args: Sequence[Any]) -> Bytes:
    """The sum or product of three tensors, for each element of three lists."""
    elements = list(zip(*args[:3], strict=True))
    shapes = [cast(Any, torch.broadcast_shapes)(*(tensor.shape for tensor in three)) for three in elements]
    widths = [max(int(tensor.element_size()) for tensor in three) for three in elements]
    return sum(math.prod(shape) * width + _SLACK for shape, width in zip(shapes, widths, strict=True))


def _rnn_layer(args: Sequence[Any]) -> Bytes:
    """Output, states and workspace of a oneDNN LSTM layer, exactly.

    The workspace holds for every step, each on pages of its own: gates and result; on both sides of the layer and once
    more for the beginning two states; and in full precision what the backward adds up for them and for the input.
    """
    (steps, batch, width), states, size = args[0].shape, args[5:7], args[0].element_size()
    hidden = int(args[10])
    made = steps * batch * hidden * size + sum(state.nbytes for state in states)
    if not torch.is_grad_enabled():
        return int(made)
    forward, sides, wide = steps * batch, 2 * (steps + 1) * batch, max(width, hidden)
    kept = [forward * rnn_row(4 * hidden, size), forward * rnn_row(hidden, size)]
    kept += [sides * rnn_row(wide, size), sides * hidden * states[1].element_size()]
    added_up = [sides * rnn_row(wide, 4), sides * rnn_row(wide, 4), sides * hidden * 4]
    return int(made + sum(map(pages, kept + added_up)))


def rnn_row(numbers: int, size: Bytes) -> Bytes:
    """Rows are rounded up to 64 bytes, and made longer where their length would be a multiple of 256 numbers."""
    nbytes = -(-numbers * size // 64) * 64
    return nbytes if nbytes % (256 * size) else nbytes + 64


def pages(nbytes: int) -> Bytes:
    """What they take in whole pages."""
    return -(-nbytes // _PAGE) * _PAGE


def _rnn_layer_backward(args: Sequence[Any]) -> Bytes:
    """A gradient for each of the first seven arguments, in full precision whatever theirs is."""
    return sum(int(t.numel()) * max(t.element_size(), 4) + _SLACK for t in args[:7])


_FROM_SHAPES: Final = frozenset(
    {
        _folded,
        _bags,
        _sparse_product,
        _dense,
        _loss,
        _edges,
        _histogram,
        _ternary_lists,
        _turned,
        _unsqueezed,
        _wrapped,
        _rnn_layer,
        _rnn_layer_backward,
    }
)
"""Formulas that look at nothing but shapes and numbers."""

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
        "aten::_ctc_loss_backward": _ctc_backward,
        "aten::_pack_padded_sequence": _packed,
        "aten::_sparse_mm_reduce_impl": _sparse_product,
        "aten::_embedding_bag": _bags,
        "aten::_embedding_bag_forward_only": _bags,
        "aten::histogram": _histogram,
        "aten::_histogramdd_bin_edges": _edges,
        "aten::_histogramdd_from_bin_cts": _histogram,
        "aten::_histogramdd_from_bin_tensors": _histogram,
        "aten::_to_dense": _dense,
        **{f"aten::_to_sparse{layout}": _sparse for layout in ("", "_csr", "_csc", "_bsr", "_bsc")},
        "aten::_sparse_sparse_matmul": _sparse_square,
        "aten::_sparse_coo_tensor_with_dims_and_tensors": _wrapped,
        **{f"aten::{name}": _picked for name in ("select", "unbind")},
        **{f"aten::{name}": _turned for name in ("t", "transpose", "permute")},
        "aten::unsqueeze": _unsqueezed,
        "aten::col2im": _folded,
        "aten::im2col": _unfolded,
        "aten::_new_zeros_with_same_feature_meta": _whole_storage,
        "aten::select_scatter": _cloned_with_storage,
        "aten::slice_scatter": _cloned_with_storage,
        "aten::diagonal_scatter": _cloned_with_storage,
        "aten::as_strided_scatter": _cloned_with_storage,
        "aten::mse_loss": _loss,
        "aten::smooth_l1_loss": _loss,
        "aten::soft_margin_loss": _loss,
        "aten::binary_cross_entropy": _loss,
        "aten::_foreach_addcmul": _ternary_lists,
        "aten::_foreach_addcdiv": _ternary_lists,
        "aten::mkldnn_rnn_layer": _rnn_layer,
        "aten::mkldnn_rnn_layer_backward": _rnn_layer_backward,
    }
)
"""Upper bounds for ops that have no meta function, or one that is too low."""

DEPENDS_ON_CONTENT: Final = frozenset(name for name, formula in FORMULAS.items() if formula not in _FROM_SHAPES)
"""Ops whose size is not a function of their arguments' shapes: never remembered."""

_PRODUCTS: Final = frozenset({"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"})
_LIKE_OPERANDS: Final = frozenset(
    f"aten::{name}"
    for name in (
        "add", "sub", "mul", "div", "neg", "exp", "relu", "gelu", "tanh", "sigmoid", "silu", "clone", "gelu_backward",
        "threshold_backward", "tanh_backward", "sigmoid_backward", "silu_backward", "_softmax_backward_data",
    )
)  # fmt: skip

_QUANTIZED: Final = frozenset(
    {"aten::_empty_affine_quantized", "aten::_empty_per_channel_affine_quantized", "aten::empty_quantized"}
)
"""They make what their first argument is the shape of, and have no meta function."""

READS_CONTENT: Final = frozenset({"aten::repeat_interleave", "aten::bincount"})
"""Ops whose formula reads the bytes of their first operand, which have to be there before it is asked."""


@final
class Sizes:
    """Bytes that calls create, by a key of everything about the arguments but their content."""

    def __init__(self) -> None:
        self._known: dict[Any, Bytes] = {}
        self._guessed: set[Any] = set()

    def expected(self, info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Bytes]:
        """A key for `learn`, and the bytes that the call will create at most."""
        if info.name in DEPENDS_ON_CONTENT and _needs_formula(info, args):
            return None, FORMULAS[info.name](args)
        try:
            settings = torch.is_grad_enabled(), torch.get_default_dtype()
            key = (info.func, settings, _key(args), _key(kwargs) if kwargs else None)
            known = self._known.get(key)
        except (RuntimeError, TypeError):  # nested tensors have no shape, or one of symbols
            return None, _guess(info, args, kwargs)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:  # numbers that change from step to step make new keys for ever
                self._known.clear()
                self._guessed.clear()
            known = self._known[key] = self._estimate(key, info, args, kwargs)
        return key, known

    def sure(self, key: Any) -> bool:
        """Whether what was expected for this key was told, not guessed."""
        return key is not None and key not in self._guessed

    def learn(self, key: Any, created: Bytes) -> None:
        """What the call really created."""
        if key is None or key not in self._known:  # an op that ran inside this one may have had all forgotten
            return
        self._known[key] = max(created, self._known[key]) if key in self._guessed else created

    def _estimate(self, key: Any, info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> Bytes:
        formula = FORMULAS.get(info.name)
        if formula is not None and info.name not in DEPENDS_ON_CONTENT:
            return formula(args)
        if any(tensor.layout is not torch.strided for _, tensor, _ in operands(info, args, kwargs)):
            self._guessed.add(key)
            return _guess(info, args, kwargs)
        try:
            if not kwargs and (evident := _evident(info, args)) is not None:
                return evident
            return _meta_bytes(info, args, kwargs)
        except Exception:  # a custom op without a meta function fails in whatever way it likes
            self._guessed.add(key)  # and its next result may be larger
            return _guess(info, args, kwargs)


def _guess(info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> Bytes:
    """Twice what it is given, of at least single precision: what is narrow may be widened, as by `dequantize`. A
    product may be dense."""
    given = 2 * sum(_widened(tensor) for _, tensor, _ in operands(info, args, kwargs)) + _SLACK
    if info.name in _QUANTIZED:
        return int(given + math.prod(args[0]) * (kwargs["dtype"].itemsize if kwargs.get("dtype") else 4))
    if info.name not in _PRODUCTS:
        return given
    left, right = args[-2:]
    return int(given + math.prod(left.shape[:-1]) * right.shape[-1] * max(left.element_size(), right.element_size()))


def _widened(tensor: torch.Tensor) -> Bytes:
    parts = [tensor] if tensor.layout is torch.strided else [p for p in inner_tensors(tensor) if not is_wrapper(p)]
    nbytes = sum(part.numel() * max(part.element_size(), 4) for part in parts)
    return int(nbytes * (max(tensor.size(0), 1) if tensor.is_nested else 1))  # each may be padded to the longest


def _evident(info: OpInfo, args: Sequence[Any]) -> Bytes | None:
    """Bytes of the most frequent ops in training, at a tenth of the cost of a meta function; None if it takes one.

    Floating-point operands of one shape and dtype give a result of that shape and dtype.
    """
    if info.name in _PRODUCTS:
        left, right = args[-2], args[-1]
        if not isinstance(right, torch.Tensor) or not (left.dim() and right.dim() and left.shape[-1]):
            return None
        return int(left.numel() // left.shape[-1] * right.shape[-1] * left.element_size())
    if info.name not in _LIKE_OPERANDS or not args[0].dtype.is_floating_point:
        return None
    first = args[0]
    for other in args[1:]:
        if isinstance(other, torch.Tensor) and (other.shape != first.shape or other.dtype != first.dtype):
            return None
        if isinstance(other, complex) or (isinstance(other, torch.dtype) and other != first.dtype):
            return None
    return int(first.numel() * first.element_size())


def _needs_formula(info: OpInfo, args: Sequence[Any]) -> bool:
    if info.name != "aten::index":
        return True
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            return value.shape, value.stride(), value.dtype, value.device
        return value.shape, value.layout, value.dtype, *(_key(part) for part in inner_tensors(value))
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
    operand_storages = [storage_of(tensor) for _, tensor, _ in operands(info, meta_args, meta_kwargs)]
    given = {storage._cdata: storage.nbytes() for storage in operand_storages}
    slack = _SLACK if "loss" in info.name else 0
    out = info.func(*meta_args, **meta_kwargs)
    results = [tensor for tensor in tree_leaves(out) if isinstance(tensor, torch.Tensor)]
    made = {storage._cdata: storage.nbytes() + slack for storage in map(storage_of, results)}
    created = sum(nbytes for key, nbytes in made.items() if key not in given)
    if not (info.writes or info.composite or info.view):  # the kernel copies what comes back there: dropout that is off
        created += sum(one.numel() * one.element_size() for one in results if storage_of(one)._cdata in given)
    grown = {storage._cdata: storage.nbytes() - given[storage._cdata] for storage in operand_storages}
    return int(created + sum(max(growth, 0) for growth in grown.values()))


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return [_to_meta(element) for element in value]
    if isinstance(value, torch.device):
        return torch.device("meta")
    return None if isinstance(value, torch.Generator) else value
