"""What the control groups of this process allow: processors and memory.

A limit may be set on the process's own group or on any above it, in hierarchies of version 1 and
2, which may both be mounted. A container sees a part of the tree: its own group, under the path
that it has outside, or as the root.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc/self")
_UNLIMITED = 2**62  # version 1 writes "no limit" as a number near 2**63
_V1_QUOTA = ("cpu.cfs_quota_us", "cpu.cfs_period_us")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Of one group, in bytes. used: what its processes hold and the system cannot take back."""

    limit: int
    used: int

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used)


@dataclass(frozen=True, slots=True)
class Throttling:
    """Of a group's quota: periods in which its processes ran, and those that were cut short."""

    periods: int
    throttled: int


def processor_quota() -> float | None:
    """Processors' worth of time that this process may use; None where no group limits it."""
    found = []
    for group in _groups("cpu"):
        words = _text(group / "cpu.max").split()
        words = words or [_text(group / name).strip() for name in _V1_QUOTA]
        quota, period = (_whole(word) for word in [*words, "", ""][:2])
        if quota and period:
            found.append(quota / period)
    return min(found, default=None)


def throttling() -> Throttling | None:
    """Of the group whose quota cut most periods short; None where no group counts them."""
    tables = [_table(group / "cpu.stat") for group in _groups("cpu")]
    found = [
        Throttling(table["nr_periods"], table["nr_throttled"])
        for table in tables
        if "nr_periods" in table and "nr_throttled" in table
    ]
    return max(found, key=lambda one: one.throttled, default=None)


def memory_limits() -> list[MemoryLimit]:
    """Of this process's group and of those above it, as far as they have a limit."""
    return [limit for group in _groups("memory") if (limit := _memory_limit(group)) is not None]


def _memory_limit(group: Path) -> MemoryLimit | None:
    if (group / "memory.limit_in_bytes").exists():
        stat = _table(group / "memory.stat")
        limits = [
            _whole(_text(group / "memory.limit_in_bytes")),
            stat.get("hierarchical_memory_limit"),  # of groups above, which may not be visible
        ]
        usage, prefix = _whole(_text(group / "memory.usage_in_bytes")), "total_"
    else:
        limits = [_whole(_text(group / name)) for name in ("memory.max", "memory.high")]
        usage, prefix = _whole(_text(group / "memory.current")), ""
        stat = _table(group / "memory.stat") if any(limits) else {}
    known = [limit for limit in limits if limit is not None and limit < _UNLIMITED]
    if not known:
        return None
    # The lists of file pages, not "cache" or "file", which count shared memory too.
    files = sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
    return MemoryLimit(min(known), max(0, (usage or 0) - files - stat.get("slab_reclaimable", 0)))


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's group and of those above it, where `controller` may be."""
    own = dict(_own_paths())
    for root, mount, controllers in _mounts():
        name = controller if controller in controllers else ""
        if name in own and (name or not controllers):
            inside = _below(own[name], root)
            yield from (mount / path for path in (inside, *inside.parents))


def _own_paths() -> Iterator[tuple[str, str]]:
    """(controller, path of this process's group); "" stands for version 2."""
    for line in _text(_PROC / "cgroup").splitlines():
        _, names, path = line.split(":", 2)
        yield from ((name, path) for name in names.split(","))


def _mounts() -> Iterator[tuple[str, Path, frozenset[str]]]:
    """(path of the group that is mounted, where, its controllers: none for version 2)."""
    for line in _text(_PROC / "mountinfo").splitlines():
        front, _, back = line.partition(" - ")
        _, _, _, root, where, *_ = front.split(" ")
        kind, _, options = back.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            controllers = options.split(",") if kind == "cgroup" else []
            yield _unescaped(root), Path(_unescaped(where)), frozenset(controllers)


def _below(path: str, root: str) -> Path:
    """`path` as seen from `root`; where it lies elsewhere, the root itself is all that is seen."""
    try:
        inside = Path(path).relative_to(root)
    except ValueError:
        return Path()
    return Path() if ".." in inside.parts else inside


def _unescaped(text: str) -> str:
    return text.replace(r"\040", " ").replace(r"\011", "\t").replace(r"\134", "\\")


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _whole(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _table(file: Path) -> dict[str, int]:
    rows = (line.split() for line in _text(file).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}
