"""How much memory there is for the KV cache, and how that was computed.

    budget = memory x share - already used - peak of one full step

Where the figures come from is the device's business.
"""

from dataclasses import dataclass
from typing import Protocol

GIB = 2**30


class DeviceMemory(Protocol):
    """A device's memory now, in bytes."""

    @property
    def total(self) -> int:
        """What this process could have at most."""
        ...

    @property
    def free(self) -> int:
        """What nobody uses now."""
        ...

    @property
    def used(self) -> int:
        """What this process uses now."""
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
