"""The window paper's virtual addressing (section 4) for CUDA: chunks of memory behind consecutive addresses."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from typing import Any, Final, final

import torch

from spillway.errors import DeviceFullError, NativeError
from spillway.native.library import build, load
from spillway.units import Bytes

DRIVER: Final = "libcuda.so.1"
_NOT_SUPPORTED: Final = 801
_OUT_OF_MEMORY: Final = 2
_LOST: Final = -1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCounts:
    """What the arena of a device has in hand, in bytes; and how often it did what."""

    requested: Bytes
    """What was asked for, of what is in use; what `live` and `on_host` have more are the rests of last chunks, and
    holes between small blocks."""
    live: Bytes
    """Device memory in use, in whole chunks."""
    peak_live: Bytes
    cached: Bytes
    """Mapped, and used by nobody."""
    free: Bytes
    """Of chunks that are not mapped."""
    physical: Bytes
    """Device memory that the driver has given."""
    peak_physical: Bytes
    on_host: Bytes
    """Of blocks whose bytes lie in host memory, behind their device addresses."""
    lost: Bytes
    """What is left of `physical`: calls of the driver that failed have made it unusable."""
    anew: int
    """Case 1: nothing was cached."""
    exact: int
    """Case 2: something of the size was."""
    grown: int
    """Case 3: the largest of the smaller ones grew."""
    grown_in_place: int
    """Of these, at the same address."""
    cut: int
    """Case 4: the smallest of the larger ones was cut."""
    packed: int
    """Small blocks that share a chunk with others."""
    host_waits: int


_opened: Final[dict[int, tuple[Bytes, Bytes, bool, str]]] = {}
"""How the arenas of this process were opened, by device."""


class _Counts(ctypes.Structure):
    _fields_ = [(field.name, ctypes.c_size_t) for field in fields(DeviceCounts)]


@final
class DeviceArena:
    """Device memory for tensors in chunks, none of which is too scattered to be used. A device has one in a process,
    which stays.

    Arguments:
        device: Number of the CUDA device.
        chunk: Bytes of a physical chunk, rounded up to what the device allows (2 MiB on those that were seen), which is
            the default; the paper takes 40 MB.
        limit: At most so many bytes are taken from the driver; all that the device has by default.
        packs: Whether blocks of at most half a chunk share chunks with others of their stream, with holes between them
            when some are freed. The paper gives every array chunks of its own.
        driver: The library of the CUDA driver.

    Raises NativeError if there is no driver, or no device of that number, or it has no virtual memory management.
    """

    def __init__(
        self, device: int = 0, *, chunk: Bytes = 0, limit: Bytes = 0, packs: bool = True, driver: str = DRIVER
    ) -> None:  # fmt: skip
        if min(chunk, limit) < 0:
            raise NativeError(f"chunks of {chunk} bytes, of {limit} at most, cannot be: neither may be negative.")
        asked = (chunk, limit, packs, driver)
        if _opened.get(device, asked) != asked:
            raise NativeError(f"CUDA device {device} has an arena already, which was opened with other arguments.")
        self.device = device
        library = load()
        number, size, address, pointer = ctypes.c_int, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_void_p
        library.spillway_device_open.argtypes = [ctypes.c_char_p, number, size, size, number, pointer]
        library.spillway_device_open.restype = ctypes.c_char_p
        library.spillway_device_chunk.restype = size
        library.spillway_device_take.argtypes = [number, size, pointer]
        library.spillway_device_take.restype = address
        library.spillway_device_give.argtypes = [number, address]
        for name in ("used_by", "page_out", "page_in"):
            getattr(library, f"spillway_device_{name}").argtypes = [number, address, pointer]
        self._library = library
        error = ctypes.c_int(0)
        opened = self._library.spillway_device_open
        missing = opened(driver.encode(), device, chunk, limit, packs, ctypes.byref(error))
        if missing is not None:
            told = f", or failed with error {error.value}" if error.value else ""
            raise NativeError(f"CUDA device {device} has no virtual addressing: {missing.decode()} is missing{told}.")
        _opened[device] = asked
        self.chunk: Bytes = self._library.spillway_device_chunk(device)

    @classmethod
    def of(cls, device: int, *, driver: str = DRIVER) -> DeviceArena:
        """The one that a device has already, or one as it is by default. Raises as the class does."""
        chunk, limit, packs, driver = _opened.get(device, (0, 0, True, driver))
        return cls(device, chunk=chunk, limit=limit, packs=packs, driver=driver)

    def serve(self) -> None:
        """Every CUDA tensor of this process is born here from now on, on this device alone.

        torch allows that before it has first used CUDA. Afterwards it has no account of its memory: sessions that
        manage device memory cannot begin, and `cudnn.benchmark` cannot look for algorithms. A tensor that another
        stream uses has to be told so by `record_stream` before it is freed, also where its own stream waits for the
        other later.

        Raises NativeError if CUDA is in use, or this torch has none.
        """
        if not hasattr(torch._C, "_cuda_customAllocator"):
            raise NativeError(f"torch {torch.__version__} is built without CUDA.")
        cuda: Any = torch.cuda  # without types
        if cuda.is_initialized():
            raise NativeError("CUDA is in use already: let the arena serve before the first CUDA tensor is made.")
        of_torch = cuda.memory.CUDAPluggableAllocator(str(build()), "spillway_device_malloc", "spillway_device_free")
        record = ctypes.cast(self._library.spillway_device_record, ctypes.c_void_p).value
        of_torch.allocator().set_record_stream_fn(record)
        cuda.memory.change_current_allocator(of_torch)

    def take(self, nbytes: Bytes, stream: int = 0) -> int:
        """The address of memory whose first user is a stream. Raises DeviceFullError."""
        address: int = self._library.spillway_device_take(self.device, nbytes, stream)
        if not address:
            counts = self.counts()
            raise DeviceFullError(
                f"{nbytes} bytes were asked for on CUDA device {self.device}, where {counts.live} are in use and the "
                f"driver has given {counts.physical}."
            )
        return address

    def give(self, address: int) -> bool:
        """Take it back; what its streams have been given may still use it. Whether it was in use."""
        return bool(self._library.spillway_device_give(self.device, address))

    def used_by(self, address: int, stream: int) -> bool:
        """Another stream uses it from here on. Whether it is in use."""
        return bool(self._library.spillway_device_used_by(self.device, address, stream))

    def page_out(self, address: int, stream: int = 0) -> bool:
        """The bytes of a block go to host memory behind the same address, where kernels read and write them slowly.
        Its streams are waited for, and nobody may use it meanwhile. False where the device does not allow that, or the
        block shares its chunk.

        Raises:
            DeviceFullError: There is no host memory for them.
            NativeError: The driver failed otherwise, or the block is not in use. What it held is lost if it says so.
        """
        return self._paged(self._library.spillway_device_page_out(self.device, address, stream), "out")

    def page_in(self, address: int, stream: int = 0) -> bool:
        """They come back to the device. Raises as `page_out` does."""
        return self._paged(self._library.spillway_device_page_in(self.device, address, stream), "in")

    def _paged(self, error: int, way: str) -> bool:
        if error == _OUT_OF_MEMORY:
            raise DeviceFullError(f"There is no memory to page a block of CUDA device {self.device} {way}.")
        if error == _LOST:
            raise NativeError(f"what a block of CUDA device {self.device} held is lost: the driver failed twice.")
        if error not in (0, _NOT_SUPPORTED):
            raise NativeError(f"a block of CUDA device {self.device} was not paged {way}: the driver says {error}.")
        return error == 0

    def trim(self) -> None:
        """Give what nobody uses back to the driver; the host waits for it."""
        self._library.spillway_device_trim(self.device)

    def counts(self) -> DeviceCounts:
        """What it has in hand now."""
        taken = _Counts()
        self._library.spillway_device_counts(self.device, ctypes.byref(taken))
        return DeviceCounts(**{field.name: getattr(taken, field.name) for field in fields(DeviceCounts)})
