"""What only the machine itself shows: limits of control groups, pressure, memory.

Facts of the command that asks. They are the server's where both run on one machine, and in one
container, if any. Nothing is judged here.
"""

import os
from pathlib import Path

import msgspec

from octavo import cgroup, topology

_PROC = Path("/proc")


class Machine(msgspec.Struct, frozen=True):
    """processors, cores: that this process may use. quota: processors' worth of time of its
    control group. periods, throttled: of the quota, and how many were cut short. cpu_pressure,
    memory_pressure: percent of the last 10 s in which some task waited for a processor, or for
    memory. memory_limit, memory_used: of the control group that is nearest to its limit.
    memory_total, memory_available: of the machine. None for what the system does not tell.
    """

    processors: int | None = None
    cores: int | None = None
    quota: float | None = None
    periods: int | None = None
    throttled: int | None = None
    cpu_pressure: float | None = None
    memory_pressure: float | None = None
    memory_limit: int | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    memory_available: int | None = None


def read_machine(proc: Path = _PROC) -> Machine:
    """As it is now."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    throttling = cgroup.throttling()
    limits = [limit for limit in cgroup.memory_limits() if limit.limit]
    fullest = max(limits, key=lambda limit: limit.used / limit.limit, default=None)
    memory = _memory(proc)
    return Machine(
        processors=len(allowed) if allowed else None,
        cores=topology.count_cores(allowed) if allowed else None,
        quota=cgroup.processor_quota(),
        periods=throttling.periods if throttling else None,
        throttled=throttling.throttled if throttling else None,
        cpu_pressure=_pressure(proc, "cpu"),
        memory_pressure=_pressure(proc, "memory"),
        memory_limit=fullest.limit if fullest else None,
        memory_used=fullest.used if fullest else None,
        memory_total=memory.get("MemTotal"),
        memory_available=memory.get("MemAvailable"),
    )


def _pressure(proc: Path, what: str) -> float | None:
    """The kernel's pressure stall information, which older ones do not have."""
    for line in _text(proc / "pressure" / what).splitlines():
        kind, *pairs = line.split()
        if kind == "some":
            return float(dict(pair.split("=") for pair in pairs)["avg10"])
    return None


def _memory(proc: Path) -> dict[str, int]:
    rows = (line.split() for line in _text(proc / "meminfo").splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3}


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
