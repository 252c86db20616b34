"""Kernels written for Numba, as plain C functions: compiled once per machine, called cheaply.

A kernel is a Python function of one integer, the address of its arguments (8-byte slots, the
first two zero). Numba turns it into LLVM code, and the object code is kept in the user's cache
folder, so a later start loads it without importing Numba. A kernel runs on the OpenMP team of
torch (one pool for products and kernels), and its threads share the work through a counter in
the first argument slot. A call costs about 1 us on one thread and a few us on several.
"""

import contextlib
import ctypes
import hashlib
import importlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from octavo import log

_logger = log.get_logger(__name__)
_Address = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


class Recording:
    """The calls of kernels made during `record`, in order, and the tensors they wrote.

    Kernels run as ever meanwhile; the tensors are kept, so that no two have one address.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Kernel, bytes]] = []
        self.buffers: list[torch.Tensor] = []


_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


@contextlib.contextmanager
def record() -> Iterator[Recording]:
    """Note the calls that this thread makes inside the `with`."""
    recording = Recording()
    token = _recording.set(recording)
    try:
        yield recording
    finally:
        _recording.reset(token)


def is_recording() -> bool:
    return _recording.get() is not None


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a kernel to write: torch.empty, noted while recording."""
    out = torch.empty(shape, dtype=dtype)
    if (recording := _recording.get()) is not None:
        recording.buffers.append(out)
    return out


class Kernel:
    """One compiled entry point, loaded or compiled when first called.

    `where` is "module:maker", a function that returns the Python kernel for `variant`.
    """

    def __init__(self, where: str, variant: str = "") -> None:
        self.where, self.variant = where, variant
        self._lock = threading.Lock()
        self._address = 0
        self._direct: Any = None
        self._elsewhere: subprocess.Popen[bytes] | None = None  # a process that compiles it

    def run(self, arguments: bytes, threads: int = 1) -> None:
        """Call on `threads` threads. `arguments` must be a fresh object: the kernel writes to it.

        Everything it points to must stay alive; what it computes does not depend on `threads`.
        """
        if not self._address:
            self.load()
        if (recording := _recording.get()) is not None:
            recording.calls.append((self, bytes(bytearray(arguments))))
        if threads == 1:
            self._direct(arguments)
        else:
            team().run(self._address, arguments, threads)

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
            name = self._name
            code = _read(name)
            if code is None and self._elsewhere:
                self._elsewhere.wait()
                code = _read(name)
            if code is None:
                code = self._compile(name)
                _store(name, code)
            address = _link(code, name)
            self._direct = _Address(address)
            self._address = address

    @staticmethod
    def compile_ahead(kernels: "Iterable[Kernel]") -> None:
        """Have those that are not in the cache compiled by a process beside this one.

        Whoever needs one of them meanwhile waits for it. With one core it would be no gain.
        """
        wanted = [k for k in kernels if not k._address and _read(k._name) is None]
        if not wanted or threads() < 2:
            return
        names = [f"{kernel.where}:{kernel.variant}" for kernel in wanted]
        command = [sys.executable, "-m", "octavo.kernels.cpu.compile", *names]
        with contextlib.suppress(OSError):  # then this process compiles them
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
            for kernel in wanted:
                kernel._elsewhere = process

    @property
    def _name(self) -> str:
        return f"{self.where.partition(':')[2]}_{self.variant}".rstrip("_")

    def _compile(self, name: str) -> bytes:
        from octavo.kernels.cpu import compile as cpu_compile

        module, _, maker = self.where.partition(":")
        make = getattr(importlib.import_module(module), maker)
        return cpu_compile.object_code(make(self.variant) if self.variant else make(), name)


