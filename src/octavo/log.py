"""Logger set-up, and the only reader of the environment.

Environment variables never change what is computed: they only say where files go, how loud
the log is, and hold secrets that must not stand on a command line. One, oneDNN's own, makes this
processor stand for an older one, of which the last bits are then those. docs/deploy.md lists all.

Each record is one line, whatever it holds: control characters in a message are shown as escapes,
so that no text from outside can write a line of its own.
"""

import json
import logging
import os
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from octavo.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error", "critical")
FORMATS = ("text", "json")
_BRIEF = "brief"  # the format of commands that a person runs: as text, without the date
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


def get_logger(name: str) -> logging.Logger:
    """A logger below `octavo`. Quiet until `configure` is called, as a library should be."""
    return logging.getLogger(name if name.startswith("octavo") else f"octavo.{name}")


def configure(
    level: str | None = None,
    default: str = "info",
    form: str | None = None,
    usual: str = _BRIEF,
    prefix: str = "",
) -> None:
    """Send Octavo's log to stderr.

    level: else OCTAVO_LOG_LEVEL, else `default`. form: text, json or brief, else
    OCTAVO_LOG_FORMAT, else `usual`. prefix: of each message, in a process of several that share
    stderr. Raises ConfigError for a variable with another value.
    """
    root = logging.getLogger("octavo")
    found = level or _from_environment("OCTAVO_LOG_LEVEL", LEVELS) or default
    root.setLevel(found.upper())
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_TextFormatter(_BRIEF))
        root.addHandler(handler)
        root.propagate = False
    form = form or _from_environment("OCTAVO_LOG_FORMAT", (*FORMATS, _BRIEF)) or usual
    for own in _own_handlers():
        own.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter(form))
        if prefix:
            own.addFilter(_Prefix(prefix))


def mark_lines(mark: str) -> None:
    """Which of several processes with one log a line is from: before its message, or as the member
    `source` of JSON lines."""
    for own in _own_handlers():
        assert isinstance(own.formatter, _TextFormatter | _JsonFormatter)
        own.formatter.mark = mark


def one_line(text: str) -> str:
    """`text` with control characters, line breaks among them, as escapes such as `\\n`."""
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


