"""The arena for CUDA memory on a real device: contents stay, also on the host, and training is the same."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch

from spillway.native.device_arena import DeviceArena

pytestmark = pytest.mark.gpu

MiB = 1 << 20


def tensor_at(address: int, nbytes: int) -> torch.Tensor:
    make: Any = torch._C._construct_storage_from_data_pointer
    storage = make(address, torch.device("cuda", 0), nbytes)
    return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage, 0, (nbytes,))


def test_what_a_block_holds_stays_at_its_address_on_the_host_too() -> None:
    torch.ones(1, device="cuda")
    arena = DeviceArena()
    stream = torch.cuda.current_stream().cuda_stream
    blocks = {value: arena.take(value * MiB + 5, stream) for value in (3, 8, 40)}
    for value, address in blocks.items():
        tensor_at(address, value * MiB + 5).fill_(value)
    for value, address in blocks.items():
        assert bool((tensor_at(address, value * MiB + 5) == value).all())
    for value, address in blocks.items():
        seen, live = tensor_at(address, value * MiB + 5), arena.counts().live
        if not arena.page_out(address, stream):
            pytest.skip("this device has no host memory behind its addresses")
        assert arena.counts().live < live
        assert bool((seen == value).all())
        seen.add_(1)
        assert arena.page_in(address, stream)
        assert bool((seen == value + 1).all())
    for address in blocks.values():
        arena.give(address)
    arena.trim()
    assert arena.counts().physical == arena.counts().on_host == 0


TRAINS = textwrap.dedent(
    """
    import json, sys, torch
    from spillway.native.device_arena import DeviceArena
    arena = DeviceArena() if sys.argv[1] == "arena" else None
    if arena is not None:
        arena.serve()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    layers = [torch.nn.Linear(512, 512) for _ in range(6)]
    model = torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.GELU())]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    side = torch.cuda.Stream()
    for number in range(6):
        batch = torch.randn(300 + 100 * number, 512).cuda(non_blocking=True)
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            batch.record_stream(side)
            scaled = batch * 2
        torch.cuda.default_stream().wait_stream(side)
        scaled.record_stream(torch.cuda.default_stream())
        loss = model(scaled).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    counts = arena.counts() if arena is not None else None
    print(json.dumps([losses, counts and [counts.requested, counts.live, counts.physical, counts.packed]]))
    """
)


def test_training_on_the_arena_is_the_same() -> None:
    def trained(way: str) -> Any:
        done = subprocess.run([sys.executable, "-c", TRAINS, way], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    losses, counts = trained("arena")
    assert trained("plain") == [losses, None]
    requested, live, physical, packed = counts
    assert 6 * 4 * 512 * 512 < requested < live <= physical
    assert packed > 0
