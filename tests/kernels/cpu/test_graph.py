"""Recorded calls of kernels: replayed for other rows, in buffers that share memory."""

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.capture import CaptureError
from octavo.kernels.cpu import graph, kernel, openmp
from octavo.kernels.cpu.fused_call import CpuOps

OPS = CpuOps(torch.float32)
WEIGHT = torch.linspace(0.5, 1.5, 48)


def steps(x, residual):
    """Six norms: some buffers can share memory, `residual` cannot."""
    for _ in range(3):
        x, residual = OPS.rms_norm(x, WEIGHT, 1e-5, residual)
        x, residual = OPS.rms_norm(x, WEIGHT, 1e-5, residual)
    return x


def captured(rows):
    """(the input, what replays): the input is read where it lies."""
    given = torch.randn(rows, 48)

    def run():
        # The first norm reads `given` and leaves it as it is.
        first, _ = OPS.rms_norm(given, WEIGHT, 1e-5)
        second, _ = OPS.rms_norm(first, WEIGHT, 1e-5)
        return steps(second, first)

    return given, graph.capture(run)


def expected(x):
    first, _ = reference.rms_norm(x, WEIGHT, 1e-5)
    out, residual = reference.rms_norm(first, WEIGHT, 1e-5)[0], first.clone()
    for _ in range(6):
        out, residual = reference.rms_norm(out, WEIGHT, 1e-5, residual)
    return out


@pytest.mark.parametrize("threads", [1, 2])
def test_it_replays_for_any_number_of_rows(threads, monkeypatch):
    monkeypatch.setattr(openmp, "threads", lambda: threads)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        given, run = captured(40)
        for rows in (1, 8, 9, 40, 3):
            x = torch.randn(rows, 48)
            given[:rows] = x
            torch.testing.assert_close(run.replay(rows), expected(x), rtol=1e-5, atol=1e-6)
    finally:
        torch.set_num_threads(before)


def test_it_has_memory_of_its_own():
    """Later tensors do not change its results."""
    given, run = captured(16)
    given[:] = torch.randn(16, 48)
    first = run.replay(16).clone()
    noise = [torch.full((16, 48), float("nan")) for _ in range(200)]
    assert torch.equal(run.replay(16), first)
    del noise


def test_freed_memory_is_used_again():
    with kernel.record() as recording:
        x = steps(torch.randn(16, 48), None)
    assert recording.pool.num_bytes <= 3 * 16 * 48 * 4
    del x


def test_what_torch_computes_is_refused():
    x = torch.randn(4, 48)
    with pytest.raises(CaptureError, match="add has no capturable kernel"):
        graph.capture(lambda: OPS.rms_norm(x, WEIGHT, 1e-5)[0] + 1)


def test_nothing_is_computed_while_it_is_recorded():
    out = torch.full((4, 48), 7.0)
    with kernel.record() as recording:
        OPS.rms_norm(torch.randn(4, 48), WEIGHT, 1e-5, out)
    assert len(recording.calls) == 1
    assert (out == 7).all()


def test_a_call_of_undeclared_arguments_is_refused():
    x = torch.randn(4, 48)
    with kernel.record() as recording:
        out, _ = OPS.rms_norm(x, WEIGHT, 1e-5)
    recording.calls.append((kernel.Kernel("sampling:draw"), bytes(96)))
    with pytest.raises(CaptureError, match="sampling:draw has no declared arguments"):
        graph.Graph(recording, out)


def test_calls_of_different_heights_are_refused():
    x, other = torch.randn(4, 48), torch.randn(5, 48)

    def run():
        OPS.rms_norm(other, WEIGHT, 1e-5)
        return OPS.rms_norm(x, WEIGHT, 1e-5)[0]

    with pytest.raises(CaptureError, match="different numbers of rows"):
        graph.capture(run)


def test_nothing_is_recorded_outside():
    with kernel.record() as recording:
        pass
    OPS.rms_norm(torch.randn(4, 48), WEIGHT, 1e-5)
    assert not recording.calls
    assert not recording.pool.num_bytes


def test_threads_that_may_not_all_run_capture_nothing(monkeypatch):
    assert graph.capture_sizes(1000) == (256,)
    assert graph.capture_sizes(30) == (30,)
    monkeypatch.setattr(openmp.team(), "is_exact", lambda threads: False)
    assert graph.capture_sizes(30) == ()
