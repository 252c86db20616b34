"""Facts about machine and code that every saved row records. Standard library only."""

import datetime
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
_ROOT = Path(__file__).parent.parent
_STARTED = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def facts() -> dict[str, Any]:
    """Run, date, version, commit, processor, cores, memory, Python, and the command line.

    run: when this process started; the rows of one run share it.
    """
    return {
        "run": _STARTED,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "version": _version(),
        "commit": commit(),
        "device": cpu_name(),
        "features": cpu_features(),
        "cores": usable_cores(),
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "python": platform.python_version(),
        "command": command_line(),
    }


def commit() -> str:
    """The short commit, with a + when the work tree differs from it; '' outside git."""
    head = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks")
    return head + ("+" if head and changed else "")


def cpu_name() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    return found.group(1) if found else platform.processor() or platform.machine()


def cpu_features() -> list[str]:
    """Which of the instruction sets that matter here the processor has."""
    found = re.search(r"^flags\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    flags = set(found.group(1).split()) if found else set()
    return [name for name in _FEATURES if name in flags]


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def command_line() -> str:
    """How this measurement was started, without any machine's paths."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    program = f"python -m {spec.name}" if spec else Path(sys.argv[0]).name
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return " ".join([program, *words])


def _version() -> str:
    text = (_ROOT / "src/octavo/version.py").read_text()
    found = re.search(r'__version__ = "(.+)"', text)
    return found.group(1) if found else ""


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", *words], cwd=_ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
