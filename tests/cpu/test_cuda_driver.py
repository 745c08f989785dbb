"""What the driver of CUDA devices asks of CUDA about host memory, with something in its place that says yes or no."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from spillway.tiers import cuda_streams as module
from spillway.tiers.cuda_streams import CudaStreams, RegisteredMemory
from spillway.tiers.host import HostPool

NBYTES = 1 << 16


class Cuda:
    """In place of `torch.cuda`."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.refuses = 0

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    def synchronize(self, device: torch.device) -> None:
        self.told.append("wait")

    def cudart(self) -> Cuda:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.told.append(("pin", nbytes, flags))
        return self.refuses

    def cudaHostUnregister(self, address: int) -> int:
        self.told.append("unpin")
        return self.refuses


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setattr(module, "_cuda", cuda)
    monkeypatch.setattr(module, "_address_on_device", lambda address: address)
    monkeypatch.setattr(module, "_never_unmapped", [])
    monkeypatch.setattr("torch.cuda.device", cuda.device)
    return cuda


@pytest.fixture
def streams(cuda: Cuda) -> CudaStreams:
    streams = CudaStreams.__new__(CudaStreams)  # its constructor asks for a device
    streams.device = torch.device("cpu")
    return streams


def pinned(streams: CudaStreams) -> RegisteredMemory:
    memory = streams.pin(NBYTES)
    assert memory is not None
    return memory


def test_the_device_is_waited_for_before_memory_is_unpinned_and_only_then_it_is_unmapped(
    cuda: Cuda, streams: CudaStreams
) -> None:
    memory = pinned(streams)
    memory.release()
    assert cuda.told == [("pin", NBYTES, 3), "wait", "unpin"]
    assert memory._memory.closed
    assert module._never_unmapped == []


def test_memory_that_cuda_does_not_unpin_stays_mapped_and_that_is_said(cuda: Cuda, streams: CudaStreams) -> None:
    memory = pinned(streams)
    cuda.refuses = 713
    with pytest.warns(RuntimeWarning, match=r"did not unpin 64\.00 KiB of host memory, which stay pinned \(error 713"):
        memory.release()
    assert module._never_unmapped == [memory._memory]
    assert not memory._memory.closed


def test_a_forked_process_leaves_memory_alone_that_it_does_not_have(
    cuda: Cuda, streams: CudaStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = pinned(streams)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    memory.release()
    assert "unpin" not in cuda.told
    assert not memory._memory.closed


def test_memory_that_cuda_does_not_pin_is_none(cuda: Cuda, streams: CudaStreams) -> None:
    cuda.refuses = 2
    assert streams.pin(NBYTES) is None


def test_a_pool_that_nobody_closed_unpins_its_memory_before_it_goes(cuda: Cuda, streams: CudaStreams) -> None:
    pool = HostPool(streams.pin, NBYTES)
    block = pool.take(1 << 10)
    owner = torch.UntypedStorage(8)
    block.keep_for(owner)
    del pool, block
    assert "unpin" not in cuda.told
    del owner
    assert cuda.told[1:] == ["wait", "unpin"]
