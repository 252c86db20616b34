"""Logger set-up, and the only reader of the environment.

Environment variables never change what is computed: they only say where files go, how loud
the log is, and hold secrets that must not stand on a command line. One, oneDNN's own, makes this
processor stand for an older one, of which the last bits are then those.
"""

import logging
import os
import sys
from pathlib import Path

from octavo.errors import ConfigError

_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


def get_logger(name: str) -> logging.Logger:
    """A logger below `octavo`. Quiet until `configure` is called, as a library should be."""
    return logging.getLogger(name if name.startswith("octavo") else f"octavo.{name}")


def configure(level: str | None = None, default: str = "info") -> None:
    """Send Octavo's log to stderr. `level` defaults to OCTAVO_LOG_LEVEL, then to `default`."""
    root = logging.getLogger("octavo")
    root.setLevel((level or os.environ.get("OCTAVO_LOG_LEVEL") or default).upper())
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
        root.addHandler(handler)
        root.propagate = False


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


def instruction_limit() -> str:
    """ONEDNN_MAX_CPU_ISA: the most that oneDNN may use of the processor, as "AVX2"; '' for all."""
    return os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()


def threads_from_environment() -> str | None:
    """OMP_NUM_THREADS, which OpenMP reads itself; None where nobody set it."""
    return os.environ.get("OMP_NUM_THREADS") or None


def api_key_from_environment() -> str | None:
    """OCTAVO_API_KEY, so that the key need not stand in the process list."""
    return os.environ.get("OCTAVO_API_KEY") or None


def environment_for_child(**usual: str) -> dict[str, str]:
    """What a child process inherits, and `usual` where that says nothing."""
    return {**usual, **os.environ}
