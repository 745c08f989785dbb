"""What convolutions take for themselves on the CPU, by the kernels that torch and oneDNN choose for them.

NOTE [Convolutions]. oneDNN has its kernels read and write channels in blocks of 16 where the processor has AVX-512, and
else of 8: what they are given is copied into blocks, and what they made is copied back. Where no such kernel is made
for the shape it unfolds one image after the other, in every thread, and multiplies matrices. Torch's own kernels, for
double precision and for what is small, unfold whole batches. Which is chosen is read off oneDNN 3.12, as torch 2.13 has
it; in half precision what kernels take to turn operands around is told as AVX-512 has it, without tiles.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import inf, prod
from types import MappingProxyType
from typing import Any, Final, TypeAlias, final

import torch

from spillway.internals.private import convolves_by
from spillway.units import Bytes

Sizes: TypeAlias = tuple[int, ...]

_NARROW: Final = 8
"""Channels in a block without AVX-512."""
_SCRATCH: Final[tuple[Bytes, Bytes]] = (12288, 8216)
"""What the kernel for gradients of strided inputs has besides, and in every thread."""
_ADDING: Final[Bytes] = 12288
"""What kernels have that add up gradients of weights from several threads, beside these gradients."""


def most_instructions() -> str:
    """What the environment caps oneDNN's instructions at, in capitals; empty if it does not."""
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    return "" if most in ("ALL", "DEFAULT") else most


@cache
def _wide() -> int:
    """Channels in a block, as far as the processor and the environment allow oneDNN."""
    most = most_instructions()
    capped = most.startswith(("SSE", "AVX2")) or most == "AVX"
    cpu: Any = torch.cpu
    return 16 if cpu._is_avx512_supported() and not capped else _NARROW


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Convolution:
    """A convolution and its gradients: of a transposed one, that which it is the input's gradient of."""

    batch: int
    groups: int
    inner: int
    """Channels of one group that it reads."""
    outer: int
    """That it makes."""
    image: Sizes
    """What it reads, without batch and channels; of at least two dimensions."""
    made: Sizes
    kernel: Sizes
    stride: Sizes
    before: Sizes
    """Zeros around the image, at the low ends."""
    reach: Sizes
    """From the first element of the kernel to the last, that one included."""
    itemsize: Bytes
    threads: int
    biased: bool
    transposed: bool

    @property
    def after(self) -> Sizes:
        """Zeros at the high ends that are read."""
        each = zip(self.made, self.stride, self.reach, self.image, self.before, strict=True)
        return tuple((made - 1) * stride + reach - image - before for made, stride, reach, image, before in each)

    @property
    def outside(self) -> bool:
        """Whether the kernel anywhere reads zeros alone."""
        return any(reach <= max(ends) for reach, *ends in zip(self.reach, self.before, self.after, strict=True))

    @property
    def dilated(self) -> bool:
        return self.reach != self.kernel

    @property
    def strided(self) -> bool:
        return set(self.stride) != {1}

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.inner == self.outer == 1 and len(self.image) == 2

    @property
    def points(self) -> bool:
        """Whether it is a product of matrices, whatever its strides."""
        return set(self.kernel) == {1} and not any(self.before) and self.groups == 1

    def read(self, block: int = 1) -> Bytes:
        """What it reads, channels rounded up to blocks."""
        return self.batch * self._channels(self.inner, block) * prod(self.image) * self.itemsize

    def result(self, block: int = 1) -> Bytes:
        """What it makes."""
        return self.batch * self._channels(self.outer, block) * prod(self.made) * self.itemsize

    def weights(self, outer: int = 1, inner: int = 1) -> Bytes:
        """Of all groups."""
        if self.depthwise:
            return _up(self.groups, outer) * prod(self.kernel) * self.itemsize
        return self.groups * _up(self.outer, outer) * _up(self.inner, inner) * prod(self.kernel) * self.itemsize

    def bias(self, block: int = 1) -> Bytes:
        """Of what it makes."""
        return self._channels(self.outer, block) * self.itemsize if self.biased else 0

    def _channels(self, of_a_group: int, block: int) -> int:
        return _up(self.groups, block) if self.depthwise else self.groups * _up(of_a_group, block)

    def unfolded(self) -> Bytes:
        """One image, as a matrix; of three dimensions one of its slices."""
        if set(self.kernel) == {1} and not self.strided and self.made == self.image:
            return 0
        return self.inner * prod(self.kernel) * prod(self.made[-2:]) * self.itemsize


