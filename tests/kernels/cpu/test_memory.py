"""The machine's memory: cgroup limits, and the peak of a step."""

import mmap

from octavo import cgroup
from octavo.cgroup import MemoryLimit
from octavo.kernels.cpu import memory


def test_what_is_free_and_used_lies_within_the_total():
    found = memory.measure()
    assert 0 < found.used < found.total
    assert 0 < found.free <= found.total <= memory.installed_bytes()


def test_the_tightest_cgroup_counts(monkeypatch):
    limits = [MemoryLimit(2**30, 200_000_000), MemoryLimit(2**31, 2**31 - 300_000_000)]
    monkeypatch.setattr(cgroup, "memory_limits", lambda: limits)
    found = memory.measure()
    assert found.total == 2**30
    assert found.free == 300_000_000
    monkeypatch.setattr(cgroup, "memory_limits", lambda: [MemoryLimit(2**60, 2**59)])
    assert 2**30 < memory.measure().total <= memory.installed_bytes()


def test_the_peak_of_a_step_is_seen():
    def step():
        with mmap.mmap(-1, 64_000_000) as fresh:  # the allocator may hold some already
            fresh.write(b"x" * len(fresh))

    assert 50_000_000 < memory.peak_of(step) < 200_000_000
    assert memory.peak_of(lambda: None) < 10_000_000
