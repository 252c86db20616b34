"""Arrays on their way from the host to a device and back; the host waits for neither.

A copy in flight reads or writes pinned host memory, so that memory may not change before an event
says that the copy is done. An input has as many buffers, used in turn, as it has copies in flight:
two, where one step is planned while another is computed. Results come back beside the work that
follows, each into a buffer that is used again only when it was read.
"""

import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

# Kernels are compiled for the alignment of their arguments: all inputs have the same, 256 bytes.
_ALIGNMENT = 256
_SMALLEST = 4096  # bytes of a buffer
_TYPES = {
    np.dtype(kind).str: torch.from_numpy(np.zeros(0, kind)).dtype
    for kind in (np.bool_, np.int32, np.int64, np.float32, np.float64)
}


class Event(Protocol):
    """Of one copy."""

    def query(self) -> bool:
        """Whether the copy is done."""
        ...

    def synchronize(self) -> None:
        """Wait until the copy is done."""
        ...


class Copies(Protocol):
    """Copies of bytes between a device and host memory, each in the order of the device's work."""

    def host(self, size: int) -> torch.Tensor:
        """uint8 [size] that a device copies without the host's help."""
        ...

    def memory(self, size: int) -> torch.Tensor:
        """uint8 [size] on the device."""
        ...

    def send(self, host: torch.Tensor, target: torch.Tensor) -> Event:
        """Copy to the device: after the work before, which may read `target`."""
        ...

    def fetch(self, source: torch.Tensor, host: torch.Tensor) -> Event:
        """Copy to the host after the work before, and beside the work that follows."""
        ...


class CudaCopies:
    """`Copies` of one GPU: results have a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._back: torch.cuda.Stream | None = None

    def host(self, size: int) -> torch.Tensor:
        """See Copies.host: pinned."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def memory(self, size: int) -> torch.Tensor:
        """See Copies.memory."""
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def send(self, host: torch.Tensor, target: torch.Tensor) -> Event:
        """See Copies.send."""
        target.copy_(host, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def fetch(self, source: torch.Tensor, host: torch.Tensor) -> Event:
        """See Copies.fetch."""
        if self._back is None:
            self._back = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._back.wait_stream(torch.cuda.current_stream(self._device))
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._back):
            host.copy_(source, non_blocking=True)
            event.record(self._back)
        source.record_stream(self._back)
        return event


class _Done:
    """The event of a copy that was done at once."""

    def query(self) -> bool:
        """It is."""
        return True

    def synchronize(self) -> None:
        """Nothing is awaited."""


class HostCopies:
    """`Copies` where the device's memory is the host's."""

    def host(self, size: int) -> torch.Tensor:
        """See Copies.host."""
        return torch.empty(size, dtype=torch.uint8)

    def memory(self, size: int) -> torch.Tensor:
        """See Copies.memory."""
        return torch.empty(size, dtype=torch.uint8)

    def send(self, host: torch.Tensor, target: torch.Tensor) -> Event:
        """See Copies.send."""
        target.copy_(host)
        return _Done()

    def fetch(self, source: torch.Tensor, host: torch.Tensor) -> Event:
        """See Copies.fetch."""
        host.copy_(source)
        return _Done()


def copies_of(device: torch.device) -> Copies:
    """How `device` copies."""
    return CudaCopies(device) if device.type == "cuda" else HostCopies()


class _Buffer:
    """Host memory of one copy at a time."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.event: Event = _Done()
        self.reading: weakref.ref[Reading] | None = None  # that has not been read

    def is_free(self) -> bool:
        """Whether its result was read, or will never be."""
        return self.event.query() and (self.reading is None or self.reading() is None)

    def take(self, copies: Copies, size: int) -> torch.Tensor:
        """Its first `size` bytes, of which there may be more now."""
        if len(self.memory) < size:
            self.memory = copies.host(_rounded(size))
        return self.memory[:size]


class Reading:
    """A result on its way to the host, int64."""

    def __init__(self, buffer: _Buffer, shape: torch.Size) -> None:
        self._buffer: _Buffer | None = buffer
        self._found = np.empty(tuple(shape), np.int64)

    def __call__(self) -> NDArray[np.int64]:
        """Wait for it. May be called again."""
        if self._buffer is not None:
            self._buffer.event.synchronize()
            flat = self._found.reshape(-1).view(np.uint8)
            flat[:] = self._buffer.memory.numpy()[: flat.size]
            self._buffer.reading, self._buffer = None, None
        return self._found


class Staging:
    """The inputs and results of one device's steps."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._inputs: dict[Hashable, deque[_Buffer]] = {}
        self._targets: dict[Hashable, torch.Tensor] = {}
        self._results: list[_Buffer] = []

    def send(
        self, name: Hashable, arrays: Sequence[NDArray[np.generic]]
    ) -> tuple[torch.Tensor, ...]:
        """The arrays on the device, in one copy; valid until the next of that name."""
        sources = [np.ascontiguousarray(array) for array in arrays]
        ends = np.cumsum([-(-source.nbytes // _ALIGNMENT) * _ALIGNMENT for source in sources])
        places, end = [0, *ends[:-1].tolist()], int(ends[-1])
        if name not in self._targets or len(self._targets[name]) < end:
            self._targets[name] = self._copies.memory(_rounded(end))
        target = self._targets[name]
        self._send(name, sources, places, target[:end])
        return tuple(
            target[at : at + source.nbytes].view(_TYPES[source.dtype.str]).view(source.shape)
            for at, source in zip(places, sources, strict=True)
        )

    def fill(self, name: Hashable, array: NDArray[np.generic], target: torch.Tensor) -> None:
        """Copy an array to a contiguous target of the same size on the device."""
        self._send(name, [np.ascontiguousarray(array)], [0], _bytes(target))

    def _send(
        self,
        name: Hashable,
        sources: Sequence[NDArray[np.generic]],
        places: Sequence[int],
        target: torch.Tensor,
    ) -> None:
        buffers = self._inputs.setdefault(name, deque())
        buffer = buffers.popleft() if buffers and buffers[0].event.query() else _Buffer()
        buffers.append(buffer)
        memory = buffer.take(self._copies, len(target))
        host = memory.numpy()
        for at, source in zip(places, sources, strict=True):
            host[at : at + source.nbytes] = source.reshape(-1).view(np.uint8)
        buffer.event = self._copies.send(memory, target)

    def fetch(self, source: torch.Tensor) -> Reading:
        """Begin to copy a contiguous int64 tensor to the host."""
        buffer = next((buffer for buffer in self._results if buffer.is_free()), None)
        if buffer is None:
            buffer = _Buffer()
            self._results.append(buffer)
        flat = _bytes(source)
        buffer.event = self._copies.fetch(flat, buffer.take(self._copies, len(flat)))
        reading = Reading(buffer, source.shape)
        buffer.reading = weakref.ref(reading)
        return reading


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, uint8 [bytes]."""
    return tensor.view(-1).view(torch.uint8)


def _rounded(size: int) -> int:
    return 1 << (max(size, _SMALLEST) - 1).bit_length()
