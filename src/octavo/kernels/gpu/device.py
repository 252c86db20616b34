"""GPUs as devices, and the interpreter: `runner.device.Device` over Triton kernels.

`interpret` is the path of a GPU over tensors in host memory, its kernels run by Triton's
interpreter and its graphs replayed as Python: far too slow to serve, and made for tests.
"""

import contextlib
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import cached_property

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kernels.capture import CapturedRun
from octavo.kernels.dispatch import Ops
from octavo.kernels.gpu import cards, fused_call, graph, memory, sampling_call, uploads
from octavo.kernels.gpu.experts_call import GpuModelProducts
from octavo.kernels.gpu.memory import GpuMemory
from octavo.kernels.gpu.staging import Staging, copies_of
from octavo.kernels.gpu.uploads import Uploads
from octavo.kernels.sampling import Items, Logprobs

# The most rows of each tile of the products, and one more; a single row has strides of its own.
WARM_UP_SIZES = (1, 16, 64, 65)


class _TritonDevice:
    """What GPUs and the interpreter have in common."""

    name: str
    torch_device: str
    _device: torch.device
    shares_host_memory = False
    pads_steps = True
    runs_ahead = True
    attention_order: Sequence[str] = cards.ATTENTION_ORDER
    quantization: Sequence[str] = cards.QUANTIZATION
    keeps_blocks = False
    warm_up_sizes: Sequence[int] = ()
    _graph_sizes: Sequence[int]
    dtypes: Collection[torch.dtype] = cards.DTYPES
    _piece = uploads.PIECE

    def start(self) -> None:
        """Nothing is compiled beside the load: see `warm_up_sizes`."""

    def warm_up(self) -> None:
        """The steps of `warm_up_sizes` have compiled everything."""

    def loading(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def ops(self, dtype: torch.dtype) -> Ops:
        return Ops.of(fused_call, "Triton kernels")

    def products(self, dtype: torch.dtype, max_rows: int, deterministic: bool) -> GpuModelProducts:
        return GpuModelProducts(dtype, deterministic)

    def uploads(self) -> Uploads:
        """See `models.loader.UploadingDevice.uploads`."""
        return Uploads(copies_of(self._device), self._piece)

    def decode_blocks(self, name: str, count: int, raw: torch.Tensor, out: torch.Tensor) -> bool:
        return False

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.torch_device)

    def capture_sizes(self, max_tokens: int) -> Sequence[int]:
        return graph.capture_sizes(max_tokens, self._graph_sizes)

    def copy_blocks(
        self,
        blocks: Sequence[tuple[int, int]],
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
    ) -> None:
        memory.copy_blocks(blocks, sources, targets)

    def make_current(self) -> None:
        """Nothing, where there is one device."""

    def synchronize(self) -> None:
        """Nothing runs beside the host."""

    def is_out_of_memory(self, error: Exception) -> bool:
        return memory.is_out_of_memory(error)

    @cached_property
    def _staging(self) -> Staging:
        return Staging(copies_of(self._device))

    def tensor(self, name: str, array: NDArray[np.generic]) -> torch.Tensor:
        """See `runner.device.Device.tensor`."""
        return self.tensors(name, [array])[0]

    def tensors(self, name: str, arrays: Sequence[NDArray[np.generic]]) -> tuple[torch.Tensor, ...]:
        """See `runner.device.DrawsAhead.tensors`.

        It is what a step needs first, so here the GPU is also made the current one of this
        thread, for Triton launches on that.
        """
        self.make_current()
        return self._staging.send(name, arrays)

    def fetch(self, tensor: torch.Tensor) -> Callable[[], NDArray[np.int64]]:
        """See `runner.device.DrawsAhead.fetch`."""
        return self._staging.fetch(tensor)

    def launch_draws(self, logits: torch.Tensor, items: Items) -> torch.Tensor:
        """See `runner.device.DrawsAhead.launch_draws`."""
        return sampling_call.submit(self.tensor, logits, items)

    def launch_logprobs(
        self, logits: torch.Tensor, items: Items, drawn: torch.Tensor | None = None
    ) -> Callable[[], Logprobs]:
        """See `runner.device.DrawsAhead.launch_logprobs`."""
        found = self.fetch(sampling_call.submit_logprobs(self.tensor, logits, items, drawn))
        return lambda: sampling_call.unpacked(found(), items)

    def take_drawn(self, token_ids: torch.Tensor, drawn: torch.Tensor) -> None:
        """See `runner.device.DrawsAhead.take_drawn`."""
        sampling_call.take_drawn(token_ids, drawn)

    def draw(self, logits: torch.Tensor, items: Items) -> None:
        sampling_call.draw(self.tensor, logits, items)

    def logprobs(self, logits: torch.Tensor, items: Items) -> Logprobs:
        return sampling_call.logprobs(self.tensor, logits, items)

    def edited(
        self,
        logits: torch.Tensor,
        rows: NDArray[np.int64],
        closed: NDArray[np.bool_],
        edits: Items,
    ) -> torch.Tensor:
        return sampling_call.edited(self.tensor, logits, rows, closed, edits)


