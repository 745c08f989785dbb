"""What the driver of CUDA devices asks of CUDA about host memory, with something in its place that says yes or no."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from spillway.engines.tensors import driver as module
from spillway.engines.tensors.driver import CudaDriver, RegisteredMemory
from spillway.engines.tiers.host import HostPool

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
def driver(cuda: Cuda) -> CudaDriver:
    driver = CudaDriver.__new__(CudaDriver)  # its constructor asks for a device
    driver.device = torch.device("cpu")
    return driver


def pinned(driver: CudaDriver) -> RegisteredMemory:
    memory = driver.pin(NBYTES)
    assert memory is not None
    return memory


def test_the_device_is_waited_for_before_memory_is_unpinned_and_only_then_it_is_unmapped(
    cuda: Cuda, driver: CudaDriver
) -> None:
    memory = pinned(driver)
    memory.release()
    assert cuda.told == [("pin", NBYTES, 3), "wait", "unpin"]
    assert memory._memory.closed
    assert module._never_unmapped == []


def test_memory_that_cuda_does_not_unpin_stays_mapped_and_that_is_said(cuda: Cuda, driver: CudaDriver) -> None:
    memory = pinned(driver)
    cuda.refuses = 713
    with pytest.warns(RuntimeWarning, match=r"did not unpin 64\.00 KiB of host memory, which stay pinned \(error 713"):
        memory.release()
    assert module._never_unmapped == [memory._memory]
    assert not memory._memory.closed


def test_a_forked_process_leaves_memory_alone_that_it_does_not_have(
    cuda: Cuda, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = pinned(driver)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    memory.release()
    assert "unpin" not in cuda.told
    assert not memory._memory.closed


def test_memory_that_cuda_does_not_pin_is_none(cuda: Cuda, driver: CudaDriver) -> None:
    cuda.refuses = 2
    assert driver.pin(NBYTES) is None


def test_a_pool_that_nobody_closed_unpins_its_memory_before_it_goes(cuda: Cuda, driver: CudaDriver) -> None:
    pool = HostPool(driver.pin, NBYTES)
    block = pool.take(1 << 10)
    owner = torch.UntypedStorage(8)
    block.keep_for(owner)
    del pool, block
    assert "unpin" not in cuda.told
    del owner
    assert cuda.told[1:] == ["wait", "unpin"]
