"""How much memory there is for the KV cache, and how it was reckoned.

    budget = memory x share - already used - peak of one full step

On a CPU, memory is what the process may use: the machine's, or less where a cgroup limits it;
and never more than what is free now, because other programs live there too.
"""

import os
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemorySum:
    """The terms, in bytes. `limit` is total x share, or what is free now plus `used`."""

    total: int
    limit: int
    used: int
    step_peak: int

    @property
    def budget(self) -> int:
        return self.limit - self.used - self.step_peak

    def explain(self) -> str:
        return (
            f"{self.limit / GIB:.2f} GiB usable of {self.total / GIB:.2f} "
            f"- {self.used / GIB:.2f} in use (weights, program) "
            f"- {self.step_peak / GIB:.2f} for a full step = {self.budget / GIB:.2f} GiB"
        )


def measure(share: float, step_peak: int) -> MemorySum:
    """The memory sum of this process on a CPU."""
    total, free = _machine()
    used = resident_bytes()
    return MemorySum(total, min(int(total * share), used + int(free * share)), used, step_peak)


def installed_bytes() -> int:
    """Memory of the machine, whatever this process may use of it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """The highest resident memory since `reset_peak`, or since the start."""
    return _status_bytes("VmHWM")


def reset_peak() -> None:
    """Start measuring the peak anew, where the system allows it (Linux)."""
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
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, usage = _number(_CGROUP / limit_file), _number(_CGROUP / usage_file)
        if limit is not None and limit < total:
            total = limit
            free = min(free, limit - (usage or 0))
    return total, max(free, 0)


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


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
