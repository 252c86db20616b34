"""The machine's memory: cgroup limits, and the peak of a step."""

import mmap

from octavo.kernels.cpu import memory


def test_what_is_free_and_used_lies_within_the_total():
    found = memory.measure()
    assert 0 < found.used < found.total
    assert 0 < found.free <= found.total <= memory.installed_bytes()


def test_a_cgroup_limit_counts(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("1073741824\n")
    (tmp_path / "memory.current").write_text("73741824\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    found = memory.measure()
    assert found.total == 2**30
    assert found.free <= 10**9
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.measure().total > 2**30


def test_the_peak_of_a_step_is_seen():
    def step():
        with mmap.mmap(-1, 64_000_000) as fresh:  # the allocator may hold some already
            fresh.write(b"x" * len(fresh))

    assert 50_000_000 < memory.peak_of(step) < 200_000_000
    assert memory.peak_of(lambda: None) < 10_000_000
