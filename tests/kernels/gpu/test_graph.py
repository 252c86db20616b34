"""The ladder of captures, and the stand-in for a CUDA graph."""

from collections.abc import Callable

import pytest
import torch

from octavo.kernels.capture import CaptureError
from octavo.kernels.gpu.graph import ReplayedPython, capture_sizes


def test_sizes_rise_to_the_largest_step() -> None:
    assert list(capture_sizes(300))[:6] == [1, 2, 4, 8, 16, 32]
    assert capture_sizes(300)[-1] == 256
    assert capture_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert capture_sizes(1) == [1]
    assert capture_sizes(100, (3, 7, 200)) == [3, 7, 100]


def test_a_replay_reads_static_memory_and_the_python_values_of_the_capture() -> None:
    static, number = torch.zeros(4), [1.0]
    captured = number[0]
    run = ReplayedPython(lambda: static + captured)
    static += 5
    number[0] = 9.0
    assert torch.equal(run.replay(3), torch.full((3,), 6.0))


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x * float(x.sum()),
        lambda x: x[: int(x.argmax())],
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: x.unique(),
        lambda x: x.new_tensor(x.tolist()),
    ],
)
def test_what_a_real_capture_forbids_is_refused(
    run: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = torch.ones(4)
    with pytest.raises(CaptureError, match="reads device memory from the host"):
        ReplayedPython(lambda: run(x))
