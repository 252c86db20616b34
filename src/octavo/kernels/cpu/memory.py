"""Memory of the machine as the CPU device's memory: what there is, what is free, what is used.

What this process may use is the machine's memory, or less where a cgroup limits it (`cgroup`); and
never more than what is free now, because other programs use the machine too. Page cache counts as
free: the system takes it back when memory is asked for.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo import cgroup


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """In bytes. total: what this process may have at most; used: its resident memory."""

    total: int
    free: int
    used: int


def measure() -> MachineMemory:
    """Memory now."""
    total, free = _machine()
    return MachineMemory(total, free, resident_bytes())


def peak_of(step: Callable[[], object]) -> int:
    """Bytes by which resident memory rose at its highest while `step` ran."""
    _reset_peak()
    before = resident_bytes()
    step()
    return max(0, _status_bytes("VmHWM") - before)


def installed_bytes() -> int:
    """Memory of the machine, whatever this process may use of it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    return _status_bytes("VmRSS")


def _reset_peak() -> None:
    """Restart the kernel's record of the highest resident memory, where it allows it (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _status_bytes(key: str) -> int:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _machine() -> tuple[int, int]:
    """(total, free) bytes, cgroup limits honoured."""
    total, free = _meminfo()
    for group in cgroup.memory_limits():
        total, free = min(total, group.limit), min(free, group.free)
    return total, free


def _meminfo() -> tuple[int, int]:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return _sysconf_memory()
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in text.splitlines()}
    return values["MemTotal"], values.get("MemAvailable", values["MemFree"])


def _sysconf_memory() -> tuple[int, int]:
    total = installed_bytes()
    return total, total // 2
