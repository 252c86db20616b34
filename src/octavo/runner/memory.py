"""The memory budget of the KV cache, and how it was computed.

    budget = memory x share - already used - peak of one full step

The figures come from the device.
"""

from dataclasses import dataclass
from typing import Protocol

GIB = 2**30


class DeviceMemory(Protocol):
    """The current state of a device's memory, in bytes."""

    @property
    def total(self) -> int:
        """The most that this process may use."""
        ...

    @property
    def free(self) -> int:
        """Unused memory."""
        ...

    @property
    def used(self) -> int:
        """Memory that this process uses."""
        ...


@dataclass(frozen=True, slots=True)
class MemorySum:
    """The terms, in bytes. `limit` is total x share, or `used` plus the share of what is free,
    whichever is less."""

    total: int
    limit: int
    used: int
    step_peak: int

    @staticmethod
    def of(memory: DeviceMemory, share: float, step_peak: int) -> "MemorySum":
        limit = min(int(memory.total * share), memory.used + int(memory.free * share))
        return MemorySum(memory.total, limit, memory.used, step_peak)

    @property
    def budget(self) -> int:
        return self.limit - self.used - self.step_peak

    def explain(self) -> str:
        return (
            f"{self.limit / GIB:.2f} GiB usable of {self.total / GIB:.2f} "
            f"- {self.used / GIB:.2f} in use (weights, program) "
            f"- {self.step_peak / GIB:.2f} for a full step = {self.budget / GIB:.2f} GiB"
        )
