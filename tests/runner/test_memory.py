"""The memory sum, and what limits it."""

import mmap

from octavo.runner import memory
from octavo.runner.memory import GIB, MemorySum


def test_the_sum_is_its_terms():
    found = MemorySum(total=16 * GIB, limit=14 * GIB, used=3 * GIB, step_peak=GIB)
    assert found.budget == 10 * GIB
    said = found.explain()
    for term in ("14.00", "16.00", "3.00", "1.00", "10.00"):
        assert term in said


def test_the_share_and_what_is_free_both_limit():
    half, whole = memory.measure(0.5, 0), memory.measure(1.0, 0)
    assert 0 < half.limit <= half.total // 2 + 1
    assert half.limit < whole.limit <= whole.total


def test_a_cgroup_limit_counts(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("1073741824\n")
    (tmp_path / "memory.current").write_text("73741824\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    found = memory.measure(1.0, 0)
    assert found.total == 2**30
    assert found.limit - found.used <= 10**9
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.measure(1.0, 0).total > 2**30


def test_the_peak_is_seen():
    memory.reset_peak()
    before = memory.resident_bytes()
    with mmap.mmap(-1, 64_000_000) as fresh:  # what the allocator holds already would not show
        fresh.write(b"x" * len(fresh))
    assert memory.peak_bytes() - before > 50_000_000
