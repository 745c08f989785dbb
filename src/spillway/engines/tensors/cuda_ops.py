"""What differs on a CUDA device about ops, and about the settings that are inputs of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch

from spillway.engines.tensors.ops import OpInfo
from spillway.memory.records import EXACT, NEVER


def _named(*names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names)


HUNGRY: Final = _named(
    "convolution", "convolution_backward", "_convolution", "cudnn_convolution", "cudnn_convolution_transpose",
    "_cudnn_rnn", "_cudnn_rnn_backward", "cudnn_convolution_relu", "cudnn_convolution_add_relu", "_cudnn_ctc_loss",
    "sort", "topk", "embedding_dense_backward", "index_put_", "index_put", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward", "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward", "linalg_svd", "_linalg_svd", "linalg_eigh", "_linalg_eigh",
)  # fmt: skip
"""Ops that may need much memory for themselves: they are measured (`reserve.Workspaces`)."""

SUMS_IN_ANY_ORDER: Final = _named(
    "index_add", "index_add_", "index_put", "index_put_", "_index_put_impl_", "put_", "scatter_add", "scatter_add_",
    "scatter_reduce", "scatter_reduce_", "index_reduce", "index_reduce_", "bincount", "histc", "kthvalue", "median",
    "nanmedian", "avg_pool3d_backward", "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d_backward", "max_pool3d_with_indices_backward", "adaptive_max_pool2d_backward",
    "fractional_max_pool2d_backward", "fractional_max_pool3d_backward", "max_unpool2d", "max_unpool3d",
    "upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward",
    "upsample_trilinear3d_backward", "_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward",
    "reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward",
    "replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward",
    "nll_loss2d_forward", "nll_loss2d_backward", "_ctc_loss_backward", "_embedding_bag_dense_backward",
    "grid_sampler_2d_backward", "grid_sampler_3d_backward", "cudnn_grid_sampler_backward", "cumsum", "cumsum_",
    "_segment_reduce_backward", "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_cudnn_attention_backward",
    "_flash_attention_backward", "_efficient_attention_backward",
)  # fmt: skip
"""Ops that need not give the same bits twice on a CUDA device (most are listed at
`torch.use_deterministic_algorithms`). They are never replayed: a value that was read before it left has to come back as
it was. What they create is moved."""

KEEPS_STATE: Final = _named("_cudnn_rnn", "_cudnn_rnn_backward", "_cudnn_init_dropout_state", "_cudnn_ctc_loss")
"""Ops with a random state or a workspace of their own among their arguments, which they write: never replayed."""

UNMARKED_WRITES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"aten::_cudnn_rnn": ("dropout_state",), "aten::_cudnn_rnn_backward": ("reserve",)}
)
"""Arguments that an op writes although its schema does not say so."""

_CONVOLUTIONS: Final = _named("convolution", "convolution_overrideable", "convolution_backward")
"""With `torch.backends.cudnn.benchmark` their algorithm is the one that was fastest, in each thread. Without it forward
convolutions give the same bits twice. Gradients, and transposed convolutions, which are such, may sum in any order
unless a setting forbids it, so whether one can be replayed is asked at every call."""

_TOLD_BY_ARGUMENTS: Final = _named(
    "_convolution", "cudnn_convolution", "cudnn_convolution_transpose", "cudnn_convolution_relu",
    "cudnn_convolution_add_relu",
)  # fmt: skip
"""What is below them, and seldom called by itself: some have these settings among their arguments. Never replayed."""

_TRANSPOSED: Final = 6
"""Where `convolution` is told whether it is transposed."""


def fit_for_cuda(info: OpInfo) -> None:
    """What was read off an op's schema, put right for a CUDA device. Changes `info`."""
    name = info.name
    never = name in SUMS_IN_ANY_ORDER or name in KEEPS_STATE or name in _TOLD_BY_ARGUMENTS
    if never and info.exactness == EXACT:
        info.exactness = NEVER
        info.take_the_long_way()
    if name in _CONVOLUTIONS:
        info.varies = _backward_varies if name == "aten::convolution_backward" else _forward_varies
        info.take_the_long_way()
    if name in HUNGRY:
        info.take_the_long_way()
        info.bound = None
    unmarked = frozenset(UNMARKED_WRITES.get(name, ()))
    if unmarked:
        info.schema_writes |= unmarked
        arguments = enumerate(info.func._schema.arguments)
        info.writes = tuple(place for place, argument in arguments if argument.name in info.schema_writes)


def _forward_varies(args: Sequence[Any]) -> bool:
    return _backward_varies(args) if args[_TRANSPOSED] else torch._C._get_cudnn_benchmark()


def _backward_varies(args: Sequence[Any]) -> bool:
    same_twice = torch._C._get_cudnn_deterministic() or torch._C._get_deterministic_algorithms()
    return torch._C._get_cudnn_benchmark() or not same_twice
