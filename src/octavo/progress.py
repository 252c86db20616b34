"""What a start is doing: its phases, shown on a terminal or as plain lines.

Code that takes a while opens a `phase`, or an `item` of a series of which some may lie far apart.
It is shown where a caller has opened `shown`, else nothing is. On a terminal the innermost phase
has one line, with a bar where its size is known, that moves while the work does not. Elsewhere a
phase that takes more than a second has a line at its beginning, one every 10 s, and one at its
end. What a model generates is not progress of this kind: `LLM` shows that itself.
"""

import contextlib
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, TextIO

from octavo.log import can_redraw

_TICK_SECONDS = 0.25
_BAR_AFTER_SECONDS = 0.3  # so that what is over at once does not flicker
_LINE_AFTER_SECONDS = 1.0
_AGAIN_AFTER_SECONDS = 10.0
_KEPT_AFTER_SECONDS = 2.0  # what took longer stays on the terminal
_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{unit} [{elapsed}]"
_FORMAT_OPEN = "{desc} [{elapsed}]"

Say = Callable[[str], None]


class Phase:
    """Work that takes a while. total: its size in `unit`, 0 where it is not known. foreign: a
    library draws bars of its own meanwhile."""

    def __init__(
        self, name: str, total: int = 0, unit: str = "", done: int = 0, foreign: bool = False
    ) -> None:
        self.name, self.total, self.unit, self.done = name, total, unit, done
        self.foreign = foreign
        self.began = time.monotonic()
        self.nested = False
        self.series: str | None = None  # where it is an item of one
        self.widget: Any = None  # what a display keeps for it
        self.failed = False

    def advance(self, count: int = 1) -> None:
        self.done += count

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


class Display(Protocol):
    """Shows phases. Its methods are called under a lock."""

    def tick(self, phases: Sequence[Phase]) -> None:
        """Show the open phases as they are now, the innermost last."""
        ...

    def cover(self, phase: Phase) -> None:
        """Another phase begins inside this one."""
        ...

    def end(self, phase: Phase) -> None: ...


class Bars:
    """One line of a terminal, by tqdm."""

    def tick(self, phases: Sequence[Phase]) -> None:
        phase = phases[-1]
        if phase.foreign:
            if phase.widget is None and phase.seconds >= _LINE_AFTER_SECONDS:
                phase.widget = _Announcement(phase.name)
            return
        if phase.widget is None:
            if phase.seconds < _BAR_AFTER_SECONDS:
                return
            phase.widget = self._bar(phase)
        phase.widget.n = phase.done
        phase.widget.ncols = columns(sys.stderr)
        phase.widget.refresh()

    def cover(self, phase: Phase) -> None:
        if phase.widget is not None:
            phase.widget.clear()

    def end(self, phase: Phase) -> None:
        if phase.widget is not None:
            phase.widget.n = phase.done
            phase.widget.leave = not phase.nested and phase.seconds > _KEPT_AFTER_SECONDS
            phase.widget.close()

    def _bar(self, phase: Phase) -> Any:
        from tqdm import tqdm  # imported late: --help and the web process need none

        # nrows: of a terminal that says it has none, tqdm would show nothing.
        bar = tqdm(
            desc=phase.name, total=phase.total or None, unit=phase.unit, position=0,
            unit_scale=phase.unit == "B", ncols=columns(sys.stderr), nrows=20, file=sys.stderr,
            bar_format=_FORMAT if phase.total else _FORMAT_OPEN, initial=phase.done,
        )  # fmt: skip
        bar.start_t -= phase.seconds
        return bar


class _Announcement:
    """A line above another one's bars, in place of a bar."""

    leave, n = False, 0

    def __init__(self, name: str) -> None:
        from tqdm import tqdm

        tqdm.write(f"{name} ...", file=sys.stderr)

    def clear(self) -> None: ...

    def close(self) -> None: ...


