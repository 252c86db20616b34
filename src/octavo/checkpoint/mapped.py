"""A file mapped into memory: its bytes where they lie, and their pages given back when used.

Nothing is read before it is touched, and nothing is copied. A page that is given back is read
again, from the system's cache, where it is touched again.
"""

import mmap
from pathlib import Path

_PAGE = mmap.PAGESIZE


class MappedFile:
    """A whole file. It stays mapped as long as this or a view of it lives."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as handle:
            # Private and writable: torch refuses memory that it may not write.
            self.data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)

    def view(self, begin: int, end: int) -> memoryview:
        return memoryview(self.data)[begin:end]

    def release(self, begin: int, end: int) -> None:
        """Give back the memory of these bytes, which nobody may have written to."""
        first = begin // _PAGE * _PAGE
        if end > begin and hasattr(mmap, "MADV_DONTNEED"):  # not Windows
            self.data.madvise(mmap.MADV_DONTNEED, first, end - first)
