"""What ops take, told on tensors without content: how many bytes are alive, and how many one op needs at once."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast, final

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from spillway.engines.tensors.collectives import NAMESPACES
from spillway.engines.tensors.convolutions import most_instructions, within_convolution, within_convolution_backward
from spillway.engines.tensors.fakes import remembered
from spillway.engines.tensors.lists import part_of
from spillway.engines.tensors.ops import arguments_per_element
from spillway.engines.tensors.sizes import FORMULAS, pages, rnn_row
from spillway.internals.private import owners, storage_of
from spillway.memory.ledger import SMALLEST_MOVABLE
from spillway.units import Bytes

_BLOCKED: Final = 32
"""Columns that LAPACK works on at once."""
_SHORT: Final = (torch.float16, torch.bfloat16)
_PRODUCTS: Final = ("aten::mm", "aten::addmm")
_BATCHED: Final = ("aten::bmm", "aten::baddbmm")
_BY_PROCESSOR: Final = frozenset({"aten::convolution", "aten::convolution_backward", *_PRODUCTS, *_BATCHED})
"""Ops of which only the kernels of full precision are told for sure: the others are every processor's own."""
_UNTOLD: Final = frozenset({"aten::mkldnn_rnn_layer"})
"""Ops whose last result is a workspace that fake tensors have no size of."""
_PACKS: Final[Mapping[torch.dtype, tuple[str, int, int]]] = MappingProxyType(
    {torch.bfloat16: ("_is_amx_tile_supported", 64, 4), torch.float16: ("_is_amx_fp16_supported", 16, 1)}
)
"""Types that an attention packs keys and values of, where the processor has tiles for products of them (and what
`torch.cpu` calls that): from so many queries and keys on, and if it is to be so many times less than the products."""


def _of_batch_norm(args: Sequence[Any], out: Any) -> Bytes:
    """Sums and factors of each channel: two at once, three where channels lie beside each other."""
    x = args[0]
    beside = x.dim() == 2 or not x.is_contiguous()
    return (2 + beside) * 4 * int(x.shape[1]) if x.device.type == "cpu" else 0


def _of_batch_norm_backward(args: Sequence[Any], out: Any) -> Bytes:
    """The gradient of the input is made twice."""
    x = args[1]
    return int(x.nbytes) if x.device.type == "cpu" and args[9][0] else 0


def _of_rnn_layer(args: Sequence[Any], out: Any, hidden_at: int = 10) -> Bytes:
    """Of a oneDNN LSTM layer: its weights turned, the sum of its biases, its gates, and some pages. To the byte in full
    precision and with a backward; without one it can be a third more."""
    (steps, batch, width), hidden, size = args[0].shape, int(args[hidden_at]), args[0].element_size()
    gates = rnn_row(4 * hidden, size)
    own = pages(steps * batch * gates) + 2 * pages(batch * rnn_row(hidden, size)) + pages(1) + 568
    return int(own + (width + hidden) * gates + 4 * hidden * size)


def _of_rnn_layer_backward(args: Sequence[Any], out: Any) -> Bytes:
    """As much, gradients of the results that do not lie in order, and the weights again where rows are rounded up."""
    width, hidden, size = args[0].shape[2], int(args[15]), args[0].element_size()
    rounded = [numbers for numbers in (width, hidden) if rnn_row(numbers, size) != numbers * size]
    turned = sum(4 * hidden * rnn_row(numbers, size) for numbers in rounded)
    pairs = zip(args[7:10], args[10:13], strict=True)
    copied = sum(result.nbytes for result, given in pairs if given is None or not given.is_contiguous())
    return int(_of_rnn_layer(args, out, 15) + copied + turned)


def _of_attention(args: Sequence[Any], out: Any) -> Bytes:
    """Of a flash attention on the CPU, in every thread: one block of queries times keys, its maxima and sums, and of
    the result; products in a shorter type beside them. To the byte."""
    query, key = args[:2]
    rows, columns = _in_blocks(query, key)
    own = (rows * columns + 2 * rows + rows * int(query.shape[-1])) * max(4, query.itemsize)
    packed = _packed(query, key, rows, columns, causal=len(args) > 4 and bool(args[4]))
    return int(own + _shorter(query) * rows * columns) * torch.get_num_threads() + packed