class Team:
    """The OpenMP threads that torch uses, or threads of our own where they cannot be reached."""

    def __init__(self) -> None:
        self._gomp = _find_gomp()
        self._fork = _fork_of(self._gomp)
        self._pool: ThreadPoolExecutor | None = None
        if self._fork is None:
            _logger.warning(
                "libgomp was not found among the loaded libraries: kernels run on Python threads, "
                "which costs about 50 us more a call"
            )

    def is_exact(self, threads: int) -> bool:
        """Whether `threads` threads will run at once: those that wait for each other must."""
        if self._gomp is None:
            return threads == 1
        most = self._gomp.omp_get_thread_limit()
        return not self._gomp.omp_get_dynamic() and bool(threads <= most)

    def run(self, address: int, arguments: bytes, threads: int) -> None:
        """Run the function at `address` once on each of `threads` threads, and wait."""
        if self._fork is not None:
            self._fork(address, arguments, threads, 0)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1))
        function = _Address(address)
        for job in [self._pool.submit(function, arguments) for _ in range(threads)]:
            job.result()


@lru_cache(maxsize=1)
def team() -> Team:
    """The one team of this process."""
    return Team()


def threads() -> int:
    """How many threads a kernel may use: torch's setting."""
    return torch.get_num_threads()


def _find_gomp() -> ctypes.CDLL | None:
    """The libgomp that torch has loaded, or None.

    Asking the loader for a library that is already mapped gives that very library, so torch's
    team is shared: a second pool would fight the first one for the cores.
    """
    for path in _mapped_libraries("libgomp"):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path)
    return None


def _fork_of(gomp: ctypes.CDLL | None) -> Any:
    """GOMP_parallel, or None."""
    function = getattr(gomp, "GOMP_parallel", None)
    if function is not None:
        function.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint)
        function.restype = None
    return function


def _mapped_libraries(name: str) -> list[str]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[-1] for line in lines)
    return sorted({path for path in paths if name in os.path.basename(path)})


# What oneDNN calls a limit: a processor of that kind for LLVM, and features beyond it.
_LIMITS = {
    "AVX2": ("haswell", ("avx10", "avx512", "amx", "evex")),
    "AVX512_CORE": ("skylake-avx512", ("avx10", "avx512bf16", "avx512fp16", "amx")),
    "AVX512_CORE_BF16": ("cooperlake", ("avx10", "avx512fp16", "amx")),
}


@lru_cache(maxsize=1)
def cpu() -> tuple[str, frozenset[str]]:
    """Name and features of the processor, as LLVM calls them.

    Where ONEDNN_MAX_CPU_ISA holds the products of torch to less, the kernels are held to it, too:
    so a machine can be measured as an older one.
    """
    import llvmlite.binding as llvm

    name, found = llvm.get_host_cpu_name(), llvm.get_host_cpu_features()
    features = {feature for feature, there in found.items() if there}
    name, beyond = _LIMITS.get(log.instruction_limit(), (name, ()))
    return name, frozenset(f for f in features if not f.startswith(beyond))


@lru_cache(maxsize=1)
def cache_folder() -> Path:
    """Where object code is kept: one folder per processor, compiler and state of the sources."""
    name, features = cpu()
    digest = hashlib.sha256()
    for part in (name, *sorted(features), version("numba"), version("llvmlite")):
        digest.update(f"{part};".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return log.cache_dir() / "kernels" / digest.hexdigest()[:16]


def _read(name: str) -> bytes | None:
    """Object code from the cache; None if absent or cut short."""
    try:
        data = (cache_folder() / f"{name}.o").read_bytes()
    except OSError:
        return None
    digest, code = data[:32], data[32:]
    return code if hashlib.sha256(code).digest() == digest else None


def _store(name: str, code: bytes) -> None:
    """Keep object code for the next start; a folder that cannot be written is only logged."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(file.name, folder / f"{name}.o")
    except OSError as error:
        _logger.warning("compiled kernels are not kept for the next start: %s", error)


def _link(code: bytes, name: str) -> int:
    """Load object code into this process; returns the address of function `name`."""
    import llvmlite.binding as llvm

    file = llvm.ObjectFileRef.from_data(code)
    engine = _engine()
    engine.add_object_file(file)
    engine.finalize_object()
    return int(engine.get_function_address(name))


@lru_cache(maxsize=1)
def _engine() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