@cache
def _cache() -> Bytes:
    """Of the second level, of one core."""
    capabilities: Any = getattr(torch.cpu, "get_capabilities", dict)()  # which older ones do not have
    return int(capabilities.get("l2_cache_size", 1 << 20))


def _up(number: int, block: int) -> int:
    return -(-number // block) * block


def within_convolution(args: Sequence[Any], out: torch.Tensor) -> Bytes:
    """What one takes beside its result, by the arguments of `aten::convolution`."""
    x, weight, bias, *how = args
    if x.device.type != "cpu" or not x.numel():
        return 0
    this, kernels, copied = _kernels((x, weight), bias, out, how)
    return max(copied + kernels[bool(how[3])](this) - int(out.nbytes), 0)


def within_convolution_backward(args: Sequence[Any], out: Sequence[torch.Tensor | None]) -> Bytes:
    """The same of its gradients: of the input first, then of the weights."""
    gradient, x, weight, biases, *how, wanted = args
    if x.device.type != "cpu" or not x.numel():
        return 0
    bias = gradient.new_empty(biases) if biases and biases[0] else None  # [0] where there is none
    this, kernels, copied = _kernels((x, weight, gradient), bias, gradient, how)
    first = kernels[not how[3]](this) if wanted[0] else 0
    second = kernels[2](this) + (int(x.nbytes) if wanted[0] else 0) if wanted[1] else 0
    return max(copied + max(first, second) - sum(int(one.nbytes) for one in out if one is not None), 0)


_Kernels: TypeAlias = tuple[Callable[[_Convolution], Bytes], ...]


def _kernels(
    given: Sequence[torch.Tensor], bias: torch.Tensor | None, made: torch.Tensor, how: Sequence[Any]
) -> tuple[_Convolution, _Kernels, Bytes]:
    """The convolution; what tells of it, of its input's gradient and of that of its weights; and what is copied first:
    what does not lie as the kernels want it."""
    x, weight = given[:2]
    stride, padding, dilation, transposed, _, groups = how
    chosen, flat = convolves_by(x, weight, bias, *how), x.dim() == 3
    ahead = (1,) if flat else ()
    each = x.dim() - 2
    stride, padding, dilation = ([*one] * (each if len(one) == 1 else 1) for one in (stride, padding, dilation))
    kernel = (*ahead, *weight.shape[2:])
    read, result = (made, x) if transposed else (x, made)
    this = _Convolution(
        batch=int(x.shape[0]), groups=groups, inner=int(weight.shape[1]), outer=int(weight.shape[0]) // groups,
        image=(*ahead, *read.shape[2:]), made=(*ahead, *result.shape[2:]), kernel=kernel, stride=(*ahead, *stride),
        before=(*((0,) if flat else ()), *padding), itemsize=x.itemsize, threads=torch.get_num_threads(),
        biased=bias is not None, transposed=transposed,
        reach=tuple((size - 1) * apart + 1 for size, apart in zip(kernel, (*ahead, *dilation), strict=True)),
    )  # fmt: skip
    kernels, lies = _NATIVE.get(chosen, _ONEDNN), torch.contiguous_format
    beside = torch.channels_last if each == 2 else torch.channels_last_3d
    reads_beside = kernels is _ONEDNN or chosen in ("Slow2d", "SlowDilated2d")
    if reads_beside and each > 1 and any(_only(one, beside) for one in (x, weight)):
        kernels, lies = _BESIDE if kernels is _ONEDNN else kernels, beside
    return this, kernels, sum(int(one.nbytes) for one in given if not one.is_contiguous(memory_format=lies))


def _only(tensor: torch.Tensor, form: torch.memory_format) -> bool:
    return tensor.is_contiguous(memory_format=form) and not tensor.is_contiguous()


# ---------------------------------------------------------------------------------------------------- by torch itself


def _columns(this: _Convolution, *, all_at_once: bool) -> Bytes:
    """The images of a batch as one matrix, or one after the other."""
    return (this.batch if all_at_once else 1) * this.unfolded() * prod(this.made[:-2])


def _by_group(this: _Convolution, made: Bytes, given: Bytes, columns: Bytes) -> Bytes:
    """What is made is put together of what was made of each group, which takes a copy of what is given of it."""
    if this.groups == 1:
        return made + columns
    return made + max(made, (given + made) // this.groups + columns)


def _slow(this: _Convolution, *, apart: bool = False) -> Bytes:
    return _by_group(this, this.result(), this.read(), _columns(this, all_at_once=not apart))


def _slow_input(this: _Convolution, *, apart: bool = False) -> Bytes:
    return _by_group(this, this.read(), this.result(), _columns(this, all_at_once=False) if apart else 0)


def _slow_weights(this: _Convolution, *, apart: bool = False) -> Bytes:
    own = _columns(this, all_at_once=not apart)
    return _by_group(this, this.weights(), this.read() + this.result(), own)


def _volumes(this: _Convolution) -> Bytes:
    """Of a batch of images of three dimensions, unfolded for all groups."""
    return this.groups * _columns(this, all_at_once=True)


def _around(this: _Convolution) -> Bytes:
    """A transposed one in two dimensions, of all images at once."""
    return _by_group(this, this.read(), this.result(), _columns(this, all_at_once=len(this.image) == 2))


_DILATED: Final[_Kernels] = tuple(partial(one, apart=True) for one in (_slow, _slow_input, _slow_weights))
_NATIVE: Final[Mapping[str, _Kernels]] = MappingProxyType(
    {
        "Slow2d": (_slow, _slow_input, _slow_weights),
        "Slow3d": (
            lambda this: this.result() + _volumes(this),
            lambda this: this.read() + (_volumes(this) or this.read()),
            lambda this: this.weights() + _volumes(this),
        ),
        "SlowDilated2d": _DILATED,
        "SlowDilated3d": _DILATED,
        "SlowTranspose2d": (_DILATED[0], _around, _DILATED[2]),
        "SlowTranspose3d": (_DILATED[0], _around, _DILATED[2]),
    }
)


# ---------------------------------------------------------------------------------------------------------- by oneDNN


def _forward(this: _Convolution) -> Bytes:
    block, flat = _forward_blocks(this)
    made = this.result(block or 1)
    if this.groups > 1 and this.inner == this.outer == 1 and len(this.image) == 3:  # channels beside each other
        return max(made + this.read() + this.weights(), 3 * made)
    if not block:
        own = made + this.threads * _strip(this)
    else:
        own = (
            made + this.weights(block, 1 if flat else block) + (0 if flat else this.read(block)) + _reduced(this, block)
        )
    return max(own, made + this.result())


def _strip(this: _Convolution) -> Bytes:
    """As much of an unfolded image as its product is made of at once, for the cache: some columns of all channels, or
    all of some channels, whichever is more. oneDNN weighs up which is faster."""
    whole, kernel = this.unfolded(), prod(this.kernel)
    room, beside = _cache() // this.itemsize, prod(this.stride) + kernel
    columns = (room - kernel * this.inner * this.outer) // (beside * this.inner + this.outer) // 48 * 48
    channels = this.inner // -(-this.inner // max(room // (beside * prod(this.made)), 1))
    strip = max(this.inner * max(columns, 48), channels * prod(this.made)) * kernel * this.itemsize
    return min(whole, strip) if len(this.image) == 2 else whole


def _forward_blocks(this: _Convolution) -> tuple[int, bool]:
    """Channels in a block, and whether the input lies as it is; 0 where no such kernel is made for it."""
    if this.outside:
        return 0, False
    if this.depthwise or _in_points(this):
        return _wide(), False
    if _wide() > _NARROW and (block := _dividing(this)):
        return block, this.groups == 1 and this.inner < block
    whole = this.groups == 1 or (this.outer % _NARROW == 0 and (this.inner < _NARROW or this.inner % _NARROW == 0))
    short = this.kernel[-1] <= 7 or not any(this.before[-2:]) or not this.strided
    if whole and short and this.before[-1] <= min(3, this.made[-1]):
        return _NARROW, this.inner < _NARROW
    return 0, False


def _in_points(this: _Convolution) -> bool:
    """Whether it is a product of matrices, the image thinned out first where it has strides."""
    even = all(made * stride == image for made, stride, image in zip(this.made, this.stride, this.image, strict=True))
    return this.points and (not this.strided or (even and len(this.image) == 2))


def _reduced(this: _Convolution, block: int) -> Bytes:
    """An image that is thinned out, in every thread."""
    if not _in_points(this) or not this.strided:
        return 0
    return this.threads * _up(this.inner, block) * prod(this.made) * this.itemsize


def _dividing(this: _Convolution) -> int:
    """The widest block that the channels of a group divide into; those of a single group are filled up."""
    if this.groups == 1:
        return _wide()
    return next((one for one in (16, 8, 4) if this.inner % one == this.outer % one == 0), 0)


def _input(this: _Convolution) -> Bytes:
    small = this.groups > 1 and this.outer <= _wide()
    if this.strided and not this.dilated and not small:
        made = this.read()
        own = made + this.result() + this.weights(1, _wide()) + _around_strides(this) + _biased(this, made)
        return max(own, 3 * made)
    block = _input_blocks(this)
    made = this.read(block or 1)
    if not block:
        own = made + _spread(this) * this.unfolded()
    else:
        own = made + this.weights(block, block) + this.result(block)
    return max(own + _biased(this, made), made + this.read())


def _spread(this: _Convolution) -> int:
    """Threads that unfold an image each for the gradient of the input."""
    spread = prod(this.made[-2:]) // this.threads < 512 or prod(this.kernel) < 64
    return this.threads if spread and (this.batch > 1 or this.groups > 2) else 1


def _biased(this: _Convolution, made: Bytes) -> Bytes:
    """What a transposed one makes before there is a bias added."""
    return made if this.transposed and this.biased else 0


def _around_strides(this: _Convolution) -> Bytes:
    """In every thread: results of one image, with zeros around them, in whole numbers of 4096."""
    around = (
        made + 2 * ((k - 1) // stride) for made, k, stride in zip(this.made, this.kernel, this.stride, strict=True)
    )
    padded = _up(prod(around) * this.groups * this.outer, 4096)
    return _SCRATCH[0] + this.threads * (padded * this.itemsize + _SCRATCH[1])


def _input_blocks(this: _Convolution) -> int:
    """Channels in a block; 0 where no such kernel is made for the gradient of the input."""
    mixed = any(
        stride > 1 and reach > kernel
        for stride, reach, kernel in zip(this.stride, this.reach, this.kernel, strict=True)
    )
    if this.outside or mixed:
        return 0
    if this.depthwise or _in_points(this):
        return _wide()
    if _wide() > _NARROW and (block := _dividing(this)):
        return block
    whole = this.groups == 1 or this.outer % _NARROW == this.inner % _NARROW == 0
    even = this.stride[-1] == this.stride[-2] and set(this.stride[:-2]) <= {1}
    over = (this.reach[-1] - 1 - this.before[-1]) // this.stride[-1]
    return _NARROW if whole and even and (over <= 7 or this.image[-1] <= 7) else 0


def _weights(this: _Convolution) -> Bytes:
    block, flat = _weights_blocks(this)
    if not block:
        return _unfolding_weights(this)
    made = this.weights(block, 1 if flat else block)
    own = made + this.result(block) + (0 if flat else this.read(block)) + _reduced(this, block)
    apart = _parts(this, block)
    own += (apart - 1) * made + (_ADDING if apart > 1 else 0) + _in_pairs(this, block, made)
    return max(own + this.bias(block), made + this.weights() + 2 * this.bias(block))


def _in_pairs(this: _Convolution, block: int, made: Bytes) -> Bytes:
    """In half precision: weights that are added up in full, and in every thread one image read and made in pairs."""
    if this.itemsize != 2 or this.groups > 1:
        return 0
    pictures = (this.read(block) + this.result(block)) // this.batch
    return 2 * made + (0 if this.points else this.threads * pictures + _ADDING)


def _unfolding_weights(this: _Convolution) -> Bytes:
    spread = prod(this.made[-2:]) // this.threads < 256 and (this.batch > 1 or this.groups > 2)
    # Of what threads add up oneDNN takes four bytes for every byte.
    own = this.weights() + (this.threads if spread else 1) * (4 * this.weights() + this.unfolded())
    return max(own, 2 * this.weights()) + 2 * this.bias()


def _parts(this: _Convolution, block: int) -> int:
    """Into how many parts threads divide the batch, each with weights of its own: what moves fewest bytes."""
    threads = this.threads // this.groups
    inner, outer = -(-this.inner // block), -(-this.outer // block)
    best, found = inf, 1
    for parts in range(1, min(threads, this.batch * prod(this.made[:-2]) * max(this.made[-2] // 2, 1)) + 1):
        for outers in range(1, min(threads // parts, outer) + 1):
            inners = min(threads // parts // outers, inner)
            read, made = -(-inner // inners) * block, -(-outer // outers) * block
            cost = this.batch / parts * (
                read * prod(this.image) / prod(this.stride) + made * prod(this.made)
            ) + 8 * read * made * prod(this.kernel)
            if cost <= best:
                best, found = cost, parts
    return found


def _weights_blocks(this: _Convolution) -> tuple[int, bool]:
    """The same as `_forward_blocks`, for the gradient of the weights."""
    if _in_points(this) or (this.depthwise and _weights_by_channel(this)):
        return _wide(), False
    ends = [*zip(this.reach, this.before, this.after, strict=True)]
    beyond = any(max(low, high) >= reach for reach, low, high in ends)
    single = this.groups == 1
    if _wide() > _NARROW and not beyond and _weights_in_wide_blocks(this):
        return _wide(), single and this.inner < _wide()
    deep = any(this.before[:-2]) or any(after > 0 for after in this.after[:-2])
    large = this.kernel[-1] >= 14 or any(k > i for k, i in zip(this.kernel[:-1], this.image[:-1], strict=True))
    flat = this.inner == 3
    whole = single or (this.outer % _NARROW == 0 and (flat or this.inner % _NARROW == 0))
    if whole and not (beyond or deep or large or this.dilated):
        return _NARROW, flat
    return 0, False


def _weights_by_channel(this: _Convolution) -> bool:
    each = zip(this.kernel, this.before, this.after, this.image, strict=True)
    narrow = this.kernel[-1] <= 3 and this.stride[-1] <= this.kernel[-1]
    return narrow and not this.dilated and all(max(low, high) <= k // 2 and i >= k for k, low, high, i in each)


def _weights_in_wide_blocks(this: _Convolution, *, beside: bool = False) -> bool:
    apart = [reach > kernel for reach, kernel in zip(this.reach, this.kernel, strict=True)]
    high = zip(apart[:-1], this.stride[:-1], this.reach[:-1], this.image[:-1], strict=True)
    mixed = any(one and (stride > 1 or reach > image) for one, stride, reach, image in high)
    below = max(this.before[-2], this.after[-2]) > this.reach[-2] // 2
    if mixed or any(apart[:-2]) or below or this.kernel[-1] > 14:
        return False
    if any(p and k >= i + p for p, k, i in zip(this.before[:-2], this.kernel, this.image, strict=False)):
        return False
    if beside:
        return _wide() > _NARROW or not this.dilated
    if this.groups > 1:
        return this.inner % 16 == this.outer % 16 == 0
    return this.inner >= 16 or this.inner <= 3


_ONEDNN: Final[_Kernels] = (_forward, _input, _weights)


def _beside(this: _Convolution) -> Bytes:
    made, narrow = this.result(), _wide() == _NARROW
    if this.depthwise:
        return made + (_group_after_group(this) if narrow and this.dilated else this.weights(_wide()))
    alone = this.groups == 1 or (this.inner % 32 == 0 and this.outer % 32 == 0)
    if not alone and not narrow:
        return made + _filled(this)
    block = _wide() if this.outer <= _wide() else 2 * _wide()
    return made + this.weights(block) + this.threads * _SCRATCH[1]


def _input_beside(this: _Convolution) -> Bytes:
    made, narrow, small = this.read(), _wide() == _NARROW, this.groups > 1 and this.outer <= _wide()
    if this.strided and not this.dilated and not small:
        return made + this.weights(1, _wide()) + _around_strides(this)
    mixed = zip(this.stride, this.reach, this.kernel, strict=True)
    unfolds = this.outside or any(stride > 1 and reach > kernel for stride, reach, kernel in mixed)
    odd = this.inner % _NARROW or this.outer % _NARROW
    if unfolds or (narrow and this.strided and odd and not this.depthwise):
        return made + _group_after_group(this)
    if this.depthwise:
        return made + (_filled(this) if this.dilated else this.weights(_wide()))
    if small and (this.strided or not narrow):
        return made + _filled(this)
    return made + this.weights(1, _wide()) + this.threads * _SCRATCH[1]


def _weights_beside(this: _Convolution) -> Bytes:
    """Made in blocks, and put in order twice."""
    if this.points and not this.strided:
        return (1 if this.threads == 1 else 3) * this.weights() + this.bias()
    by_channel = this.depthwise and _weights_by_channel(this)
    if not by_channel and not _weights_in_wide_blocks(this, beside=True):
        return _unfolding_weights(this) + _spread(this) * _gathered(this)
    flat = this.groups == 1 and this.inner < _wide()
    made = this.weights(_wide()) if by_channel or flat else _filled(this, narrow=False)
    apart = _parts(this, _wide())
    return apart * made + (_ADDING if apart > 1 else 0) + 2 * this.weights() + 2 * this.bias(_wide())


def _filled(this: _Convolution, *, narrow: bool = True) -> Bytes:
    """Weights in blocks, which the channels of each group are filled up to where they are not just 4 or 8, and kernels
    for so narrow ones are made."""
    block = this.inner if narrow and this.inner == this.outer and this.inner in (4, 8) else _wide()
    return this.groups * _up(this.outer, block) * _up(this.inner, block) * prod(this.kernel) * this.itemsize


def _group_after_group(this: _Convolution) -> Bytes:
    """Unfolded, with weights in another order."""
    each = this.unfolded() + (_gathered(this) if this.groups > 1 else 0)
    return this.weights() + _spread(this) * each


def _gathered(this: _Convolution) -> Bytes:
    """The channels of one group of one image, without those that lie between them."""
    return this.inner * prod(this.image) * this.itemsize


_BESIDE: Final[_Kernels] = (_beside, _input_beside, _weights_beside)
"""Where channels lie beside each other, which they read as they are."""
