"""Huge pages are asked for, values survive the move, and nothing breaks where there are none."""

import mmap
import resource

import numpy as np
import pytest
import torch

from octavo.kernels.cpu import huge_pages


def huge_bytes():
    with open("/proc/self/smaps_rollup") as file:
        found = [line.split()[1] for line in file if line.startswith("AnonHugePages")]
    return int(found[0]) * 1024 if found else 0


def test_memory_moves_and_keeps_its_values():
    # Memory of its own: the heap may lie in huge pages already.
    memory = mmap.mmap(-1, 48 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    values = np.frombuffer(memory, np.int64)
    values[:] = np.arange(len(values))
    before = huge_bytes()
    moved = huge_pages.collapse()
    assert (values == np.arange(len(values))).all()
    if not huge_pages.available():
        assert moved == 0
        pytest.skip("this system gives no huge pages")
    if moved:  # a system may refuse when its memory is in pieces
        assert huge_bytes() - before > 0


def test_what_was_there_before_is_not_moved():
    held = [(10, 20), (30, 40), (50, 60)]
    found = huge_pages._without([(0, 5), (5, 35), (45, 70), (50, 60), (30, 45)], held)
    assert list(found) == [(0, 5), (5, 10), (20, 30), (45, 50), (60, 70), (40, 45)]


def test_a_tensor_may_be_asked_for_before_it_is_written():
    tensor = torch.empty(16_000_000)
    huge_pages.request(tensor)
    tensor.fill_(1)
    assert tensor.sum() == 16_000_000
    huge_pages.request(torch.empty(0))
    huge_pages.request(torch.empty(3))


def test_where_the_system_gives_none_nothing_is_done(monkeypatch, tmp_path):
    monkeypatch.setattr(huge_pages, "_SETTING", tmp_path / "absent")
    assert not huge_pages.available()
    assert huge_pages.collapse() == 0
    (tmp_path / "absent").write_text("always madvise [never]\n")
    assert not huge_pages.available()


def test_freed_memory_stays_and_is_used_again():
    if not huge_pages.prepare_heap():
        pytest.skip("not glibc")

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.zeros(6_000_000)  # 24 MB: by default mapped anew and unmapped each time
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    found = [faults() for _ in range(5)]
    assert min(found) < 100, found  # 24 MB have 5,860 pages of 4 KiB


def test_an_arena_gives_memory_that_overlaps_nothing(monkeypatch):
    monkeypatch.setattr(huge_pages, "_CHUNK", 1 << 16)
    arena = huge_pages.Arena()
    shapes = [(3,), (5, 7), (40_000,), (0,), (10_000,), (200_000,)]
    tensors = [arena.empty(shape, torch.int32).fill_(i) for i, shape in enumerate(shapes)]
    assert [tuple(tensor.shape) for tensor in tensors] == shapes
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(tensors))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
    places = arena.close()
    assert all(
        any(start <= tensor.data_ptr() < end for start, end in places)
        for tensor in tensors
        if tensor.numel()
    )
    assert arena.close() == []
