"""Memory in pages of 2 MiB, where the system lets a program request them.

A decode step reads every weight once. In pages of 4 KiB that is a page-table walk for each
4 KiB, and on a virtual machine each walk is two-dimensional: measured on one, products on
weights that do not fit the cache ran at 4 GB/s, and at 17 GB/s in huge pages (docs/log.md).
Under Linux's usual setting, `madvise`, a program must request them, and the libraries that
allocate the weights do not. On other systems, and where the setting is `never`, nothing here has
an effect. `huge_pages=False` disables all of it (decision 13).
"""

import contextlib
import ctypes
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import torch

from octavo.kernels.cpu import memory
from octavo.log import get_logger

logger = get_logger(__name__)

HUGE = 2**21
_LINE, _CHUNK = 64, 2**28  # bytes of a cache line; of address space that is asked for at once
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST_FROM_HEAP = 2**25  # the largest threshold that glibc accepts
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class Arena:
    """Memory for weights, one after the other, in huge pages from the first touch on.

    Nothing is copied to move there, and no weight ends a page of its own. What is freed stays with
    its chunk until all of the chunk is.
    """

    def __init__(self) -> None:
        self._chunks: list[tuple[int, int]] = []
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As torch.empty."""
        size = torch.Size(shape).numel() * dtype.itemsize
        room = -(-size // _LINE) * _LINE
        if room > self._rest.numel():
            self._begin(max(room, _CHUNK))
        taken, self._rest = self._rest[:size], self._rest[room:]
        return taken.view(dtype).view(shape)

    def _begin(self, size: int) -> None:
        """A chunk of address space: a page of it is memory once it is written."""
        chunk = torch.empty(size + HUGE, dtype=torch.uint8)
        request(chunk)
        start = chunk.data_ptr()
        self._chunks.append((start, start + chunk.numel()))
        self._rest = chunk[-start % HUGE :]

    def close(self) -> list[tuple[int, int]]:
        """Hand out no more of the last chunk; where all of them are."""
        found, self._chunks = self._chunks, []
        self._rest = torch.empty(0, dtype=torch.uint8)
        return found


@contextlib.contextmanager
def loading(arena: Arena | None = None) -> Iterator[None]:
    """Memory allocated inside is in huge pages: from the heap, or moved there at the end.

    arena: where some of it comes from. Do not leave with other large untouched reservations: they
    would be backed by memory.
    """
    prepare_heap()
    before = list(_private_ranges())
    yield
    collapse([*before, *(arena.close() if arena else ())])


@lru_cache(maxsize=1)
def prepare_heap() -> bool:
    """Allocate weights and activations from one heap of huge pages that is never trimmed.

    By default glibc maps each large array separately and unmaps it when it is freed: a step
    would fault in every page of every activation again. Reserves address space, not memory. Done
    once per process, and cannot be undone. Returns whether it was done: only on glibc.
    """
    libc = _libc()
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    reserve = min(2**30, memory.installed_bytes() // 4)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)
    libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(_M_TOP_PAD, reserve)
    begin = libc.sbrk(0)
    blocks: list[int] = []
    while libc.sbrk(0) == begin and len(blocks) < 64:  # until free memory is used up: it grows
        blocks.append(libc.malloc(_LARGEST_FROM_HEAP - 2**12))
    libc.mallopt(_M_TOP_PAD, 2**24)
    if libc.sbrk(0) > begin:
        _advise(begin, libc.sbrk(0), _MADV_HUGEPAGE)
    for block in blocks:
        libc.free(block)
    return True


def trim_heap() -> None:
    """Return the free pages of the heap to the system, wherever in it they lie. Only on glibc."""
    if hasattr(_libc(), "malloc_trim"):
        _libc().malloc_trim(0)


def collapse(excluded: Iterable[tuple[int, int]] = ()) -> int:
    """Move the process's private memory outside of `excluded` to huge pages; the bytes moved."""
    if not available():
        return 0
    began, moved = time.perf_counter(), 0
    for start, end in _without(_private_ranges(), sorted(excluded)):
        _advise(start, end, _MADV_HUGEPAGE)
        moved += _advise(start, end, _MADV_COLLAPSE)
    logger.info("%d MiB moved to huge pages in %.2f s", moved >> 20, time.perf_counter() - began)
    return moved


def _without(
    ranges: Iterable[tuple[int, int]], excluded: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """The parts of each range that lie outside of all `excluded`, which are sorted."""
    for start, end in ranges:
        for first, last in excluded:
            if first < end and last > start:
                if start < first:
                    yield start, first
                start = last
        if start < end:
            yield start, end


def request(tensor: torch.Tensor) -> None:
    """Have pages of `tensor` backed by huge pages when they are first written."""
    if available() and tensor.device.type == "cpu" and tensor.numel():
        start = tensor.data_ptr()
        _advise(start, start + tensor.numel() * tensor.element_size(), _MADV_HUGEPAGE)


def available() -> bool:
    """Whether the system grants requests for huge pages."""
    try:
        return "[never]" not in _SETTING.read_text()
    except OSError:
        return False


def _private_ranges() -> Iterator[tuple[int, int]]:
    """Writable memory without a file behind it, of 2 MiB and more."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, access, _, _, _, name = [*line.split(maxsplit=5), ""][:6]
        start, end = (int(bound, 16) for bound in where.split("-"))
        if access == "rw-p" and name.strip() in ("", "[heap]") and end - start >= HUGE:
            yield start, end


def _advise(start: int, end: int, advice: int) -> int:
    """Advise the whole huge pages between two addresses; their bytes, or 0 if it was refused."""
    first, last = -(-start // HUGE) * HUGE, end // HUGE * HUGE
    if last <= first or _libc().madvise(first, last - first, advice):
        return 0
    return last - first


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim.argtypes = [ctypes.c_size_t]
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    return libc