def _packed(query: torch.Tensor, key: torch.Tensor, rows: int, columns: int, *, causal: bool) -> Bytes:
    """Keys and values packed for tiles, a block of keys turned around in every thread, and what lengths that are odd
    are filled up with."""
    supported, least, times = _PACKS.get(query.dtype, ("", 0, 0))
    (batch, heads, queries, width), keys, threads = query.shape, int(key.shape[2]), torch.get_num_threads()
    if not supported or min(queries, keys) < least or not _has_tiles(supported):
        return 0
    pairs, blocks = batch * int(key.shape[1]), batch * heads * -(-queries // rows)
    seen = min(queries, keys) if causal else keys
    if (blocks + threads - 1) // threads * rows * seen < times * pairs * keys:
        return 0
    wide, tail = width + width % 2, (keys - 1) % columns + 1
    filled = (keys - 1) // columns * (columns + columns % 2) + tail + tail % 2
    turned = columns * width + rows * (wide * (width % 2) + columns % 2)
    return int(pairs * (wide * keys + filled * width) + threads * turned) * query.itemsize


def _has_tiles(supported: str) -> bool:
    """As far as the processor, torch's settings and the environment allow oneDNN."""
    most = most_instructions()
    capped = most != "" and "AMX" not in most
    has = getattr(torch.cpu, supported, None)  # older ones cannot tell
    return has is not None and bool(has()) and not capped and bool(torch._C._get_mkldnn_enabled())


def _of_attention_backward(args: Sequence[Any], out: Any) -> Bytes:
    """Two blocks and a sum for each of their rows, and the gradient in order. To the byte in full precision and one
    thread: threads do not have theirs at the same moments."""
    gradient, query, key = args[:3]
    rows, columns = _in_blocks(query, key)
    own = (2 * rows * columns + rows) * max(4, query.itemsize) + 2 * _shorter(query) * rows * columns
    in_order = gradient.transpose(1, 2).is_contiguous()
    return int(own * torch.get_num_threads() + (0 if in_order else gradient.numel() * gradient.itemsize))


def _in_blocks(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    queries, keys = int(query.shape[2]), int(key.shape[2])
    return min(256 if queries >= 768 else 64 if queries >= 192 else 32, queries), min(512, keys)


def _of_matrix_exp(args: Sequence[Any], out: Any, alone: int = 12) -> Bytes:
    """Of the longest of its series: five powers and as many sums of them, the matrix scaled and, where it is alone, a
    copy of it. There its content says which series it is."""
    matrix = args[0]
    return (alone if matrix[..., 0, 0].numel() == 1 else 10) * int(matrix.nbytes)


def _of_copies(args: Sequence[Any], out: Any, copies: int = 1, columns: int = _BLOCKED) -> Bytes:
    """What LAPACK writes to is a copy; what it has besides grows with the rows."""
    return copies * int(args[0].nbytes) + columns * int(args[0].shape[-1]) * int(args[0].itemsize)


def _of_group_norm_backward(args: Sequence[Any], out: Any) -> Bytes:
    """Two sums for each channel of each of a batch."""
    x = args[1]
    return 2 * max(4, x.itemsize) * int(x.shape[0]) * int(x.shape[1]) if x.device.type == "cpu" else 0


def _shorter(query: torch.Tensor) -> Bytes:
    return query.itemsize if query.itemsize < 4 else 0


_ARITHMETIC: Final = (
    "add", "sub", "rsub", "mul", "div", "pow", "fmod", "remainder", "maximum", "minimum", "atan2", "addcmul", "addcdiv",
    "eq", "ne", "lt", "le", "gt", "ge", "exp", "log", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid", "reciprocal",
    "abs", "angle",
)  # fmt: skip
"""Ops that compute in one type, which on the CPU operands of others are cast to first."""
_IN_PLACE: Final = ("add_", "sub_", "mul_", "div_", "addcmul_", "addcdiv_")


def _of_casts(args: Sequence[Any], out: Any) -> Bytes:
    """Operands in the type that is computed in; a result that is real, where that is not, as well."""
    given = [one for one in args if isinstance(one, torch.Tensor)]
    if not given or not isinstance(out, torch.Tensor) or out.device.type != "cpu":
        return 0
    if out.dtype is torch.bool:  # of a comparison
        dtype = torch.result_type(args[0], args[1]) if len(args) > 1 else given[0].dtype
    else:
        dtype = out.dtype
        if given[0].is_complex() and not dtype.is_complex:
            return int(out.numel()) * given[0].itemsize
    return sum(int(one.numel()) * dtype.itemsize for one in given if one.dtype is not dtype)


def _of_casts_in_place(args: Sequence[Any], out: Any) -> Bytes:
    """The same, and what is written to in that type, before and after."""
    given = [one for one in args if isinstance(one, torch.Tensor)]
    dtype = functools.reduce(torch.promote_types, (one.dtype for one in given if one.dim() or not out.dim()))
    if out.device.type != "cpu":
        return 0
    cast = sum(int(one.numel()) * dtype.itemsize for one in given if one.dtype is not dtype)
    return cast + (int(out.numel()) * dtype.itemsize if out.dtype is not dtype else 0)


def _of_sum(args: Sequence[Any], out: Any) -> Bytes:
    """What is summed, in the type of the sum."""
    x = args[0]
    return int(x.numel()) * out.itemsize if x.device.type == "cpu" and x.dtype is not out.dtype else 0


def _of_mean(args: Sequence[Any], out: Any) -> Bytes:
    """The same; what is to be in half precision is summed, and divided, in full."""
    x = args[0]
    if x.device.type != "cpu" or out.dtype not in _SHORT:
        return _of_sum(args, out)
    return 4 * (int(out.numel()) + (int(x.numel()) if x.dtype is not torch.float32 else 0))


def _of_product(args: Sequence[Any], out: Any) -> Bytes:
    """Copies of matrices that lie neither row by row nor column by column, and of conjugates that are not turned."""
    if out.device.type != "cpu":
        return 0
    column = int(out.shape[1]) == 1  # is made column by column
    return sum(_copied(one, turned=column) for one in _matrices(args))


def _of_batched_product(args: Sequence[Any], out: Any) -> Bytes:
    """Copies of conjugates, and of one pair of matrices at a time of others."""
    if out.device.type != "cpu":
        return 0
    given = _matrices(args)
    copied = sum(int(one.numel()) * one.itemsize for one in given if one.is_conj())
    return copied + sum(_copied(one, turned=False) for one in given if not one.is_conj() and one.shape[0])


def _matrices(args: Sequence[Any]) -> list[torch.Tensor]:
    last = [one for one in args if isinstance(one, torch.Tensor)][-2:]
    return [one for one in last if one.layout is torch.strided and not one.is_nested]


def _copied(matrix: torch.Tensor, *, turned: bool) -> Bytes:
    """One copy, of one of a batch."""
    (rows, columns), (down, across) = map(int, matrix.shape[-2:]), matrix.stride()[-2:]
    lies = across == 1 and down >= max(columns, 1)
    lies_turned = down == 1 and across >= max(rows, 1)
    plain, other = (lies_turned, lies) if turned else (lies, lies_turned)
    fine = not matrix.is_conj() if plain else other
    return 0 if fine else rows * columns * matrix.itemsize


_WITHIN: Final[Mapping[str, Callable[[Sequence[Any], Any], Bytes]]] = MappingProxyType(
    {
        **{f"aten::{name}": _of_casts for name in _ARITHMETIC},
        **{f"aten::{name}": _of_casts_in_place for name in _IN_PLACE},
        "aten::where": lambda args, out: _of_casts(args[1:], out),
        "aten::sum": _of_sum,
        "aten::mean": _of_mean,
        **dict.fromkeys(_PRODUCTS, _of_product),
        **dict.fromkeys(_BATCHED, _of_batched_product),
        "aten::_scaled_dot_product_flash_attention_for_cpu": _of_attention,
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _of_attention_backward,
        "aten::convolution": within_convolution,
        "aten::convolution_backward": within_convolution_backward,
        "aten::_linalg_eigh": partial(_of_copies, copies=2),
        "aten::_linalg_svd": _of_copies,
        "aten::linalg_householder_product": partial(_of_copies, copies=0),
        "aten::linalg_inv_ex": partial(_of_copies, columns=1),
        "aten::linalg_matrix_exp": _of_matrix_exp,
        "aten::linalg_qr": partial(_of_copies, copies=0),
        "aten::native_batch_norm": _of_batch_norm,
        "aten::native_batch_norm_backward": _of_batch_norm_backward,
        "aten::native_group_norm_backward": _of_group_norm_backward,
        "aten::mkldnn_rnn_layer": _of_rnn_layer,
        "aten::mkldnn_rnn_layer_backward": _of_rnn_layer_backward,
    }
)
"""What kernels take for themselves beside their results, by positional arguments and results, as measured with torch
2.13."""

_AT_LEAST: Final[Mapping[str, Callable[[Sequence[Any], Any], Bytes]]] = MappingProxyType(
    {**_WITHIN, "aten::linalg_matrix_exp": partial(_of_matrix_exp, alone=4)}
)
"""The same where content says how much it is, and none is known: what cannot be less."""


@final
class Tally(cast(Any, TorchDispatchMode)):  # type: ignore[misc]  # torch's class has no annotations
    """Adds up what ops read and create. What runs on content alone, such as the whole numbers of a tree, runs, as does
    what makes a tensor of one number; nothing is written that was not made in it. `there` are the tensors that are
    there when it begins; `least` asks for what cannot be less, where content decides, and `adds` has autograd add to
    gradients in place, as it does where no mode hears of it."""

    supports_higher_order_operators = True

    def __init__(self, there: Iterable[torch.Tensor] = (), *, least: bool = False, adds: bool = False) -> None:
        super().__init__()
        self._adds = adds
        self._within = _AT_LEAST if least else _WITHIN
        self.alive: Bytes = 0
        """Of what was made in it."""
        self.lives: Bytes = 0
        """The most of that."""
        self.peak: Bytes = 0
        """The same with what kernels take for themselves."""
        self.small: Bytes = 0
        """Of all that is alive and too small to leave."""
        self.largest: Bytes = 0
        """The most that one op reads and creates of what may leave, with what is too small for that."""
        self.sure = True
        """Whether it is known of every kernel what it takes for itself."""
        self.number: float | None = None
        """What a tensor without content answers to who wants a number; None for an error."""
        self._known: dict[int, _Known] = {}
        for tensor in there:
            self._note(storage_of(tensor), made=False)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's wrapper against dynamo costs more than what it wraps, and nothing here is compiled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):  # two of three calls
            return args[0].fake_device
        if isinstance(func, HigherOrderOperator):  # what it does where nothing is compiled
            with self:
                return func.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd](*args, **(kwargs or {}))
        name = func._schema.name
        if name.startswith(NAMESPACES):
            raise RuntimeError("This forward is no other process's.")  # who would wait for it, or be waited for
        given = _leaves(args, _leaves(kwargs, [])) if kwargs else _leaves(args, [])
        tensors = [one for one in given if isinstance(one, torch.Tensor)]
        empty = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if empty and func is torch.ops.aten.equal.default and tensors[0].dtype is torch.uint8:
            return True  # bytes that the block engine looks at, before and after a block: there are none
        if empty and func is torch.ops.aten._local_scalar_dense.default and self.number is not None:
            return self.number
        if self._adds and func is torch.ops.aten.add.Tensor and _accumulates(args):
            func, name = torch.ops.aten.add_.Tensor, "aten::add_"
        if func is torch.ops.aten.lift_fresh.default:  # of a tensor that Python has just made of numbers
            given = []
        if empty and name.startswith("aten::_fused_") and not func._schema.returns:
            out = None  # an update in place, which makes nothing: fake tensors would have some run on real zeros
        elif empty:
            out = remembered(func, args, kwargs or {})
        else:
            out = self._run(func, tensors, args, kwargs or {})
        for one in given:
            self._note(_storage(one), made=False)
        made = [_storage(one) for one in _leaves(out, []) if isinstance(one, torch.Tensor)]
        if name in _UNTOLD and made[3:]:
            others = sum(storage.nbytes() for storage in made[:3])
            self._note(made[3], made=True, nbytes=FORMULAS[name](args) - others)
        for storage in made:
            self._note(storage, made=True)
        at_once = self._at_once(func, args, given, out)
        self.largest = max(self.largest, at_once + self.small)
        within = self._within[name](args, out) if name in _WITHIN else 0
        if name in _BY_PROCESSOR and args[0].device.type == "cpu" and args[0].dtype in _SHORT:
            self.sure = False
        self.lives, self.peak = max(self.lives, self.alive), max(self.peak, self.alive + within)
        return out

    def _run(self, func: Any, tensors: Sequence[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """On content, where there is any."""
        if not tensors and args[:1] != ([],):
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            if func._schema.is_mutable and any(map(self._is_others, tensors)):
                args, kwargs = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
            return func(*args, **kwargs)

    def hold(self, held: Iterable[Any]) -> None:
        """What no op makes: tensors among what is given count for as long as they live."""
        for tensor in held:
            if isinstance(tensor, torch.Tensor):
                self._note(storage_of(tensor), made=True)
        self.peak = max(self.peak, self.alive)

    def _is_others(self, tensor: torch.Tensor) -> bool:
        known = self._known.get(storage_of(tensor)._cdata)
        return known is None or not known.made

    def _note(self, storage: torch.UntypedStorage, *, made: bool, nbytes: Bytes = 0) -> None:
        key, nbytes = storage._cdata, nbytes or storage.nbytes()
        if key not in self._known:
            self._count(nbytes, made=made)
            own = weakref.ref(self)  # no cycle, so that nobody hears of deaths when this is gone

            def died(_: Any) -> None:
                if (tally := own()) is not None:
                    known = tally._known.pop(key)
                    tally._count(-known.nbytes, made=known.made)

            self._known[key] = _Known(nbytes, made, weakref.ref(storage, died))

    def _count(self, nbytes: Bytes, *, made: bool) -> None:
        self.alive += nbytes if made else 0
        self.small += nbytes if abs(nbytes) < SMALLEST_MOVABLE else 0

    def _at_once(self, func: Any, args: Sequence[Any], given: Sequence[Any], out: Any) -> Bytes:
        if not arguments_per_element(func._schema):
            return sum(self._large((given, out)).values())
        listed = [value for value in args if isinstance(value, list | tuple) and value]
        elements = list(zip(*(value for value in listed if isinstance(value[0], torch.Tensor)), strict=False))
        return max(map(self._in_parts, elements, out if out is not None else [None] * len(elements)), default=0)

    def _large(self, tree: Any) -> dict[int, Bytes]:
        keys = {_storage(one)._cdata for one in _leaves(tree, [])}
        return {key: nbytes for key in keys if (nbytes := self._known[key].nbytes) >= SMALLEST_MOVABLE}

    def _in_parts(self, element: Sequence[torch.Tensor], made: torch.Tensor | None) -> Bytes:
        """Of an element of lists: where it is too large, one part of its tensors is copied after the other, as
        `lists.Elements` does it."""
        whole = self._large((element, made))
        shaped = [tensor for tensor in element if tensor.dim()]
        apart = {_storage(tensor)._cdata for tensor in shaped}
        alike = len({tensor.shape for tensor in (*shaped, *([] if made is None else [made]))}) == 1
        if not whole or not alike or len(apart) != len(shaped):
            return sum(whole.values())
        part = part_of(shaped[0].numel()) * max(tensor.element_size() for tensor in shaped)
        return min(sum(whole.values()), max(max(whole.values()), len(whole) * part - part) + part)


class _Known(NamedTuple):
    nbytes: Bytes
    made: bool
    """And not there before."""
    death: weakref.ref[Any]
    """What tells of it."""


_ALONE: Final = 4
"""References to a gradient that autograd adds another to, if no other node waits for it: autograd's, the dispatcher's
and Python's."""


def _accumulates(args: Sequence[Any]) -> bool:
    """Whether autograd adds to a gradient that nobody else holds."""
    one, other = args[:2]
    if torch._C._current_graph_task_id() < 0 or torch.is_grad_enabled() or not isinstance(other, torch.Tensor):
        return False
    alone = one._use_count() == _ALONE and owners(storage_of(one)) == 2
    return alone and torch.ops.aten.is_non_overlapping_and_dense(one) and _alike(one, other)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _leaves(value: Any, found: list[Any]) -> list[Any]:
    """The tensors and storages among what an op is given, or returns."""
    if isinstance(value, _STORED):
        found.append(value)
    elif isinstance(value, list | tuple):
        for one in value:
            _leaves(one, found)
    elif isinstance(value, dict):
        for one in value.values():
            _leaves(one, found)
    return found


_STORED: Final = (torch.Tensor, torch.UntypedStorage)


def _storage(one: Any) -> torch.UntypedStorage:
    return cast(torch.UntypedStorage, storage_of(one) if isinstance(one, torch.Tensor) else one)