class CudaDevice(_TritonDevice):
    """An NVIDIA GPU of compute capability 8.0 or newer."""

    warm_up_sizes: Sequence[int] = WARM_UP_SIZES

    def __init__(self, config: EngineConfig) -> None:
        self.name = self.torch_device = config.device
        self._device = cards.card(config.device)
        cards.check_kv(self._device, config.kv_cache_dtype)
        torch.cuda.set_device(self._device)
        self._graph_sizes = config.graph_sizes
        self._graphs = graph.CudaGraphs()
        self._copies = memory.BlockCopies(self._device)

    def default_dtype(self) -> torch.dtype:
        return cards.DEFAULT_DTYPE

    def memory(self) -> GpuMemory:
        return memory.measure(self._device)

    def peak_of(self, step: Callable[[], object]) -> int:
        return memory.peak_of(self._device, step)

    def products(self, dtype: torch.dtype, max_rows: int, deterministic: bool) -> GpuModelProducts:
        return GpuModelProducts(dtype, deterministic, cards.converts_fp8(self._device))

    def release(self) -> None:
        torch.cuda.empty_cache()

    def host_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Pinned, so that copies run beside the GPU's work."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def capture(self, run: Callable[[], torch.Tensor]) -> CapturedRun:
        return self._graphs.capture(run)

    def copy_blocks(
        self,
        blocks: Sequence[tuple[int, int]],
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
    ) -> None:
        self._copies(blocks, sources, targets)

    def make_current(self) -> None:
        torch.cuda.set_device(self._device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


class InterpretDevice(_TritonDevice):
    """The interpreter. Raises ConfigError unless Triton was imported with TRITON_INTERPRET=1."""

    name = "interpret"
    torch_device = "cpu"
    _device = torch.device("cpu")
    _piece = 4096

    def __init__(self, config: EngineConfig) -> None:
        if not triton.knobs.runtime.interpret:
            raise ConfigError(
                "device 'interpret' needs the environment variable TRITON_INTERPRET=1 at the start "
                "of the process"
            )
        self._graph_sizes = config.graph_sizes

    def default_dtype(self) -> torch.dtype:
        """The interpreter multiplies no bfloat16."""
        return torch.float32

    def memory(self) -> GpuMemory:
        """That of a small GPU."""
        return GpuMemory(total=2**31, free=2**31 - 2**28, used=2**28)

    def peak_of(self, step: Callable[[], object]) -> int:
        step()
        return 2**26

    def release(self) -> None:
        """Nothing is kept."""

    def host_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def capture(self, run: Callable[[], torch.Tensor]) -> CapturedRun:
        return graph.ReplayedPython(run)