class Lines:
    """A line at the beginning and the end of an outer phase that takes long, one every 10 s between
    them, and one for a series whose items take long. A phase that fails has no last line: its
    error is told elsewhere."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._begun: set[str] = set()

    def tick(self, phases: Sequence[Phase]) -> None:
        last = phases[-1]
        if last.series and last.series not in self._begun and last.seconds >= _LINE_AFTER_SECONDS:
            self._begun.add(last.series)
            self._say(f"{last.series} ...")
        phase = phases[0]
        if phase.widget is None and phase.seconds >= _LINE_AFTER_SECONDS:
            phase.widget = _AGAIN_AFTER_SECONDS
            self._say(f"{phase.name} ...")
        elif phase.widget is not None and phase.seconds >= phase.widget:
            phase.widget = phase.seconds + _AGAIN_AFTER_SECONDS
            self._say(f"{phase.name}: {phase.seconds:.0f} s so far")

    def cover(self, phase: Phase) -> None:
        """A line stays where it is."""

    def end(self, phase: Phase) -> None:
        if phase.widget is not None and not phase.failed:
            self._say(f"{phase.name}: done in {phase.seconds:.1f} s")


class Progress:
    """The phases that are open, the innermost last, and the thread that shows them."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._open: list[Phase] = []
        self._series: dict[str, list[int]] = {}  # name -> [items done, items expected]
        self._lock = threading.RLock()
        self._done = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="octavo-progress", daemon=True)

    def __enter__(self) -> "Progress":
        self._ticker.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._ticker.join()

    @contextlib.contextmanager
    def phase(self, phase: Phase) -> Iterator[Phase]:
        with self._lock:
            if self._open:
                self._display.cover(self._open[-1])
            phase.nested = bool(self._open)
            self._open.append(phase)
        try:
            yield phase
        except BaseException:
            phase.failed = True
            raise
        finally:
            with self._lock:
                self._open.remove(phase)
                with contextlib.suppress(OSError, ValueError):
                    self._display.end(phase)

    def expect(self, series: str, count: int) -> None:
        self._series.setdefault(series, [0, 0])[1] += count

    def count(self, series: str) -> list[int]:
        """One more item is done, or begun: (how many are, how many are expected)."""
        counts = self._series.setdefault(series, [0, 0])
        counts[0] += 1
        counts[1] = max(counts)
        return counts

    @contextlib.contextmanager
    def item(self, series: str, name: str) -> Iterator[Phase]:
        counts = self.count(series)
        made = Phase(f"{series}, {counts[0]} of {counts[1]}: {name}")
        made.series = series
        with self.phase(made) as phase:
            yield phase

    def _tick(self) -> None:
        # Standard error may be closed meanwhile: then the load goes on without a word.
        with contextlib.suppress(OSError, ValueError):
            while not self._done.wait(_TICK_SECONDS):
                with self._lock:
                    if self._open:
                        self._display.tick(self._open)


_current: ContextVar[Progress | None] = ContextVar("progress", default=None)


@contextlib.contextmanager
def during(phase: Phase) -> Iterator[Phase]:
    """Work that takes a while, begun now; the caller advances it."""
    phase.began = time.monotonic()
    progress = _current.get()
    with progress.phase(phase) if progress else contextlib.nullcontext():
        yield phase


def phase(name: str, total: int = 0, unit: str = "") -> contextlib.AbstractContextManager[Phase]:
    """As `during`, of a new phase."""
    return during(Phase(name, total, unit))


@contextlib.contextmanager
def item(series: str, name: str) -> Iterator[None]:
    """One of a series of pieces of work that are done when they are needed."""
    progress = _current.get()
    with progress.item(series, name) if progress else contextlib.nullcontext():
        yield


def count(series: str) -> None:
    """An item of a series was done elsewhere."""
    if (progress := _current.get()) is not None:
        progress.count(series)


def expect(series: str, count: int) -> None:
    """So many more items of a series will probably be needed."""
    if (progress := _current.get()) is not None:
        progress.expect(series, count)


@contextlib.contextmanager
def shown(enabled: bool = True, say: Say | None = None, redraw: bool = True) -> Iterator[None]:
    """Show the phases that the `with` goes through: on a terminal as bars, else by `say`, which
    prints to standard error if it is not given. Inside another `shown`, that one goes on.

    redraw: False where another process draws on the same terminal; then there are no bars."""
    if not enabled or _current.get() is not None or sys.stderr is None:  # as under pythonw
        yield
        return
    on_terminal = redraw and can_redraw(sys.stderr)
    display: Display = Bars() if on_terminal else Lines(say or _print)
    with Progress(display) as progress, _logs_above() if on_terminal else contextlib.nullcontext():
        token = _current.set(progress)
        try:
            yield
        finally:
            _current.reset(token)


def _logs_above() -> contextlib.AbstractContextManager[None]:
    """The log's lines go above the bar, if a log has been set up."""
    if not logging.getLogger("octavo").handlers:
        return contextlib.nullcontext()
    from tqdm.contrib.logging import logging_redirect_tqdm

    redirect: contextlib.AbstractContextManager[None] = logging_redirect_tqdm(
        [logging.getLogger("octavo")]
    )
    return redirect


def columns(stream: TextIO) -> int:
    """The width of the terminal that `stream` is; some say that theirs is 0."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