class _Prefix(logging.Filter):
    """Puts a prefix before each message."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = f"{self._prefix}{record.getMessage()}", ()
        return True


class _TextFormatter(logging.Formatter):
    """One line a record; a trace is indented below it."""

    def __init__(self, form: str) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(name)s: %(message)s")
        self.form = form
        self.mark = ""

    def formatTime(  # noqa: N802 - the names of logging
        self, record: logging.LogRecord, datefmt: str | None = None
    ) -> str:
        if self.form == _BRIEF:
            return f"{datetime.fromtimestamp(record.created):%H:%M:%S}"
        return _date(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        mark = f"{self.mark}: " if self.mark else ""
        record.message = mark + one_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        lines = super().formatException(ei).splitlines()
        return "\n".join(f"  {one_line(line)}" for line in lines)


class _JsonFormatter(logging.Formatter):
    """One JSON object per line. A record's `fields` (given as `extra`) become members of it."""

    form = "json"
    mark = ""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _date(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            **({"source": self.mark} if self.mark else {}),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _date(record: logging.LogRecord) -> str:
    """ISO 8601 with milliseconds, in local time with its offset from UTC."""
    when = datetime.fromtimestamp(record.created).astimezone()
    return when.isoformat(timespec="milliseconds")


def _own_handlers() -> list[logging.Handler]:
    """What `configure` made, as opposed to an application's own handlers."""
    found = logging.getLogger("octavo").handlers
    return [h for h in found if isinstance(h.formatter, _TextFormatter | _JsonFormatter)]


def _from_environment(name: str, known: tuple[str, ...]) -> str | None:
    value = os.environ.get(name, "").lower()
    if value and value not in known:
        raise ConfigError(f"{name} must be one of {', '.join(known)}, not {value!r}")
    return value or None


def can_redraw(stream: TextIO) -> bool:
    """Whether `stream` is a terminal on which a line can be written over (TERM=dumb cannot).

    Not where the log is JSON, whose readers take every line for an object.
    """
    terminal = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return terminal and not is_json()


def is_json() -> bool:
    """Whether `configure` made a log of JSON lines."""
    return any(isinstance(handler.formatter, _JsonFormatter) for handler in _own_handlers())


def cache_dir() -> Path:
    """The user's cache folder for models and compiled kernels (not created here).

    Raises ConfigError for a user who has no home folder.
    """
    if (found := find_cache_dir()) is None:
        raise ConfigError(
            "there is no cache folder: HOME is not set and this user has no home; set "
            "OCTAVO_CACHE_DIR to a folder"
        )
    return found


def find_cache_dir() -> Path | None:
    """`cache_dir`, or None where there is none, for what works without one."""
    if own := os.environ.get("OCTAVO_CACHE_DIR"):
        return Path(own)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "octavo"
    try:
        return Path.home() / ".cache" / "octavo"
    except RuntimeError:  # no HOME, and no entry in the user database
        return None


def find_runtime_dir() -> Path | None:
    """Where engines of this user leave word for each other: OCTAVO_RUNTIME_DIR, else a folder in
    the cache; None where there is none."""
    if own := os.environ.get("OCTAVO_RUNTIME_DIR"):
        return Path(own)
    cache = find_cache_dir()
    return None if cache is None else cache / "engines"


def instruction_limit() -> str:
    """ONEDNN_MAX_CPU_ISA: the most that oneDNN may use of the processor, as "AVX2"; '' for all."""
    return os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()


def threads_from_environment() -> str | None:
    """OMP_NUM_THREADS, which OpenMP reads itself; None where it is not set."""
    return os.environ.get("OMP_NUM_THREADS") or None


def visible_gpus() -> list[str] | None:
    """CUDA_VISIBLE_DEVICES, which CUDA reads itself: indices or ids; None where it is not set."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if given is None else [part.strip() for part in given.split(",") if part.strip()]


def api_keys_from_environment() -> tuple[str, ...]:
    """OCTAVO_API_KEY, else vLLM's VLLM_API_KEY, so that a key need not stand in the process list.

    Raises ConfigError for one that is empty: a secret that did not arrive must not open a server.
    """
    for name in ("OCTAVO_API_KEY", "VLLM_API_KEY"):
        if (key := os.environ.get(name)) is not None:
            if not key:
                raise ConfigError(f"{name} is set and empty; unset it to serve without a key")
            return (key,)
    return ()


def terminal_abilities() -> tuple[bool, bool]:
    """What TERM and NO_COLOR say: whether the cursor can be moved, and whether to use colours."""
    moves = os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    return moves, moves and not os.environ.get("NO_COLOR")


def environment_for_child(**usual: str) -> dict[str, str]:
    """What a child process inherits, and `usual` where that says nothing.

    A child logs as this process does, also where that was set by flags. Of a program that has not
    set up Octavo's log it logs what the program's own logging would show.
    """
    settings = settings_for_child()
    if not _own_handlers():
        return {**settings, **usual, **os.environ}
    return {**usual, **os.environ, **settings}


def settings_for_child() -> dict[str, str]:
    """The variables that make a process, here or elsewhere, log as this one does."""
    shown = logging.getLevelName(logging.getLogger("octavo").getEffectiveLevel()).lower()
    settings = {"OCTAVO_LOG_LEVEL": shown} if shown in LEVELS else {}
    for handler in _own_handlers():
        settings["OCTAVO_LOG_FORMAT"] = getattr(handler.formatter, "form", _BRIEF)
    return settings


def ray_address_from_environment() -> str | None:
    """RAY_ADDRESS, which Ray reads itself; None where it is not set."""
    return os.environ.get("RAY_ADDRESS") or None


def openai_key_from_environment() -> str | None:
    """OPENAI_API_KEY, with which `octavo bench serve` asks other servers."""
    return os.environ.get("OPENAI_API_KEY") or None
