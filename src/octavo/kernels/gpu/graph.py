"""Capture on a GPU: a ladder of CUDA graphs, and a stand-in for it without a GPU.

The stand-in runs the captured function again with the Python values that it had at capture, so
that only what is read from static memory is new: a step that reads a Python number instead gives
wrong tokens. While it captures, operations that a real capture forbids raise CaptureError.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.kernels.capture import CapturedRun, CaptureError

# Above this, kernels take longer than their launches.
_MAX_TOKENS = 256
_FINE = (1, 2, 4, 8)
_STEP = 16

# Operations that read device memory from the host, or whose shapes depend on it.
_FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero")
# Methods that copy to the host without an operation that a dispatch mode sees on a CPU.
_COPIES = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.item)


def capture_sizes(max_tokens: int, chosen: Sequence[int] = ()) -> Sequence[int]:
    """Those of `chosen` that fit; or 1, 2, 4, 8, and multiples of 16 up to 256 tokens."""
    sizes = chosen or (*_FINE, *range(_STEP, _MAX_TOKENS + 1, _STEP))
    return sorted({min(size, max_tokens) for size in sizes})


class CudaGraphs:
    """Captures on one GPU, in one memory pool: the graphs run one at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, run: Callable[[], torch.Tensor]) -> CapturedRun:
        """See StepCapture.capture."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # compiles kernels, and lets libraries allocate their workspaces
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                out = run()
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CaptureError(str(error).partition("\n")[0]) from error
        return _Graph(graph, out)


class _Graph:
    def __init__(self, graph: torch.cuda.CUDAGraph, out: torch.Tensor) -> None:
        self._graph, self._out = graph, out

    def replay(self, num_tokens: int) -> torch.Tensor:
        """See CapturedRun.replay."""
        self._graph.replay()
        return self._out[:num_tokens]


class ReplayedPython:
    """A capture without a GPU: `run` itself, run again."""

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        with _CaptureGuard(), _CopyGuard():  # type: ignore[no-untyped-call]
            run()
        self._run = run

    def replay(self, num_tokens: int) -> torch.Tensor:
        """See CapturedRun.replay."""
        return self._run()[:num_tokens]


class _CopyGuard(TorchFunctionMode):
    """As _CaptureGuard, for copies to the host."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _COPIES:
            raise CaptureError(f"{func.__name__} reads device memory from the host")
        return func(*args, **(kwargs or {}))


class _CaptureGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises CaptureError for an operation that a CUDA graph cannot contain."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        boolean_index = name in ("index", "index_put_", "index_put") and any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
            for index in args[1]
        )
        if name in _FORBIDDEN or boolean_index:
            raise CaptureError(f"{name} reads device memory from the host")
        return func(*args, **(kwargs or {}))
