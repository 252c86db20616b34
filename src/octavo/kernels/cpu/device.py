"""The CPU as a device: `runner.device.Device` over the kernels and the memory of this machine."""

import contextlib
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.config import EngineConfig
from octavo.kernels.capture import CapturedRun
from octavo.kernels.cpu import (
    abi,
    fused_call,
    gemm_vectors_call,
    gguf_call,
    graph,
    huge_pages,
    memory,
    openmp,
    sampling_call,
    target,
)
from octavo.kernels.cpu.kernel import FLOAT_NAMES, Kernel, kernel, note_compiled
from octavo.kernels.cpu.linear import CpuProducts
from octavo.kernels.cpu.memory import MachineMemory
from octavo.kernels.cpu.quantize import INT4, INT8, STORED, W4A8, W8A8
from octavo.kernels.dispatch import Ops, reference_ops
from octavo.kernels.sampling import Items, Logprobs, Masks

# Types by the names that options have for them; without "auto", which is another one's.
_TYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}


class CpuDevice:
    """See `runner.device.Device`."""

    name = "cpu"
    torch_device = "cpu"
    shares_host_memory = True
    pads_steps = False
    attention_order: Sequence[str] = ("cpu", "torch")
    quantization: Sequence[str] = (INT8, INT4, W8A8, W4A8, STORED)
    dtypes: Collection[torch.dtype] = (torch.bfloat16, torch.float32)
    keeps_blocks = True

    def __init__(self, config: EngineConfig) -> None:
        self._huge_pages, self._weights = config.huge_pages, huge_pages.Arena()
        self._dtype, self._kv_dtype = config.dtype, config.kv_cache_dtype
        self._ranks = config.tensor_parallel_size
        openmp.check_fork()
        openmp.set_threads(config.threads)

    def start(self) -> None:
        """Compile kernels in processes beside this one.

        First attention, which takes as long as all that is needed before it, then those needed
        last; and with cores to spare what any model needs.
        """
        dtype = _TYPES.get(self._dtype, self.default_dtype())
        attention = fused_call.attention_kind(dtype, _TYPES.get(self._kv_dtype, dtype))
        last = [*sampling_call.kernels(), graph.program()]
        usual = fused_call.usual(dtype)
        if self._ranks > 1:
            usual.append(kernel(abi.ALL_REDUCE, FLOAT_NAMES[dtype]))
        Kernel.compile_ahead([kernel(abi.ATTENTION, attention), *last], usual)

    def warm_up(self) -> None:
        """Load the sampling kernels; all others have served the step that measured memory."""
        for wanted in sampling_call.kernels():
            wanted.load()

    def default_dtype(self) -> torch.dtype:
        """bfloat16 where the processor multiplies it in hardware, else float32."""
        return torch.bfloat16 if target.has_bf16() else torch.float32

    def ops(self, dtype: torch.dtype) -> Ops:
        """Compiled kernels; the reference for a dtype that has none."""
        if dtype not in fused_call.DTYPES:
            return reference_ops(f"there are no kernels for cpu in {dtype}")
        reason = f"compiled kernels for {dtype} on {target.cpu()[0]}"
        return Ops.of(fused_call.CpuOps(dtype), reason)

    def kept_dtypes(self, dtype: torch.dtype) -> Collection[torch.dtype]:
        """See `models.loader.KeepingDevice`."""
        return gemm_vectors_call.kept(dtype)

    def products(self, dtype: torch.dtype, max_rows: int, deterministic: bool) -> CpuProducts:
        allocate = self._weights.empty if self._huge_pages else None
        return CpuProducts(dtype, max_rows, deterministic, allocate)

    def decode_blocks(self, name: str, count: int, raw: torch.Tensor, out: torch.Tensor) -> bool:
        return gguf_call.decode(name, count, raw, out)

    def loading(self) -> AbstractContextManager[None]:
        """Put weights into huge pages, unless the configuration forbids it."""
        return huge_pages.loading(self._weights) if self._huge_pages else contextlib.nullcontext()

    def memory(self) -> MachineMemory:
        return memory.measure()

    def peak_of(self, step: Callable[[], object]) -> int:
        """Of the second time, where the first one compiled kernels: the compiler takes hundreds of
        megabytes, and no later step does. Ranks must run the same steps, so they measure once."""
        with note_compiled() as compiled:
            peak = memory.peak_of(step)
        return memory.peak_of(step) if compiled and self._ranks == 1 else peak

    def release(self) -> None:
        """The heap keeps what is freed (`huge_pages.prepare_heap`), so this says it explicitly."""
        huge_pages.trim_heap()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Reserved, not touched: the system maps a page when it is first written."""
        tensor = torch.empty(shape, dtype=dtype)
        if self._huge_pages:
            huge_pages.request(tensor)
        return tensor

    def host_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.empty(shape, dtype)

    def tensor(self, name: str, array: NDArray[np.generic]) -> torch.Tensor:
        """The array's own memory as a tensor, without a copy."""
        return torch.from_numpy(np.ascontiguousarray(array))

    def capture_sizes(self, max_tokens: int) -> Sequence[int]:
        return graph.capture_sizes(max_tokens)

    def capture(self, run: Callable[[], torch.Tensor]) -> CapturedRun:
        return graph.capture(run)

    def draw(self, logits: torch.Tensor, items: Items) -> None:
        sampling_call.draw(logits, items)

    def draw_masked(self, logits: torch.Tensor, items: Items, masks: Masks) -> None:
        sampling_call.draw(logits, items, masks)

    def copies(
        self,
        logits: torch.Tensor,
        rows: NDArray[np.int64],
        masks: Masks,
        out: NDArray[np.float32],
    ) -> None:
        sampling_call.copies(logits, rows, masks, out)

    def logprobs(self, logits: torch.Tensor, items: Items) -> Logprobs:
        return sampling_call.logprobs(logits, items)
