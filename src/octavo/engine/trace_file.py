"""A trace on disk: bounded, written by a thread of its own, readable after any end.

The file is a JSON array with one event a line. A process that is killed leaves it without the
closing bracket, which the format allows. `limit` bounds what is kept: at half of it the file
becomes the earlier part, `name.earlier.json`, in place of the one before, and a new one begins.
So the last events are kept, and they are at least half of the limit.

A full disk, or any other failure to write, ends the trace with a line in the log and a file that
can be read up to there; whoever records does not notice. What the events mean is
`engine.trace_events`.
"""

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from octavo.errors import ConfigError, cause, shown
from octavo.log import get_logger
from octavo.processes import Owner

logger = get_logger(__name__)

Event = dict[str, Any]

TRACE_BYTES = 256 << 20  # what chrome://tracing opens; Perfetto opens more
FLUSH_SECONDS = 0.25  # also the most that a killed process loses
_MOST_RECORDS = 65536  # that wait for the thread; a disk that is slower loses the others
_CLOSE_SECONDS = 10.0
_SEPARATOR, _END = b",\n", b"\n]\n"


def trace_path(given: str, engine: int = 0, engines: int = 1) -> Path:
    """The file of one engine: with several, `trace.json` is `trace.engine0.json` and so on."""
    path = Path(os.path.expanduser(given))
    return path if engines == 1 else path.with_name(f"{path.stem}.engine{engine}{path.suffix}")


def earlier_path(path: Path) -> Path:
    """Where the part before the last one is."""
    return path.with_name(f"{path.stem}.earlier{path.suffix}")


def check_trace(given: str, engines: int = 1) -> None:
    """Raise ConfigError unless a trace can be written there. Creates nothing."""
    if not given.strip():
        raise ConfigError(f"trace must be a file, such as trace.json, not {given!r}")
    for engine in range(engines):
        try:
            path = trace_path(given, engine, engines)
            with contextlib.suppress(FileNotFoundError):
                os.stat(path)  # `Path` says of names that cannot be that nothing is there
        except (OSError, ValueError) as error:  # a name that no file can have
            raise ConfigError(f"trace {shown(given)} cannot be a file: {cause(error)}") from None
        _check_path(given, path)


def _check_path(given: str, path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"trace must be a file, such as trace.json, not {str(path)!r}")
    if path.exists() and not path.is_file():
        raise ConfigError(f"trace {given!r} is no regular file; name one, which is overwritten")
    folder = path.parent
    if not folder.is_dir():
        raise ConfigError(f"trace {given!r}: there is no folder {str(folder)!r}; make it first")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"trace {given!r} cannot be written to; name another file")


class Events(Protocol):
    """Makes events of records; used by one thread."""

    def begin(self) -> Iterable[Event]:
        """What every file begins with: names, and whatever goes on from the part before."""
        ...

    def of(self, record: Any) -> Iterable[Event]:
        """The events of one record."""
        ...

    def end(self, complete: bool) -> Iterable[Event]:
        """What ends a file, so that nothing in it stays open. complete: there is no next part."""
        ...


class TraceFile:
    """An array of events in a file of at most half of `limit` bytes, and the part before it. A file
    that is there already becomes that part.

    Raises ConfigError where the file cannot be made.
    """

    def __init__(self, path: Path, limit: int, events: Events) -> None:
        self.path = path
        self._half = limit // 2
        self._events = events
        self._size = 0
        try:
            if path.exists() and not path.is_file():
                raise OSError(errno.EINVAL, "it is no regular file")
            if path.exists():  # of another run, or of an engine that has died and was started again
                os.replace(path, earlier_path(path))
            else:
                earlier_path(path).unlink(missing_ok=True)
            self._descriptor = self._open()
        except OSError as error:
            raise ConfigError(f"trace {str(path)!r} cannot be written: {cause(error)}") from None

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        return os.open(self.path, flags, 0o666)

    def begin(self) -> None:
        self._write(self._events.begin(), b"[\n")

    def add(self, records: Iterable[Any]) -> None:
        """Write the events of these records. Raises OSError; the file stays readable."""
        lines: list[bytes] = []
        size = 0
        for record in records:
            for event in self._events.of(record):
                lines.append(msgspec.json.encode(event))
                size += len(lines[-1])
            if self._size + size >= self._half:
                self._put_lines(lines)
                lines, size = [], 0
                self._begin_next()
        self._put_lines(lines)

    def _begin_next(self) -> None:
        is_ours = self._is_ours()
        self._close(complete=False)
        if is_ours:
            os.replace(self.path, earlier_path(self.path))
        self._descriptor, self._size = self._open(), 0
        self.begin()

    def _is_ours(self) -> bool:
        """Whether the file is still where it was made; False if it was moved away or deleted.

        Raises OSError if another one is there now.
        """
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            return False
        if not os.path.samestat(there, os.fstat(self._descriptor)):
            raise OSError(errno.EBUSY, "another engine writes to a file of this name")
        return True

    def close(self) -> None:
        self._close(complete=True)

    def give_up(self) -> None:
        """Close after a failure, with the bracket if there is room for it."""
        with contextlib.suppress(OSError):
            os.write(self._descriptor, _END)
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    def _close(self, complete: bool) -> None:
        self._write(self._events.end(complete))
        self._put(_END)
        descriptor, self._descriptor = self._descriptor, -1  # its number may soon be another's
        os.close(descriptor)

    def _write(self, events: Iterable[Event], start: bytes = _SEPARATOR) -> None:
        self._put_lines([msgspec.json.encode(event) for event in events], start)

    def _put_lines(self, lines: Sequence[bytes], start: bytes = _SEPARATOR) -> None:
        if lines:
            self._put(start + _SEPARATOR.join(lines))

    def _put(self, content: bytes) -> None:
        """All of it, or nothing: a file that was cut within an event would not be read."""
        written = 0
        try:
            while written < len(content):
                written += os.write(self._descriptor, content[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
                os.lseek(self._descriptor, self._size, os.SEEK_SET)
            raise
        self._size += written


class TraceWriter:
    """Takes records on the thread of an engine, and writes them on another.

    A record must not change once it was put.
    """

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self._records: deque[Any] = deque()
        self._lost = 0  # records, for want of a disk that keeps up
        self._stop = threading.Event()
        self._failed = False
        self._owner = Owner("this trace")
        self._attempt(file.begin)
        self._thread = threading.Thread(target=self._run, name="octavo-trace", daemon=True)
        self._thread.start()

    def put(self, record: Any) -> None:
        if self._failed:
            return
        if len(self._records) < _MOST_RECORDS:
            self._records.append(record)
        else:
            self._lost += 1

    def close(self) -> None:
        """Write what was put, and end the file. May be called again; does nothing in a fork."""
        if self._owner.is_here() and not self._stop.is_set():
            self._stop.set()
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while not self._stop.wait(FLUSH_SECONDS) and not self._failed:
            self._flush()
        self._flush()
        if not self._failed:
            self._attempt(self._file.close)

    def _flush(self) -> None:
        records = [self._records.popleft() for _ in range(len(self._records))]
        if records and not self._failed:
            self._attempt(lambda: self._file.add(records))
        if self._lost:
            logger.warning("the trace lacks %d records: the disk is too slow", self._lost)
            self._lost = 0

    def _attempt(self, write: Callable[[], None]) -> None:
        """Write; a failure ends the trace, and nothing else."""
        try:
            write()
        except Exception as error:  # noqa: BLE001 - the engine goes on
            self._failed = True
            self._records.clear()
            self._file.give_up()
            logger.error("the trace ends: %s cannot be written: %s", self._file.path, cause(error))
