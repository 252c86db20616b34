"""An address space in which small and large blocks of memory end up far apart.

As in a process with several GB of libraries or weights: between the libraries there is room for
a page, for more only beyond what is large.
"""

import ctypes
import mmap

_PROT_NONE = 0
_PRIVATE_UNBACKED = 0x22 | 0x4000  # MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE
_FAR = 3 << 30  # further than a 32-bit offset reaches


def scatter() -> None:
    """Fill every hole in this process's address space but some of one page each."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def take(size: int) -> int:
        address: int = libc.mmap(None, size, _PROT_NONE, _PRIVATE_UNBACKED, -1, 0)
        return address

    pages = [take(mmap.PAGESIZE) for _ in range(1000)]
    far = take(_FAR)
    size = 1 << 30
    while size >= mmap.PAGESIZE:  # the kernel takes the highest hole that is large enough
        if take(size) < far:
            size //= 2
    for page in pages[::2]:
        libc.munmap(page, mmap.PAGESIZE)
