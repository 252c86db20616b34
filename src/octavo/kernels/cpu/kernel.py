"""Kernels written for Numba as plain C functions: compiled once per machine, cheap to call.

A kernel is a Python function of one integer, the address of its arguments (8-byte slots; see
`abi`). Numba compiles it to LLVM code, whose object code is cached on disk (`object_cache`), so a
later start loads it without importing Numba. A kernel runs on torch's OpenMP team (`openmp`), and
its threads claim work through a counter in the first argument slot. A call costs about 1 us on
one thread and a few us on several.
"""

import contextlib
import ctypes
import importlib
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch

from octavo import progress
from octavo.kernels.cpu import object_cache, openmp, shipped
from octavo.kernels.cpu.arguments import Address, Arguments
from octavo.kernels.cpu.pool import Pool
from octavo.processes import module_command

_PACKAGE = "octavo.kernels.cpu"
COMPILING = "compiling kernels (once per machine)"


class Recording:
    """The calls of kernels made during `record`, in order, and the pool of what they write.

    Meanwhile kernels are made ready but compute nothing: what is in the pool has no meaning.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Kernel, bytes]] = []
        self.pool = Pool()
        self.checks: dict[Callable[[], None], None] = {}  # to be made after each replay


_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


@contextlib.contextmanager
def record() -> Iterator[Recording]:
    """Record the calls that this thread makes inside the `with`, instead of making them."""
    recording = Recording()
    token = _recording.set(recording)
    try:
        yield recording
    finally:
        _recording.reset(token)


_compiled: ContextVar[list[str] | None] = ContextVar("compiled", default=None)


@contextlib.contextmanager
def note_compiled() -> Iterator[list[str]]:
    """The names of the kernels that this thread compiles itself inside the `with`."""
    names: list[str] = []
    token = _compiled.set(names)
    try:
        yield names
    finally:
        _compiled.reset(token)


def is_recording() -> bool:
    return _recording.get() is not None


def check_replays(check: Callable[[], None]) -> None:
    """While recording: have `check` called after each replay, to raise if a kernel has failed."""
    if (recording := _recording.get()) is not None:
        recording.checks[check] = None


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a kernel to write to; from the recording's pool while recording."""
    recording = _recording.get()
    return (
        torch.empty(shape, dtype=dtype) if recording is None else recording.pool.empty(shape, dtype)
    )


# The names of the compute dtypes in kernel variants.
FLOAT_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
# The address of a tensor's memory: torch.Tensor.data_ptr itself, with a type.
address = cast("Callable[[torch.Tensor], Address]", torch.Tensor.data_ptr)


def function_address(name: str) -> Address:
    """Of a function of the C library, for a kernel to call."""
    return Address(ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value or 0)


class Kernel:
    """One compiled entry point, loaded or compiled when first called (see `kernel`).

    where: "module:maker", a function of a module of this package that returns the Python kernel
    for a variant. arguments: their layout; None for a kernel that no step captures.
    """

    def __init__(self, where: str, variant: str = "", arguments: Arguments | None = None) -> None:
        self.where, self.variant, self.arguments = where, variant, arguments
        self._lock = threading.Lock()
        self._address = Address(0)
        self._direct: Any = None
        self._expected = False
        self._compiler: subprocess.Popen[bytes] | None = None  # another process compiles it

    def run(self, arguments: bytes, threads: int = 1) -> None:
        """Call on `threads` threads, or record the call. `arguments` must be a fresh object: the
        kernel writes to it.

        Everything it points to must stay alive; the result does not depend on `threads`.
        """
        if not self._address:
            self.load()
        if (recording := _recording.get()) is not None:
            recording.calls.append((self, arguments))
        elif threads == 1:
            self._direct(arguments)
        else:
            openmp.team().run(self._address, arguments, threads)

    @property
    def address(self) -> Address:
        """Of the C function."""
        self.load()
        return self._address

    def load(self) -> None:
        """Make the kernel ready. Takes seconds if it is not in the cache, else milliseconds."""
        with self._lock:
            if self._address:
                return
            code = self._cached()
            if code is None:
                self._expect()
                with progress.item(COMPILING, self.name):
                    code = self._made()
            elif self._compiler:
                progress.count(COMPILING)
            address = object_cache.link(code, self.name)
            self._direct = openmp.Function(address)
            self._address = address

    def _expect(self) -> None:
        """Count it once among those to compile."""
        if not self._expected:
            self._expected = True
            progress.expect(COMPILING, 1)

    def _made(self) -> bytes:
        """Its object code from the process that compiles it, or compiled here."""
        if self._compiler:
            self._compiler.wait()
            if (code := self._cached()) is not None:
                return code
        with object_cache.compiling(self._file):
            if (code := self._cached()) is None:  # else another process was faster
                code = self.compiled()
                object_cache.store(self._file, code)
                if (names := _compiled.get()) is not None:
                    names.append(self.name)
        return code

    @staticmethod
    def compile_ahead(first: "Sequence[Kernel]", others: "Sequence[Kernel]" = ()) -> None:
        """Have other processes compile those that are not in the cache, each in its order.

        first: by one process, with two cores or more. others: by a second one, with three or more;
        else each when it is called. A call that needs one meanwhile waits for it. Nothing is
        started without a writable cache, through which the results are passed.
        """
        wanted = [
            [kernel for kernel in kernels if not kernel._address and kernel._cached() is None]
            for kernels in (first, others)
        ]
        for kernel in (*wanted[0], *wanted[1]):
            kernel._expect()
        spare = openmp.threads() - 1
        if not any(wanted[:spare]) or not object_cache.is_writable():
            return
        for kernels in filter(None, wanted[:spare]):
            names = [f"{kernel.where}:{kernel.variant}" for kernel in kernels]
            with contextlib.suppress(OSError):  # then this process compiles them itself
                command = module_command(_PACKAGE, *names)
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
                for kernel in kernels:
                    kernel._compiler = process

    @property
    def name(self) -> str:
        """Of the C function."""
        return f"{self.where.partition(':')[2]}_{self.variant}".rstrip("_")

    @property
    def _file(self) -> Path | None:
        return object_cache.object_file(self.where.partition(":")[0], self.name)

    def _cached(self) -> bytes | None:
        """What was compiled here before, else what came with the package."""
        module = self.where.partition(":")[0]
        return object_cache.read(self._file) or shipped.read(module, self.name)

    def compiled(self) -> bytes:
        """Its object code, compiled in this process."""
        from octavo.kernels.cpu import compile as compiler

        module, _, maker = self.where.partition(":")
        make = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), maker)
        return compiler.object_code(make(self.variant) if self.variant else make(), self.name)


@cache
def kernel(arguments: Arguments, variant: str = "") -> Kernel:
    """The kernel that takes `arguments`, in one of its variants; one object for each."""
    return Kernel(arguments.kernel, variant, arguments)
