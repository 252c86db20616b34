"""The cache of compiled kernels on disk: paths, keys, and loading.

The key covers only what is compiled: the processor, the compilers, and the code of the kernel's
module and of everything that it imports from this package, without comments and docstrings. So a
change in a caller recompiles nothing. Imports no Numba.
"""

import ast
import contextlib
import fcntl
import hashlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from types import CodeType
from typing import Any

from octavo import log
from octavo.kernels.cpu import target
from octavo.kernels.cpu.arguments import Address

_logger = log.get_logger(__name__)
_PACKAGE = "octavo.kernels.cpu"
_DIGEST_BYTES = 32
_COMPILE_SECONDS = 120.0
_POLL_SECONDS = 0.02


def object_file(module: str, name: str) -> Path | None:
    """The path of the object code of kernel `name` of `module` (of this package, if anywhere."""
    folder = cache_folder()
    return None if folder is None else folder / f"{name}-{_keys(folder)[module][:16]}.o"


@lru_cache(maxsize=1)
def cache_folder() -> Path | None:
    """One folder per processor and compiler; None for a user without a home."""
    if (cache := log.find_cache_dir()) is None:
        _say_not_kept("this user has no home folder; OCTAVO_CACHE_DIR names another one")
        return None
    name, features = target.cpu()
    parts = (name, *sorted(features), version("numba"), version("llvmlite"))
    digest = hashlib.sha256("".join(f"{part};" for part in parts).encode())
    return cache / "kernels" / digest.hexdigest()[:16]


def is_writable() -> bool:
    """Whether what one process compiles can be found by another."""
    folder = cache_folder()
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _say_not_kept(f"{folder}: {error.strerror}")
        return False
    return folder is not None and os.access(folder, os.W_OK | os.X_OK)


def read(file: Path | None) -> bytes | None:
    """What `store` wrote; None if it is absent or damaged."""
    if file is None:
        return None
    try:
        data = file.read_bytes()
    except OSError:
        return None
    digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return content if hashlib.sha256(content).digest() == digest else None


def store(file: Path | None, content: bytes) -> None:
    """Keep `content` for the next start; a folder that cannot be written is only logged, once."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as temporary:
            try:
                temporary.write(hashlib.sha256(content).digest() + content)
                temporary.flush()
                os.replace(temporary.name, file)
            except OSError:
                os.unlink(temporary.name)
                raise
    except OSError as error:
        _say_not_kept(f"{file.parent}: {error.strerror}")


@contextlib.contextmanager
def compiling(file: Path | None) -> Iterator[None]:
    """One process at a time compiles what is stored as `file`: the others, such as the ranks of one
    engine, wait, and should look for it again then."""
    with contextlib.ExitStack() as stack:
        try:
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                lock = file.with_suffix(".lock")
                handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, handle)
                stack.callback(lock.unlink, missing_ok=True)
                _wait_for(handle)
        except OSError as error:
            _logger.debug("each process compiles for itself: %s", error)
        yield


def _wait_for(handle: int) -> None:
    """Lock the file, or give up after a time that no kernel takes to be compiled."""
    deadline = time.monotonic() + _COMPILE_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_POLL_SECONDS)
        else:
            return


@lru_cache
def _say_not_kept(reason: str) -> None:
    """Log each reason once."""
    _logger.warning("compiled kernels are not kept for the next start: %s", reason)


_linking = threading.Lock()


def link(code: bytes, name: str) -> Address:
    """Load object code into this process; returns the address of function `name`."""
    import llvmlite.binding as llvm

    file = llvm.ObjectFileRef.from_data(code)
    with _linking:  # the engine is one, and a second one would be freed with what it has linked
        engine = _engine()
        engine.add_object_file(file)
        engine.finalize_object()
        return Address(engine.get_function_address(name))


@lru_cache(maxsize=1)
def _engine() -> Any:
    """The engine that holds all linked code, for as long as this process lives."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    # Code reaches its constants within 2 GiB. LLVM's own memory manager allocates each section
    # where there is room: between the libraries or beyond them, which may be further apart than
    # that (CUDA's are). llvmlite's allocates the sections of an object side by side.
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine, use_lmm=True)


@lru_cache(maxsize=1)
def _keys(folder: Path) -> dict[str, str]:
    """The key of each module of this package that can be compiled.

    To find them takes 0.1 s, so they are kept beside the object code, under a hash of the
    sources as they stand.
    """
    sources = _sources()
    digest = hashlib.sha256(f"{sys.version};{sources_digest()}".encode())
    file = folder / f"keys-{digest.hexdigest()[:16]}"
    if (kept := read(file)) is not None:
        keys: dict[str, str] = json.loads(kept)
        return keys
    keys = module_keys(sources)
    store(file, json.dumps(keys).encode())
    return keys


def sources_digest() -> str:
    """A hash of this package's sources as they stand."""
    digest = hashlib.sha256()
    for name, source in _sources().items():
        digest.update(b"%s;%d;%s" % (name.encode(), len(source), source))
    return digest.hexdigest()


def _sources() -> dict[str, bytes]:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return {path.stem: path.read_bytes() for path in files}


def module_keys(sources: Mapping[str, bytes]) -> dict[str, str]:
    """Module -> a hash of its code and that of all it imports among `sources`, and `compile`."""
    trees = {name: ast.parse(source) for name, source in sources.items()}
    direct = {name: set(_imports(tree)) & set(trees) for name, tree in trees.items()}
    # Without docstrings, which optimize=2 leaves out, and without lines, which are not hashed.
    codes = {name: _digest(compile(tree, name, "exec", optimize=2)) for name, tree in trees.items()}
    keys = {}
    for name in trees:
        wanted, found = {name, "compile"} & set(trees), set[str]()
        while wanted:
            found |= wanted
            wanted = set().union(*(direct[n] for n in wanted)) - found
        parts = "".join(f"{n}:{codes[n]};" for n in sorted(found))
        keys[name] = hashlib.sha256(parts.encode()).hexdigest()
    return keys


def _digest(code: CodeType) -> str:
    """A hash of what a code object does: its instructions, names and constants, nested ones too."""
    digest = hashlib.sha256(code.co_code)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    digest.update(repr((names, code.co_argcount, code.co_kwonlyargcount, code.co_flags)).encode())
    for constant in code.co_consts:
        digest.update(f"{_constant(constant)};".encode())
    return digest.hexdigest()


def _constant(value: object) -> str:
    if isinstance(value, CodeType):
        return _digest(value)
    if isinstance(value, frozenset):  # whose order is another one in each process
        return f"set{sorted(map(_constant, value))}"
    return f"({','.join(map(_constant, value))})" if isinstance(value, tuple) else repr(value)


def _imports(node: ast.AST) -> Iterator[str]:
    """The modules of this package that a module imports, wherever in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom) and child.module is not None:
            if child.module == _PACKAGE:
                yield from (alias.name for alias in child.names)
            elif child.module.startswith(f"{_PACKAGE}."):
                yield child.module.removeprefix(f"{_PACKAGE}.")
        elif isinstance(child, ast.Import):
            yield from (alias.name.removeprefix(f"{_PACKAGE}.") for alias in child.names)
        elif not isinstance(child, ast.expr):  # in which there are no statements
            yield from _imports(child)
