"""Layers and losses: of images, of sequences, with states, with parametrizations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import rnn

from tests.cpu.world import Instruction, World, action


@action(8)
def module(world: World, i: Instruction) -> Any:
    """Modules with parameters, some of them recurrent, sparse or parametrized; alone or in a chain."""
    x = world.pick(i.a, lambda t: t.is_floating_point() and t.dim() == 2 and t.shape[1] == 64)
    x = x.float()
    network, sequence = world.network, x[: len(x) // 4 * 4].reshape(-1, 4, 64)
    lengths = torch.tensor([len(sequence), len(sequence) // 2 + 1, 2, 1])
    numbers = (torch.arange(48) * (i.b % 5 + 1)) % 40

    def packed(layer: nn.Module) -> Any:
        found, _ = layer(rnn.pack_padded_sequence(sequence, lengths))
        return rnn.pad_packed_sequence(found)[0]

    def chain() -> Tensor:
        return torch.utils.checkpoint.checkpoint_sequential(network["chain"], 2, x, use_reentrant=False)

    calls: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        ("both ways", lambda m: m(sequence)[0]), ("both ways", packed), ("gru", lambda m: m(sequence)[0]),
        ("gru", packed),
        ("plain recurrence", lambda m: m(sequence)), ("cell", lambda m: m(x, (x * 0.1, x))),
        ("gru cell", lambda m: m(x, x)),
        ("attention", lambda m: m(sequence, sequence, sequence, need_weights=i.b % 2 == 0)[0]),
        ("encoder", lambda m: m(sequence)),
        ("attention", lambda m: _evaluated(m, lambda: m(sequence, sequence, sequence)[0])),
        ("encoder", lambda m: _evaluated(m, lambda: m(sequence))),
        ("decoder", lambda m: m(sequence, sequence)), ("weight norm", lambda m: m(x)),
        ("spectral norm", lambda m: m(x)), ("old norm", lambda m: m(x)),
        ("orthogonal", lambda m: m(x)), ("sparse table", lambda m: m(numbers)),
        ("bag", lambda m: m(numbers, torch.arange(0, 48, 8))),
        ("transposed", lambda m: m(x[None, None])), ("instance norm", lambda m: m(x.view(-1, 4, 64))),
        ("group norm", lambda m: m(x.view(-1, 8, 8))),
        ("chain", lambda m: m(x)), ("chain", lambda m: m(x).relu_().sum()), ("chain", lambda m: chain()),
        ("bilinear", lambda m: m(x, x)),
        ("narrow", lambda m: m(x)), ("narrow", lambda m: _evaluated(m, lambda: m(x))),
        ("recurrent", lambda m: m(x.reshape(-1, 4, 32))[0]),
        ("linear", lambda m: packed_sequence_of(m(x))), ("convolution", lambda m: m(x[None, None]).relu_().mean(1)),
        ("layer norm", lambda m: m(x)),
        ("rms", lambda m: m(x)), ("linear", lambda m: F.linear(x, m.weight.t())),
        ("linear", lambda m: m(m(x).relu_()).sum(0)),
    )  # fmt: skip
    present = [(network[name], call) for name, call in calls if name in network]
    layer, call = present[i.c % len(present)]
    return call(layer)


def packed_sequence_of(x: Tensor) -> tuple[Tensor, ...]:
    found = rnn.pack_sequence([x[:5], x[:3], x[:1]])
    return (found.data * 2, found.batch_sizes)


def _evaluated(network: nn.Module, call: Callable[[], Any]) -> Any:
    network.eval()
    try:
        return call()
    finally:
        network.train()


@action(6)
def image(world: World, i: Instruction) -> Any:
    """Convolutions, poolings, resampling."""
    x = world.pick(i.a, lambda t: t.is_floating_point() and t.dim() == 2 and t.numel() % 1024 == 0 and t.numel() > 0)
    pictures = x.reshape(-1, 4, 16, 16) if i.b % 2 else x.reshape(-1, 1, 32, 32)
    if i.b % 3 == 0:
        pictures = pictures.contiguous(memory_format=torch.channels_last)
    p, c = pictures, pictures.shape[1]
    kernel = torch.full((2, c, 3, 3), 0.1, dtype=x.dtype)
    turn = torch.eye(2, 3, dtype=x.dtype).expand(len(p), 2, 3)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: F.conv2d(p, kernel, padding=1), lambda: F.conv_transpose2d(p, kernel.transpose(0, 1), stride=2),
        lambda: F.conv2d(p, kernel[:, :, :1, :1], stride=2),
        lambda: F.conv1d(p.flatten(2)[:1], kernel.flatten(2)),
        lambda: F.conv3d(p[None].transpose(1, 2), kernel[:, :, None].repeat(1, 1, 1, 1, 1)),
        lambda: F.conv2d(p, kernel[:1, :1].repeat(c, 1, 1, 1), groups=c, dilation=2), lambda: F.max_pool2d(p, 2),
        lambda: F.max_pool2d(p, 3, 2, 1, return_indices=True),
        lambda: F.avg_pool2d(p, 3, 2, 1), lambda: F.adaptive_avg_pool2d(p, 5), lambda: F.adaptive_max_pool2d(p, 3),
        lambda: F.lp_pool2d(p, 2, 2),
        lambda: F.fractional_max_pool2d(p, 2, output_ratio=0.5),
        lambda: F.max_unpool2d(*F.max_pool2d(p, 2, return_indices=True), 2),
        lambda: F.interpolate(p, scale_factor=2),
        lambda: F.interpolate(p, size=(9, 9), mode="bilinear", align_corners=False),
        lambda: F.interpolate(p, scale_factor=0.5, mode="bicubic"),
        lambda: F.interpolate(p, size=20, mode="bilinear", antialias=True),
        lambda: F.interpolate(p, size=8, mode="area"), lambda: F.interpolate(p.flatten(2), size=99, mode="linear"),
        lambda: F.grid_sample(p, F.affine_grid(turn, list(p.shape), align_corners=False), align_corners=False),
        lambda: F.grid_sample(p, p[:, :1].expand(-1, 2, -1, -1).movedim(1, -1).tanh(), "nearest", "border", True),
        lambda: F.unfold(p, 3, padding=1)[:, ::3],
        lambda: F.fold(F.unfold(p, 2, stride=2), p.shape[-2:], 2, stride=2),
        lambda: F.pixel_shuffle(p.reshape(-1, 4, 8, 8), 2), lambda: F.pixel_unshuffle(p, 2),
        lambda: F.channel_shuffle(p.reshape(-1, 4, 16, 16), 2),
        lambda: F.pad(p, (1, 2, 3, 0), mode="reflect"), lambda: F.pad(p, (2, 2), value=0.5),
        lambda: F.pad(p, (1, 1, 1, 1), mode="replicate"), lambda: F.pad(p, (1, 1, 1, 1), mode="circular"),
        lambda: F.local_response_norm(p, 3), lambda: F.instance_norm(p),
        lambda: F.batch_norm(p, None, None, training=True), lambda: F.dropout2d(p, 0.3),
        lambda: F.feature_alpha_dropout(p, 0.2, True),
        lambda: F.avg_pool1d(p.flatten(2), 4), lambda: F.max_pool3d(p[None], 2),
        lambda: F.adaptive_avg_pool3d(p[None], 2), lambda: F.upsample(p, scale_factor=2),
        lambda: p.to(memory_format=torch.channels_last).mul(2).contiguous(), lambda: F.group_norm(p, 1),
        lambda: F.conv_tbc(p[0], torch.ones(3, p.shape[-1], 4, dtype=x.dtype), torch.zeros(4, dtype=x.dtype)),
    )  # fmt: skip
    return calls[i.c % len(calls)]()


@action(5)
def attend(world: World, i: Instruction) -> Any:
    x = world.pick(i.a, lambda t: t.is_floating_point() and t.dim() == 2 and t.numel() % 2048 == 0 and t.numel() > 0)
    q = x.reshape(1, 2, -1, 32)
    k = world.like(i.b, x).reshape(1, 2, -1, 32)
    n = q.shape[2]
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    sdpa = F.scaled_dot_product_attention
    calls: tuple[Callable[[], Any], ...] = (
        lambda: sdpa(q, k, k), lambda: sdpa(q, k, q, is_causal=True), lambda: sdpa(q, k, k, attn_mask=mask),
        lambda: sdpa(q, k, k, dropout_p=0.2),
        lambda: sdpa(q, k, k, attn_mask=torch.zeros(n, n, dtype=x.dtype).masked_fill(~mask, -1e4)),
        lambda: sdpa(q, k[:, :1], k[:, :1], enable_gqa=True),
        lambda: _mathematically(lambda: sdpa(q, k, k, is_causal=True)),
        lambda: (q @ k.mT / 6).masked_fill(~mask, -torch.inf).softmax(-1) @ k,
        lambda: (q @ k.mT / 6).masked_fill_(~mask, -1e4).softmax(-1, dtype=torch.float32), lambda: F.rms_norm(q, (32,)),
        lambda: q.transpose(1, 2).reshape(1, n, 64),
        lambda: torch.einsum("bhid,bhjd->bhij", q, k)[0, 0], lambda: torch.bmm(q[0], k[0].mT),
        lambda: F.multi_head_attention_forward(
            x.reshape(-1, 1, 64), x.reshape(-1, 1, 64), x.reshape(-1, 1, 64), 64, 2, torch.ones(192, 64) * 0.01,
            torch.zeros(192), None, None, False, 0.0, torch.eye(64), torch.zeros(64))[0],
        lambda: sdpa(q, k, k, scale=0.3) * 2,
    )  # fmt: skip
    return calls[i.c % len(calls)]()


def _mathematically(call: Callable[[], Tensor]) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return call()


@action(5)
def criterion(world: World, i: Instruction) -> Any:
    x = world.pick(i.a, lambda t: t.is_floating_point() and t.dim() == 2 and min(t.shape) >= 32)
    y = world.like(i.b, x)
    classes, n = torch.arange(len(x)) * 3 % 32, len(x)
    signs = (torch.arange(n) % 2 * 2 - 1).to(x.dtype)
    how = ("mean", "sum", "none")[i.b % 3]
    calls: tuple[Callable[[], Any], ...] = (
        lambda: F.mse_loss(x, y, reduction=how), lambda: F.l1_loss(x, y, reduction=how),
        lambda: F.huber_loss(x, y, reduction=how), lambda: F.smooth_l1_loss(x, y, reduction=how),
        lambda: F.cross_entropy(x, classes, reduction=how, label_smoothing=0.1),
        lambda: F.cross_entropy(x, y.softmax(-1), reduction=how), lambda: F.cross_entropy(x, classes, ignore_index=3),
        lambda: F.nll_loss(x.log_softmax(-1), classes, weight=torch.ones(x.shape[1], dtype=x.dtype), reduction=how),
        lambda: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
        lambda: F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction=how),
        lambda: F.binary_cross_entropy(x.sigmoid(), y.sigmoid().detach(), reduction=how),
        lambda: F.ctc_loss(
            x.log_softmax(-1)[:, None].expand(-1, 4, -1), torch.arange(1, 21).view(4, 5), torch.full((4,), n),
            torch.full((4,), 5), reduction=how,
        ),
        lambda: F.cosine_embedding_loss(x, y, signs), lambda: F.margin_ranking_loss(x[:, 0], y[:, 0], signs),
        lambda: F.hinge_embedding_loss(x[:, 0], signs), lambda: F.soft_margin_loss(x, signs[:, None]),
        lambda: F.multi_margin_loss(x, classes), lambda: F.multilabel_margin_loss(x, classes[:, None].expand_as(x) % 3),
        lambda: F.multilabel_soft_margin_loss(x, (y > 0).to(x.dtype)),
        lambda: F.triplet_margin_loss(x, y, y.flip(0)), lambda: F.poisson_nll_loss(x, y.abs().detach()),
        lambda: F.gaussian_nll_loss(x, y, x.detach().square() + 1), lambda: F.cosine_similarity(x, y),
        lambda: F.pairwise_distance(x, y), lambda: F.pdist(x),
        lambda: F.cross_entropy(x.view(n, -1, 2)[:, :32], classes[:, None].expand(-1, 2) % 16, reduction=how),
        lambda: F.triplet_margin_with_distance_loss(x, y, y.flip(0)),
    )  # fmt: skip
    return calls[i.c % len(calls)]()
