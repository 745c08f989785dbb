"""Ops as the paper's nine numbers: how often each of six idioms occurs, and three sums of dimensions (section IV-A).

The idioms are transpose, gather, scatter, reduction, stream and stencil. Counts of `PUBLISHED` are those of the table
that the authors published, by ATen's names; matmul is the paper's Fig. 3. The table disagrees with the text where ops
in place are gathers and `cat` and `clone` are nothing at all; it stands as it is. It has no entries for most of what
ATen runs in a step of today, so that `ADDED` is Spillway's. All other ops are taken for pointwise: one stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Final, TypeAlias

import numpy as np

from spillway.pilots.paths import Floats, OpSignature

Counts: TypeAlias = tuple[int, int, int, int, int, int]
"""Transpose, gather, scatter, reduction, stream, stencil."""

_IN_PLACE: Final[Counts] = (0, 1, 0, 0, 0, 0)
_NOTHING: Final[Counts] = (0, 0, 0, 0, 0, 0)
_POINTWISE: Final[Counts] = (0, 0, 0, 0, 1, 0)


def _of_each(*rows: tuple[str, Counts]) -> Mapping[str, Counts]:
    return {name: counts for names, counts in rows for name in names.split()}


PUBLISHED: Final = _of_each(
    ("cat clone diag", _NOTHING),
    ("convolution", (0, 1, 0, 1, 1, 2)),
    ("_convolution _convolution_mode _convolution_nogroup", (0, 1, 0, 1, 2, 2)),
    ("conv1d conv2d conv3d", (0, 0, 0, 0, 1, 0)),
    ("conv_tbc conv_tbc_backward", (1, 1, 0, 1, 1, 2)),
    ("conv_transpose1d conv_transpose2d conv_transpose3d", (1, 1, 0, 1, 2, 2)),
    ("cudnn_convolution cudnn_convolution_backward cudnn_convolution_backward_weight", (0, 1, 0, 1, 2, 2)),
    ("cudnn_convolution_transpose cudnn_convolution_transpose_backward", (1, 1, 0, 1, 2, 2)),
    ("cudnn_convolution_relu", (0, 1, 0, 1, 3, 2)),
    ("cudnn_convolution_add_relu", (0, 1, 0, 2, 3, 2)),
    ("mkldnn_convolution mkldnn_convolution_backward", (0, 1, 0, 1, 2, 2)),
    ("mkldnn_convolution_backward_input mkldnn_convolution_backward_weights", (0, 1, 0, 1, 2, 2)),
    ("miopen_convolution miopen_convolution_backward", (0, 1, 0, 1, 2, 2)),
    ("slow_conv_transpose2d slow_conv_transpose3d", (1, 1, 0, 1, 2, 2)),
    ("slow_conv_transpose2d_backward slow_conv_transpose3d_backward", (1, 1, 0, 1, 2, 2)),
    ("thnn_conv2d thnn_conv2d_forward thnn_conv2d_backward", (0, 1, 0, 1, 3, 2)),
    ("_slow_conv2d_forward _slow_conv2d_backward", (0, 1, 0, 1, 3, 2)),  # as they are called today
    ("thnn_conv_depthwise2d thnn_conv_depthwise2d_forward thnn_conv_depthwise2d_backward", (1, 1, 0, 1, 3, 2)),
    ("_conv_depthwise2d", (1, 1, 0, 1, 3, 2)),
    ("conv_depthwise3d conv_depthwise3d_backward", (1, 1, 0, 1, 2, 2)),
    ("slow_conv3d slow_conv3d_forward slow_conv3d_backward", (0, 1, 0, 1, 2, 3)),
    ("slow_conv_dilated2d slow_conv_dilated3d", (0, 1, 0, 1, 2, 2)),
    ("slow_conv_dilated2d_backward slow_conv_dilated3d_backward", (0, 1, 0, 1, 2, 2)),
    ("transpose t", (1, 0, 0, 0, 0, 0)),
    ("fbgemm fbgemm_linear_int8_weight", (0, 1, 1, 1, 1, 0)),
    ("avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d", (0, 0, 0, 1, 0, 1)),
    ("quantized_batch_norm", (0, 1, 0, 1, 0, 0)),
    ("cudnn_batch_norm cudnn_batch_norm_backward", (0, 1, 1, 1, 1, 0)),
    ("max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices", (0, 0, 0, 1, 0, 0)),
    ("mkldnn_max_pool2d mkldnn_max_pool2d_backward mkldnn_max_pool3d mkldnn_max_pool3d_backward", (0, 0, 0, 1, 0, 1)),
    ("quantized_max_pool1d quantized_max_pool2d", (0, 1, 0, 1, 0, 0)),
    ("max_pool3d max_pool3d_with_indices", (0, 0, 0, 1, 0, 1)),
    ("maximum elu dropout native_dropout", (0, 0, 0, 0, 1, 0)),
    ("gather_backward", (0, 1, 1, 1, 0, 0)),
    ("embedding_backward embedding_dense_backward", (0, 1, 1, 1, 1, 0)),
    ("nll_loss_backward", (0, 1, 0, 0, 0, 0)),
    ("prelu_backward _prelu_kernel_backward gelu_backward silu_backward", (0, 0, 0, 1, 1, 0)),
    ("mse_loss_backward", (0, 1, 1, 1, 1, 0)),
    ("l1_loss_backward", (0, 1, 1, 1, 0, 0)),
    ("sigmoid_backward logit_backward tanh_backward", (0, 0, 0, 1, 1, 0)),
    ("col2im_backward im2col_backward", (1, 0, 0, 1, 1, 1)),
)
"""By the name of an op without namespace and overload."""
ADDED: Final = _of_each(
    ("mm bmm matmul mv dot", (1, 0, 0, 1, 1, 0)),
    ("addmm baddbmm addmv addbmm", (1, 0, 0, 1, 2, 0)),
    ("_softmax _log_softmax", (0, 0, 0, 2, 2, 0)),
    ("_softmax_backward_data _log_softmax_backward_data", (0, 0, 0, 1, 2, 0)),
    ("native_layer_norm native_group_norm native_batch_norm", (0, 0, 0, 2, 2, 0)),
    ("native_layer_norm_backward native_group_norm_backward native_batch_norm_backward", (0, 0, 0, 4, 3, 0)),
    # Two products with a softmax between them.
    ("_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention", (2, 0, 0, 4, 4, 0)),
    ("_scaled_dot_product_efficient_attention _scaled_dot_product_attention_math", (2, 0, 0, 4, 4, 0)),
    ("embedding index index_select select slice gather nonzero take", (0, 1, 0, 0, 0, 0)),
    # As the table has `Scalar`.
    ("_local_scalar_dense item", (0, 1, 0, 0, 0, 0)),
    ("sum mean max min amax amin argmax argmin prod any all norm linalg_vector_norm var std", (0, 0, 0, 1, 0, 0)),
    ("logsumexp", (0, 0, 0, 1, 1, 0)),
    ("topk sort", (0, 1, 0, 1, 0, 0)),
    ("cumsum cumprod", (0, 0, 0, 0, 1, 1)),
    ("nll_loss_forward", (0, 1, 0, 1, 0, 0)),
    ("binary_cross_entropy_with_logits mse_loss", (0, 0, 0, 1, 1, 0)),
    ("select_backward slice_backward unfold_backward", (0, 0, 1, 0, 0, 0)),
    ("index_add index_put scatter scatter_add scatter_reduce", (0, 0, 1, 0, 1, 0)),
    ("stack", _NOTHING),
    ("view _unsafe_view reshape expand detach alias permute squeeze unsqueeze unbind split chunk", _NOTHING),
    ("empty empty_like new_empty zeros zeros_like new_zeros ones ones_like full arange", _NOTHING),
)
"""The same of ops that the table lacks."""


def counts_of(name: str) -> Counts:
    """The six of an op, `aten.addmm.default`."""
    plain = name.removeprefix("aten.").partition(".")[0]
    if plain in PUBLISHED:
        return PUBLISHED[plain]
    if plain.endswith("_") and not plain.endswith("__"):
        return _IN_PLACE
    return ADDED.get(plain, _POINTWISE)


def folded(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The three dimensions of a tensor that an op reads. Two and fewer stand as they are, with zeros behind (Fig. 3);
    of more than three the leading ones are multiplied, on which the paper is silent."""
    match shape:
        case ():
            return 0, 0, 0
        case (rows,):
            return rows, 0, 0
        case (rows, columns):
            return rows, columns, 0
    return prod(shape[:-2]), shape[-2], shape[-1]


def nine_vectors(signatures: Sequence[OpSignature]) -> Floats:
    """[signatures, 9] The six counts and the three sums of dimensions of each."""
    return np.array([(*counts_of(one.name), *one.dims) for one in signatures], np.float32).reshape(-1, 9)
