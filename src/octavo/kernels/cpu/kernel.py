"""Kernels written for Numba, as plain C functions: compiled once per machine, called cheaply.

A kernel is a Python function of one integer, the address of its arguments (8-byte slots; see
`abi`). Numba turns it into LLVM code, whose object code is kept on disk (`object_cache`), so a
later start loads it without importing Numba. A kernel runs on the OpenMP team of torch
(`openmp`), and its threads share the work through a counter in the first argument slot. A call
costs about 1 us on one thread and a few us on several.
"""

import contextlib
import importlib
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import torch

from octavo.kernels.cpu import object_cache, openmp

_PACKAGE = "octavo.kernels.cpu"


class Recording:
    """The calls of kernels made during `record`, in order, and the tensors they wrote.

    The kernels run as usual meanwhile; the tensors are kept, so that no two share an address.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Kernel, bytes]] = []
        self.buffers: list[torch.Tensor] = []


_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


@contextlib.contextmanager
def record() -> Iterator[Recording]:
    """Record the calls that this thread makes inside the `with`."""
    recording = Recording()
    token = _recording.set(recording)
    try:
        yield recording
    finally:
        _recording.reset(token)


def is_recording() -> bool:
    return _recording.get() is not None


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a kernel to write: torch.empty, kept while recording."""
    out = torch.empty(shape, dtype=dtype)
    if (recording := _recording.get()) is not None:
        recording.buffers.append(out)
    return out


class Kernel:
    """One compiled entry point, loaded or compiled when first called (see `kernel`)."""

    def __init__(self, where: str, variant: str = "") -> None:
        self.where, self.variant = where, variant
        self._lock = threading.Lock()
        self._address = 0
        self._direct: Any = None
        self._compiler: subprocess.Popen[bytes] | None = None  # another process compiles it

    def run(self, arguments: bytes, threads: int = 1) -> None:
        """Call on `threads` threads. `arguments` must be a fresh object: the kernel writes to it.

        Everything it points to must stay alive; the result does not depend on `threads`.
        """
        if not self._address:
            self.load()
        if (recording := _recording.get()) is not None:
            recording.calls.append((self, bytes(bytearray(arguments))))
        if threads == 1:
            self._direct(arguments)
        else:
            openmp.team().run(self._address, arguments, threads)

    @property
    def address(self) -> int:
        """Of the C function."""
        self.load()
        return self._address

    def load(self) -> None:
        """Make the kernel ready. Takes seconds if it is not in the cache, else milliseconds."""
        with self._lock:
            if self._address:
                return
            code = self._cached()
            if code is None and self._compiler:
                self._compiler.wait()
                code = self._cached()
            if code is None:
                code = self._compile()
                object_cache.store(self._file, code)
            address = object_cache.link(code, self._name)
            self._direct = openmp.Function(address)
            self._address = address

    @staticmethod
    def compile_ahead(kernels: "Iterable[Kernel]") -> None:
        """Have another process compile those that are not in the cache.

        A call that needs one of them meanwhile waits for it. With one core it is no gain.
        """
        wanted = [k for k in kernels if not k._address and k._cached() is None]
        if not wanted or openmp.threads() < 2:
            return
        names = [f"{kernel.where}:{kernel.variant}" for kernel in wanted]
        with contextlib.suppress(OSError):  # then this process compiles them
            command = [sys.executable, "-m", _PACKAGE, *names]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
            for kernel in wanted:
                kernel._compiler = process

    @property
    def _name(self) -> str:
        return f"{self.where.partition(':')[2]}_{self.variant}".rstrip("_")

    @property
    def _file(self) -> Path:
        return object_cache.object_file(self.where.partition(":")[0], self._name)

    def _cached(self) -> bytes | None:
        return object_cache.read(self._file)

    def _compile(self) -> bytes:
        from octavo.kernels.cpu import compile as compiler

        module, _, maker = self.where.partition(":")
        make = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), maker)
        return compiler.object_code(make(self.variant) if self.variant else make(), self._name)


@cache
def kernel(where: str, variant: str = "") -> Kernel:
    """The kernel `variant` of "module:maker", a function of a module of this package that
    returns the Python kernel for a variant. One object for each, so that it is loaded once."""
    return Kernel(where, variant)
