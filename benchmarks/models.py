"""Models that stand beside those that come with Spillway: recurrent, U-shaped, grouped, depthwise.

Made-up data: how long a step takes and what it keeps does not depend on what is in a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise, repeat
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.record import Skipped
from spillway.workloads import Batch, Workload, get, seed_everything


def build(name: str, options: Mapping[str, Any]) -> Workload:
    """The workload of that name: one of those below, or one that comes with Spillway."""
    return MODELS[name](**options) if name in MODELS else get(name, **options)


def _training(name: str, model: nn.Module, batches: Callable[[int], Iterator[Batch]], loss: Any) -> Workload:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Workload(name=name, model=model, optimizers=(optimizer,), batches=batches, loss=loss)


def built(name: str, **settings: Any) -> Any:
    """A model of the transformers library with random weights, by its class and its configuration's settings.

    Raises Skipped where the library is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise Skipped("transformers is not installed: pip install 'torch-spillway[workloads]'") from None
    kind = getattr(transformers, name)
    return kind(kind.config_class(**settings))


def built_as(dtype: torch.dtype, name: str, **settings: Any) -> Any:
    """The same, with weights of that type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return built(name, **settings)
    finally:
        torch.set_default_dtype(before)


def encoder(layers: int, width: int) -> dict[str, Any]:
    """Settings of a BERT and the like, with heads of 64 and its attention scores in memory as the papers had them."""
    return {
        "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": max(width // 64, 1),
        "intermediate_size": 4 * width, "attn_implementation": "eager",
    }  # fmt: skip


def bottleneck_resnet(depths: Sequence[int], width: int, labels: int) -> Any:
    """A ResNet-50 of so many blocks in each stage."""
    return built(
        "ResNetForImageClassification", embedding_size=width, depths=list(depths), num_labels=labels,
        hidden_sizes=[4 * width * 2**stage for stage in range(len(depths))],
    )  # fmt: skip


def swin_transformer(depths: Sequence[int], width: int, **settings: Any) -> Any:
    """A Swin of so many blocks in each stage, with heads of 32."""
    heads = [max(width // 32, 1) * 2**stage for stage in range(len(depths))]
    return built("SwinForImageClassification", embed_dim=width, depths=list(depths), num_heads=heads, **settings)


def repeated(
    name: str, model: nn.Module, batch: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, *,
    size: int | None = None, around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Workload:  # fmt: skip
    """A model of the transformers library, which tells its own loss, with one batch over and over.

    Arguments:
        size: The batch size, if anybody is to be told.
        around: What a forward stands in.
    """
    seed_everything(0)

    def batches(steps: int) -> Iterator[Batch]:
        return repeat(batch, steps)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with around():
            return cast(Tensor, cast(Any, model)(**cast(Mapping[str, Tensor], batch)).loss)

    return Workload(
        name=name, model=model.train(), optimizers=(optimizer,), batches=batches, loss=loss, size=size
    )  # fmt: skip


def pictures_of(batch: int, side: int) -> dict[str, Tensor]:
    """A batch of pictures with labels, for a model of the transformers library."""
    return {"pixel_values": torch.ones(batch, 3, side, side), "labels": torch.ones(batch, dtype=torch.int64)}


# ---------------------------------------------------------------------- LSTM

VOCABULARY = 64


class Recurrence(nn.Module):
    """One layer beside a way around it. [batch, length, width] -> the same"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.lstm(self.norm(x))[0])


def _tokens(steps: int, *, batch: int, length: int) -> Iterator[tuple[Tensor, ...]]:
    stream = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield (torch.randint(VOCABULARY, (batch, length + 1), generator=stream),)


def _next_token(model: nn.Module, batch: Batch) -> Tensor:
    (rows,) = cast(tuple[Tensor], batch)
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def lstm(seed: int = 0, *, width: int = 256, layers: int = 6, batch: int = 16, length: int = 128) -> Workload:
    """Layers of recurrence over tokens."""
    seed_everything(seed)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, width), *(Recurrence(width) for _ in range(layers)), nn.Linear(width, VOCABULARY)
    )
    return _training("lstm", model, partial(_tokens, batch=batch, length=length), _next_token)


# ---------------------------------------------------------------------- pictures


def _pictures(steps: int, *, batch: int, side: int) -> Iterator[tuple[Tensor, ...]]:
    stream = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(batch, 3, side, side, generator=stream), torch.randint(10, (batch,), generator=stream)


def _classified(model: nn.Module, batch: Batch) -> Tensor:
    pictures, labels = cast(tuple[Tensor, Tensor], batch)
    return F.cross_entropy(model(pictures), labels)


def _restored(model: nn.Module, batch: Batch) -> Tensor:
    pictures = cast(tuple[Tensor, Tensor], batch)[0]
    return F.mse_loss(model(pictures), pictures)


