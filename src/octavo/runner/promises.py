"""What engines of this user on this machine have been promised: memory that they may still fill.

The pages of a KV cache are taken from the system when they are first written, so the system counts
them as free until then, and a second engine would plan with them too. Each engine therefore keeps a
file, locked while it lives, in a common folder; a file without a lock is of a process that has
ended, however it ended, and is removed.

Counted are processes of the same user, folder, boot and PID namespace: containers, which have
limits of their own, and other users are not seen. A folder that cannot be written only means that
nothing is promised.
"""

import contextlib
import fcntl
import itertools
import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import msgspec

from octavo import log
from octavo.processes import Owner

_logger = log.get_logger(__name__)

_LOCK_SECONDS = 10.0  # another engine's sizing takes less than one
_POLL_SECONDS = 0.05
_numbers = itertools.count()


class Promise(msgspec.Struct, frozen=True):
    """One engine's, or that of one of its ranks. promised: bytes that it may come to use beyond
    `base`, what it used then. engine: the name that ranks of one engine share, if it has several.
    pool: the process whose engines divide the memory (`data_parallel_size`), else 0; sized: this
    one has its part.
    """

    pid: int
    model: str
    promised: int
    base: int
    place: str = ""  # boot and PID namespace
    engine: str = ""
    pool: int = 0
    sized: bool = False

    @property
    def outstanding(self) -> int:
        """What of it is not in use yet, as far as can be seen."""
        if self.pid == os.getpid():  # what is in use may be another engine's, of this process
            return self.promised
        resident = _resident_bytes(self.pid)
        used = 0 if resident is None else max(0, resident - self.base)
        return max(0, self.promised - used)


class Promises:
    """The files in `folder`; None where there is no folder: then nothing is recorded."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @classmethod
    def of_user(cls) -> "Promises":
        return cls(log.find_runtime_dir())

    @contextlib.contextmanager
    def sizing(self) -> Iterator[None]:
        """One engine at a time decides what it takes. Waits for 10 s at most."""
        with contextlib.ExitStack() as stack:
            try:
                handle = self._open("lock")
            except OSError as error:
                _logger.debug("promises of memory are not recorded: %s", error)
            else:
                stack.callback(os.close, handle)
                deadline = time.monotonic() + _LOCK_SECONDS
                while not _locked(handle, fcntl.LOCK_EX) and time.monotonic() < deadline:
                    time.sleep(_POLL_SECONDS)
            yield

    def others(self, engine: str = "") -> list[Promise]:
        """Those of living engines, this process's included, but not those of ranks of `engine`."""
        found: list[Promise] = []
        with contextlib.suppress(OSError, TypeError):
            for file in sorted(self._path("").glob("*.json")):
                if (promise := _read(file)) is not None:
                    found.append(promise)
        return [promise for promise in found if not engine or promise.engine != engine]

    def make(
        self,
        model: str,
        promised: int,
        base: int,
        engine: str = "",
        pool: int = 0,
        sized: bool = False,
    ) -> "Held":
        """Record a promise, until `Held.release` or the end of this process."""
        name = f"{os.getpid()}-{next(_numbers)}.json"
        promise = Promise(os.getpid(), model, promised, base, _place(), engine, pool, sized)
        try:
            handle = self._open(name)
        except OSError as error:
            return _unrecorded(error)
        held = Held(handle, self._path(name))
        _locked(handle, fcntl.LOCK_EX)
        try:
            os.write(handle, msgspec.json.encode(promise))
        except OSError as error:  # the disk is full
            held.release()
            return _unrecorded(error)
        return held

    def _path(self, name: str) -> Path:
        if self._folder is None:
            raise FileNotFoundError("there is no folder for it")
        return self._folder / name

    def _open(self, name: str) -> int:
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


class Held:
    """A recorded promise."""

    def __init__(self, handle: int | None, file: Path | None) -> None:
        # Also at the end of the interpreter, so that an ordinary end leaves no file behind.
        self._end = weakref.finalize(self, _drop, handle, file, Owner("this promise"))

    def release(self) -> None:
        """The memory has been given back. May be called again."""
        self._end()


def _unrecorded(error: OSError) -> Held:
    _logger.debug("a promise of memory is not recorded: %s", error)
    return Held(None, None)


def _drop(handle: int | None, file: Path | None, owner: Owner) -> None:
    """Remove a promise; in a fork, leave its file to the process that wrote it."""
    if handle is not None and file is not None:
        if owner.is_here():
            file.unlink(missing_ok=True)
        os.close(handle)


def _read(file: Path) -> Promise | None:
    """The promise of a living process of this machine; a dead one's file is removed."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # never waits
    except OSError:
        return None
    try:
        if _locked(handle, fcntl.LOCK_SH):
            file.unlink(missing_ok=True)
            return None
        promise = msgspec.json.decode(os.read(handle, 2**16), type=Promise)
    except (OSError, msgspec.DecodeError):
        return None
    finally:
        os.close(handle)
    return promise if promise.place == _place() else None


def _locked(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _place() -> str:
    """Where process ids mean the same: this boot of this machine, and its PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return os.uname().nodename


def _resident_bytes(pid: int) -> int | None:
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
