"""Ops of torch's that read bytes on the host before, or between, the ops that they consist of; made to ask first.

torch takes most ops that consist of others apart above the dispatch key where a watched step sees ops, and what their
C++ code reads of a tensor by its address is shown to nobody: lengths of sequences, batch sizes, places to split at.
NOTE [Past the dispatcher]. Which ones do is known of torch 2.13 from its library: of all functions that are registered
as `CompositeImplicitAutograd`, and all of autograd, these reach `data_ptr` or `at::print` by calls that pass no
dispatcher, and read more than what they have just made themselves. (`resize_` is left out, which some reach for an
`out=` of another size, and nested tensors.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Final, cast

import torch

_of_torch: Final = cast(Any, torch._C)
_PARTS: Final = _of_torch.DispatchKey.CompositeImplicitAutograd
_WATCHED: Final = _of_torch.DispatchKeySet(_of_torch._dispatch_key_parse("Fake"))

Steadying = Callable[[str, Sequence[torch.Tensor], Sequence[torch.Tensor], int], AbstractContextManager[None]]
"""Takes the name of an op, the tensors that it reads and those among them that it writes, and bytes that it may need
besides; the tensors stay while it runs."""

_ALL: Final = None

HOST_READS: Final[Mapping[str, tuple[int, ...] | None]] = MappingProxyType(
    {
        "aten::ctc_loss.Tensor": (2, 3),
        "aten::lstm.data": (1,),
        "aten::gru.data": (1,),
        "aten::rnn_tanh.data": (1,),
        "aten::rnn_relu.data": (1,),
        "aten::_pad_packed_sequence": (1,),
        "aten::_pack_padded_sequence_backward": (2,),
        "aten::tensor_split.tensor_indices_or_sections": (1,),
        "aten::_reshape_from_tensor": (1,),
        "aten::meshgrid": _ALL,
        "aten::meshgrid.indexing": _ALL,
        "aten::_sobol_engine_draw": _ALL,
        "aten::_sobol_engine_ff_": _ALL,
        "aten::_sobol_engine_initialize_state_": _ALL,
        "aten::_sobol_engine_scramble_": _ALL,
        "aten::_rowwise_prune": _ALL,
        "aten::_saturate_weight_to_fp16": _ALL,
        "aten::choose_qparams_optimized": _ALL,
        "aten::fbgemm_linear_fp16_weight": _ALL,
        "aten::fbgemm_linear_fp16_weight_fp32_activation": _ALL,
        "aten::fbgemm_linear_int8_weight": _ALL,
        "aten::fbgemm_linear_int8_weight_fp32_activation": _ALL,
        "aten::fbgemm_linear_quantize_weight": _ALL,
        "aten::fbgemm_pack_gemm_matrix_fp16": _ALL,
        "aten::fbgemm_pack_quantized_matrix": _ALL,
        "aten::fbgemm_pack_quantized_matrix.KN": _ALL,
    }
)
"""By op the places of the arguments that it reads."""

_AS_IT_COUNTS: Final = ("aten::ctc_loss.Tensor", "aten::_pad_packed_sequence", "aten::_pack_padded_sequence_backward")
"""They read a contiguous copy, of which nobody would know, where an argument is not contiguous."""

_PRINTS: Final = ("aten::meshgrid", "aten::meshgrid.indexing")
"""They print tensors of several dimensions into an error."""

_COPIES: Final = 4
"""How many float64 copies of a tensor there are while it is printed."""

_NARROW: Final = (torch.uint8, torch.int8, torch.int16, torch.int32)
"""Whole numbers of which `ctc_loss` reads a wider copy."""


@functools.cache
def make_them_ask(steady: Steadying) -> list[torch.library.Library]:
    """Put a kernel in front of each, where autograd would take it apart and where `inference_mode` does.

    It lasts as long as the process: to take a kernel away while another thread calls it is not safe.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for full, places in HOST_READS.items():
        name, _, overload = full.removeprefix("aten::").partition(".")
        operator = getattr(getattr(torch.ops.aten, name), overload or "default")
        for key in ("AutogradCPU", "Fake"):
            cast(Any, library).m.impl(full, key, _asking(operator, full, places, steady), False)
    return [library]


def _asking(operator: Any, full: str, places: tuple[int, ...] | None, steady: Steadying) -> Callable[..., Any]:
    aliases = [given.alias_info for given in operator._schema.arguments]
    written = [place for place, alias in enumerate(aliases) if alias is not None and alias.is_write]

    def asked(*args: Any, **kwargs: Any) -> Any:
        with _of_torch.DisableTorchFunction():  # a subclass and a mode of the user have had their say
            given = list(args)
            if full in _AS_IT_COUNTS:
                for place in places or ():
                    given[place] = _as_it_counts(given[place], wide=full == "aten::ctc_loss.Tensor")
            read = _tensors(given if places is None else [given[place] for place in places])
            if full in _PRINTS:
                return _printing(operator, full, read, steady, given, kwargs)
            with steady(full, read, [given[place] for place in written], 0):
                return operator._op_dk(_PARTS, *given, **kwargs)

    return asked


def _printing(operator: Any, full: str, read: Sequence[torch.Tensor], steady: Steadying, given: Any, named: Any) -> Any:
    """What is printed is first copied, by ops, and the copy is read by its address: it is not to be seen, or it may
    leave."""
    printed = [tensor for tensor in read if tensor.dim() > 1]
    if not printed:
        return operator._op_dk(_PARTS, *given, **named)
    needed = _COPIES * max(tensor.numel() for tensor in printed) * 8
    with steady(full, printed, (), needed), _of_torch._ExcludeDispatchKeyGuard(_WATCHED):
        return operator._op_dk(_PARTS, *given, **named)


def _as_it_counts(lengths: torch.Tensor, *, wide: bool) -> torch.Tensor:
    if type(lengths) is not torch.Tensor or lengths.device.type != "cpu":
        return lengths
    if wide and lengths.dtype in _NARROW:
        lengths = lengths.long()
    return lengths if lengths.is_contiguous() else lengths.contiguous()


def _tensors(given: Sequence[Any]) -> list[torch.Tensor]:
    flat = [one for value in given for one in (value if isinstance(value, list | tuple) else (value,))]
    return [one for one in flat if isinstance(one, torch.Tensor)]
