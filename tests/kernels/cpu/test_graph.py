"""Recorded calls of kernels: replayed for other rows, in buffers that share memory."""

import numpy as np
import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.cpu import fused_call as cpu_ops
from octavo.kernels.cpu import kernel as recorder
from octavo.kernels.cpu import openmp
from octavo.kernels.cpu.graph import Graph, _share

OPS = cpu_ops.CpuOps(torch.float32)
WEIGHT = torch.linspace(0.5, 1.5, 48)


def steps(x, residual):
    """Six norms: some buffers can share memory, `residual` cannot."""
    for _ in range(3):
        x, residual = OPS.rms_norm(x, WEIGHT, 1e-5, residual)
        x, residual = OPS.rms_norm(x, WEIGHT, 1e-5, residual)
    return x


def record(rows):
    given = torch.randn(rows, 48)
    with recorder.record() as recording:
        first, residual = OPS.rms_norm(given, WEIGHT, 1e-5)
        result = steps(first, residual)
    return Graph(recording, given, result)


@pytest.mark.parametrize("threads", [1, 2])
def test_it_replays_for_any_number_of_rows(threads, monkeypatch):
    monkeypatch.setattr(openmp, "threads", lambda: threads)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        graph = record(40)
        for rows in (1, 8, 9, 40, 3):
            x = torch.randn(rows, 48)
            graph.given[:rows] = x
            first, residual = reference.rms_norm(x, WEIGHT, 1e-5)
            expected = residual.clone()
            out = first
            for _ in range(6):
                out, expected = reference.rms_norm(out, WEIGHT, 1e-5, expected)
            torch.testing.assert_close(graph.replay(rows), out, rtol=1e-5, atol=1e-6)
    finally:
        torch.set_num_threads(before)


def test_what_was_recorded_can_be_freed():
    """The graph has its own memory: later tensors do not change its results."""
    graph = record(16)
    x = torch.randn(16, 48)
    graph.given[:] = x
    first = graph.replay(16).clone()
    noise = [torch.full((16, 48), float("nan")) for _ in range(200)]
    graph.given[:] = x
    assert torch.equal(graph.replay(16), first)
    del noise


def test_a_call_of_undeclared_arguments_is_refused():
    x = torch.randn(4, 48)
    with recorder.record() as recording:
        out, _ = OPS.rms_norm(x, WEIGHT, 1e-5)
    recording.calls.append((recorder.Kernel("sampling:draw"), bytes(96)))
    with pytest.raises(ValueError, match="sampling:draw has no declared arguments"):
        Graph(recording, x, out)


def test_calls_of_different_heights_are_refused():
    x, other = torch.randn(4, 48), torch.randn(5, 48)
    with recorder.record() as recording:
        OPS.rms_norm(other, WEIGHT, 1e-5)
        out, _ = OPS.rms_norm(x, WEIGHT, 1e-5)
    with pytest.raises(ValueError, match="different numbers of rows"):
        Graph(recording, x, out)


def test_nothing_is_recorded_outside():
    with recorder.record() as recording:
        pass
    OPS.rms_norm(torch.randn(4, 48), WEIGHT, 1e-5)
    assert not recording.calls
    assert not recording.buffers


def test_buffers_in_use_at_once_never_overlap():
    random = np.random.default_rng(0)
    for _ in range(50):
        count = int(random.integers(1, 40))
        first = random.integers(0, 60, count)
        last = first + random.integers(0, 20, count)
        sizes = random.integers(1, 5000, count)
        offsets, total = _share(first, last, sizes)
        assert all(offset % 64 == 0 for offset in offsets)
        assert (offsets + sizes).max() <= total
        for i in range(count):
            for j in range(i):
                apart = last[i] < first[j] or last[j] < first[i]
                clear = offsets[i] + sizes[i] <= offsets[j] or offsets[j] + sizes[j] <= offsets[i]
                assert apart or clear


def test_memory_is_used_again():
    first, sizes = np.arange(30), np.full(30, 640)
    assert _share(first, first + 1, sizes)[1] == 2 * 640
