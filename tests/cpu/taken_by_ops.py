"""What ops take, as torch's allocator hands it out; and convolutions of which that is told otherwise."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from spillway.engines.tensors.tally import Tally

NEAR = 1024
"""Bytes of small things that nobody tells of; and a hundredth."""
ABOVE = {"dilated far": 1.25, "beside": 1.1}
"""At most so many times what is taken is told where oneDNN weighs up two ways, by the size of the cache, and where
channels lie beside each other, of which kernels choose their blocks by what is faster."""

CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "3x3": (lambda: nn.Conv2d(32, 32, 3, padding=1), (16, 32, 32, 32)),
    "without bias": (lambda: nn.Conv2d(32, 32, 3, padding=1, bias=False), (16, 32, 32, 32)),
    "strided": (lambda: nn.Conv2d(64, 128, 3, 2, 1), (8, 64, 16, 16)),
    "1x1": (lambda: nn.Conv2d(64, 256, 1), (8, 64, 16, 16)),
    "1x1 strided": (lambda: nn.Conv2d(32, 96, 1, 2), (8, 32, 28, 28)),
    "1x1 in many pictures": (lambda: nn.Conv2d(3, 20, 1), (16, 3, 28, 28)),
    "many channels": (lambda: nn.Conv2d(256, 256, 3, padding=1), (4, 256, 4, 4)),
    "odd channels": (lambda: nn.Conv2d(20, 36, 3, padding=1), (4, 20, 28, 28)),
    "first": (lambda: nn.Conv2d(3, 32, 5, padding=2), (8, 3, 32, 32)),
    "dilated": (lambda: nn.Conv2d(32, 32, 3, padding=2, dilation=2), (8, 32, 16, 16)),
    "dilated far": (lambda: nn.Conv2d(16, 16, 7, padding=12, dilation=4), (4, 16, 32, 32)),
    "in groups": (lambda: nn.Conv2d(32, 32, 3, padding=1, groups=4), (8, 32, 28, 28)),
    "in odd groups": (lambda: nn.Conv2d(36, 20, 3, padding=1, groups=2), (4, 36, 14, 14)),
    "by channel": (lambda: nn.Conv2d(24, 24, 3, padding=1, groups=24), (8, 24, 28, 28)),
    "channels beside each other": (lambda: nn.Conv2d(32, 64, 3, padding=1), (8, 32, 28, 28)),
    "strided, channels beside each other": (lambda: nn.Conv2d(32, 64, 3, 2, 1), (8, 32, 28, 28)),
    "by channel, beside each other": (lambda: nn.Conv2d(24, 24, 3, padding=1, groups=24), (8, 24, 28, 28)),
    "by channel, wide, beside each other": (lambda: nn.Conv2d(32, 32, 7, padding=3, groups=32), (4, 32, 14, 14)),
    "by channel, dilated, beside each other": (
        lambda: nn.Conv2d(32, 32, 3, padding=2, dilation=2, groups=32),
        (4, 32, 14, 14),
    ),
    "in pairs, beside each other": (lambda: nn.Conv2d(32, 32, 3, padding=1, groups=16), (4, 32, 14, 14)),
    "in eights, beside each other": (lambda: nn.Conv2d(32, 32, 3, padding=1, groups=4), (4, 32, 14, 14)),
    "in odd groups, beside each other": (lambda: nn.Conv2d(36, 20, 3, padding=1, groups=2), (4, 36, 14, 14)),
    "in groups, strided, beside each other": (lambda: nn.Conv2d(32, 64, 3, 2, 1, groups=2), (4, 32, 14, 14)),
    "few channels, beside each other": (lambda: nn.Conv2d(20, 40, 3, padding=1), (4, 20, 14, 14)),
    "in groups, strided and dilated, beside each other": (
        lambda: nn.Conv2d(64, 64, 3, 2, 2, dilation=2, groups=2),
        (4, 64, 20, 20),
    ),
    "turned": (lambda: nn.Conv2d(32, 64, 3, padding=1), (8, 32, 28, 28)),
    "1d": (lambda: nn.Conv1d(64, 64, 3, padding=1), (16, 64, 128)),
    "3d": (lambda: nn.Conv3d(16, 32, 3, padding=1), (4, 16, 8, 16, 16)),
    "3d of few channels": (lambda: nn.Conv3d(8, 16, 3, padding=1), (4, 8, 8, 16, 16)),
    "3d without oneDNN": (lambda: nn.Conv3d(3, 48, 3), (1, 3, 12, 12, 12)),
    "3d 1x1": (lambda: nn.Conv3d(12, 32, 1), (1, 12, 16, 16, 16)),
    "transposed": (lambda: nn.ConvTranspose2d(64, 96, 3, padding=1), (8, 64, 16, 16)),
    "transposed, strided": (lambda: nn.ConvTranspose2d(16, 8, 4, 2, 1), (8, 16, 16, 16)),
    "double": (lambda: nn.Conv2d(32, 48, 3, padding=1, dtype=torch.float64), (4, 32, 16, 16)),
    "double, dilated": (lambda: nn.Conv2d(16, 8, 3, dilation=2, dtype=torch.float64), (4, 16, 28, 28)),
}


def taken(run: Callable[[], Any]) -> int:
    """The most bytes that torch's allocator has handed out at once while it ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [one for one in profiled.profiler.kineto_results.events() if one.name() == "[memory]"]
    handed = itertools.accumulate(one.nbytes() for one in sorted(events, key=lambda one: one.start_ns()))
    return max(handed, default=0)


def misses(name: str) -> list[str]:
    """Of a convolution, of its gradients, of one of them alone: where what is told is not what is taken."""
    make, shape = CONVOLUTIONS[name]
    convolution = make()
    dtype = next(convolution.parameters()).dtype
    x = torch.randn(shape, dtype=dtype)
    if "beside" in name:
        x = x.to(memory_format=torch.channels_last)
    if "turned" in name:
        x = x.transpose(2, 3)
    x.requires_grad_()
    made = convolution(x)
    gradient = torch.ones_like(made)

    def back(*wanted: torch.Tensor) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(made, wanted, gradient, retain_graph=True)

    parameters = [*convolution.parameters()]
    runs = {"forward": lambda: convolution(x), "both": back(x, *parameters), "input": back(x)}
    runs["weights"] = back(*parameters)
    found = []
    for what, run in runs.items():
        with Tally([x, *parameters, gradient, made]) as tally:
            run()
        now = taken(run)
        above = max([1.01, *(most for part, most in ABOVE.items() if part in name)]) * now
        if not now - max(NEAR, now / 100) <= tally.peak <= max(now + NEAR, above):
            found.append(f"{name}, {what}: {tally.peak} bytes are told and {now} taken")
    return found


def main() -> None:
    """Print all misses."""
    warnings.simplefilter("ignore", UserWarning)
    torch.set_num_threads(1)
    print("\n".join(one for name in CONVOLUTIONS for one in misses(name)), end="")