class Convolutions(nn.Module):
    """Two convolutions of 3 x 3. [batch, inner, h, w] -> [batch, outer, h, w]"""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        ends = pairwise((inner, outer, outer))
        self.body = nn.Sequential(
            *(layer for a, b in ends for layer in (nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU()))
        )

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.body(x))


class UNet(nn.Module):
    """What was seen on the way down is put beside what comes up. [batch, 3, side, side] -> the same"""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.down = nn.ModuleList([Convolutions(a, b) for a, b in pairwise((3, *widths))])
        back = list(pairwise(reversed(widths)))
        self.widen = nn.ModuleList([nn.ConvTranspose2d(a, b, 2, 2) for a, b in back])
        self.up = nn.ModuleList([Convolutions(2 * b, b) for _, b in back])
        self.leave = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.down[0](x)]
        for down in self.down[1:]:
            skips.append(down(F.max_pool2d(skips[-1], 2)))
        y = skips.pop()
        for widen, up in zip(self.widen, self.up, strict=True):
            y = up(torch.cat([skips.pop(), widen(y)], dim=1))
        return cast(Tensor, self.leave(y))


def unet(seed: int = 0, *, width: int = 16, levels: int = 4, batch: int = 8, side: int = 96) -> Workload:
    """A U-Net that learns to give back what it got."""
    seed_everything(seed)
    model = UNet([width * 2**level for level in range(levels)])
    return _training("unet", model, partial(_pictures, batch=batch, side=side), _restored)


class Bottleneck(nn.Module):
    """A residual block with a convolution in groups (ResNeXt), or in as many as there are channels and with channels
    weighted by what they show (EfficientNet). [batch, width, h, w] -> the same"""

    def __init__(self, width: int, inner: int, groups: int, *, weighted: bool) -> None:
        super().__init__()
        activation = nn.SiLU if weighted else nn.ReLU
        self.body = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), activation(),
            nn.Conv2d(inner, inner, 3, padding=1, groups=groups, bias=False), nn.BatchNorm2d(inner), activation(),
        )  # fmt: skip
        self.weigh = (
            nn.Sequential(nn.Conv2d(inner, width, 1), nn.SiLU(), nn.Conv2d(width, inner, 1)) if weighted else None
        )
        self.leave = nn.Sequential(nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.weigh is not None:
            y = y * torch.sigmoid(self.weigh(y.mean(dim=(2, 3), keepdim=True)))
        return x + cast(Tensor, self.leave(y))


def _bottlenecks(
    name: str, seed: int, widths: Sequence[int], blocks: int, expand: float, groups: int, batch: int, side: int
) -> Workload:
    seed_everything(seed)
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, padding=1)]
    for before, width in pairwise((widths[0], *widths)):
        if width != before:
            layers.append(nn.Conv2d(before, width, 2, 2))
        inner = int(width * expand)
        made = (Bottleneck(width, inner, groups or inner, weighted=not groups) for _ in range(blocks))
        layers.extend(made)
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))
    return _training(name, model, partial(_pictures, batch=batch, side=side), _classified)


def resnext(seed: int = 0, *, width: int = 32, blocks: int = 3, batch: int = 8, side: int = 48) -> Workload:
    """Residual blocks whose convolutions have 8 groups, in the manner of ResNeXt-50."""
    return _bottlenecks("resnext", seed, (width, 2 * width, 4 * width), blocks, 1.0, 8, batch, side)


def efficientnet(seed: int = 0, *, width: int = 16, blocks: int = 3, batch: int = 8, side: int = 48) -> Workload:
    """Inverted residual blocks, each channel convolved by itself, in the manner of EfficientNet."""
    return _bottlenecks("efficientnet", seed, (width, 2 * width, 4 * width), blocks, 4.0, 0, batch, side)


def convnext(seed: int = 0, *, width: int = 32, batch: int = 16, side: int = 64) -> Workload:
    """A small ConvNeXt of the transformers library. Raises Skipped where that is not installed."""
    seed_everything(seed)
    model = built(
        "ConvNextForImageClassification", depths=[2, 2, 4, 2], num_labels=10, patch_size=2, drop_path_rate=0.1,
        hidden_sizes=[width * 2**stage for stage in range(4)],
    )  # fmt: skip
    pictures = partial(_pictures, batch=batch, side=side)
    return _training("convnext", model, pictures, lambda model, batch: model(batch[0], labels=batch[1]).loss)


MODELS: Mapping[str, Callable[..., Workload]] = MappingProxyType(
    {"lstm": lstm, "unet": unet, "resnext": resnext, "efficientnet": efficientnet, "convnext": convnext}
)
"""Those above, by name."""

BLOCKS = (Recurrence, Convolutions, Bottleneck)
"""Their blocks, for `torch.utils.checkpoint`."""
