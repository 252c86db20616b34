"""The memory budget of the KV cache, and how it was computed.

    budget = memory x share - already used - peak of one full step - captured steps

The figures come from the device. What the budget is divided into is `runner.sizing`'s part.
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
class PartOfMemory:
    """What one of several ranks, or engines, may take of the memory that they share."""

    total: int
    free: int
    used: int

    @classmethod
    def of(cls, memory: DeviceMemory, parts: int, left: float) -> DeviceMemory:
        """One of `parts`; what is free suffices for `left` of them."""
        if parts == 1:
            return memory
        return cls(memory.total // parts, int(memory.free / left), memory.used)


def shown(count: int) -> str:
    """Bytes in a message."""
    for unit, name in ((GIB, "GiB"), (2**20, "MiB")):
        if abs(count) >= unit / 10:
            return f"{count / unit:.2f} {name}"
    return f"{count / 1024:.2f} KiB"


@dataclass(frozen=True, slots=True)
class MemorySum:
    """The terms, in bytes. `limit` is total x share, or `used` plus the share of what is free and
    not `promised` to other engines, whichever is less. captured: of captured steps, where they
    have memory of their own."""

    total: int
    limit: int
    used: int
    step_peak: int
    promised: int = 0
    captured: int = 0

    @staticmethod
    def of(
        memory: DeviceMemory, share: float, step_peak: int, promised: int = 0, captured: int = 0
    ) -> "MemorySum":
        free = max(0, memory.free - promised)
        limit = min(int(memory.total * share), memory.used + int(free * share))
        return MemorySum(memory.total, limit, memory.used, step_peak, promised, captured)

    @property
    def budget(self) -> int:
        return self.limit - self.used - self.step_peak - self.captured

    def explain(self) -> str:
        others = f", {shown(self.promised)} promised to other engines" if self.promised else ""
        captured = f"- {shown(self.captured)} for captured steps " if self.captured else ""
        return (
            f"{shown(self.limit)} usable of {shown(self.total)}{others} "
            f"- {shown(self.used)} in use (weights, program) "
            f"- {shown(self.step_peak)} for a full step {captured}= {shown(self.budget)}"
        )
