"""The device interface: what the runner, the loader and the layers need of a device.

Everything that differs between a CPU and a GPU is behind it. The names of devices are in
`octavo.devices`. Attention backends are chosen separately (`attention.registry`), in the device's
order of preference.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from octavo import devices
from octavo.config import EngineConfig
from octavo.devices import OLDEST_GPU
from octavo.errors import ConfigError, triton_needed
from octavo.kernels.capture import StepCapture
from octavo.kernels.sampling import EditsLogits, Items, Logprobs, SamplingKernels
from octavo.models.loader import LoadingDevice
from octavo.runner.memory import DeviceMemory


class ComputesIn(Protocol):
    """The types in which a device computes."""

    @property
    def name(self) -> str:
        """As `octavo.devices` knows it."""
        ...

    @property
    def dtypes(self) -> Collection[torch.dtype]:
        """What weights and activations may be; any other dtype is computed in float32."""
        ...

    def default_dtype(self) -> torch.dtype:
        """What `dtype="auto"` stands for."""
        ...


@runtime_checkable
class Device(LoadingDevice, ComputesIn, SamplingKernels, StepCapture, Protocol):
    """One device of an engine.

    From `LoadingDevice` it inherits what a model is built with: `name`, `torch_device`,
    `attention_order`, `quantization`, `keeps_blocks`, `ops`, `products`, `decode_blocks`; from
    `SamplingKernels`, `draw` and `logprobs`; from `StepCapture`, `capture_sizes` and `capture`.
    """

    @property
    def shares_host_memory(self) -> bool:
        """Whether the device computes in host memory, so that a swap pool reduces its memory."""
        ...

    def start(self) -> None:
        """Start slow work that is needed last, such as compiling, in parallel with the load."""
        ...

    def warm_up(self) -> None:
        """Finish that work: no later request waits for a compiler."""
        ...

    def loading(self) -> AbstractContextManager[None]:
        """The context in which weights are loaded."""
        ...

    def memory(self) -> DeviceMemory:
        """The current state of the device's memory."""
        ...

    def peak_of(self, step: Callable[[], object]) -> int:
        """Run `step`; returns the peak increase of used memory, in bytes."""
        ...

    def release(self) -> None:
        """Return memory whose tensors are gone to the system; the device may be used again."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory on the device that lives as long as the engine."""
        ...

    def host_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory for copies from and to the device."""
        ...

    def tensor(self, name: str, array: NDArray[np.generic]) -> torch.Tensor:
        """An input of a step on the device; `array` is not changed while the step runs.

        name: the same for the same input of every step, so that a device can keep one buffer of
        fixed address for each. The tensor is valid until the next of that name.
        """
        ...


@runtime_checkable
class Accelerator(Device, Protocol):
    """Optional interface of a device with its own memory, which works beside the host.

    The KV of a block is one piece of memory there, if the backend takes strides; a full step is
    run to measure its memory; and a step that was out of memory is computed in parts.
    """

    @property
    def runs_ahead(self) -> bool:
        """Whether the next step is to be planned while the device computes one, by default."""
        ...

    @property
    def warm_up_sizes(self) -> Sequence[int]:
        """Numbers of tokens of steps that launch each kernel in each of its forms, which are
        run at start; none if nothing is compiled when it is first launched."""
        ...

    def copy_blocks(
        self,
        blocks: Sequence[tuple[int, int]],
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
    ) -> None:
        """target[b] = source[a] for each (a, b) of `blocks`, in order, and each pair of tensors.

        After the steps and copies before, and before those that follow; the host need not wait.
        """
        ...

    def make_current(self) -> None:
        """Let what this thread launches next run on this device."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""
        ...

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether `error` says that the device had too little memory."""
        ...


@runtime_checkable
class DrawsAhead(Accelerator, EditsLogits, Protocol):
    """Optional interface of an accelerator that draws, and takes the tokens as the next step's
    inputs, without the host, which reads results later. Nothing here waits for the device.
    """

    def tensors(self, name: str, arrays: Sequence[NDArray[np.generic]]) -> tuple[torch.Tensor, ...]:
        """As `tensor`, for the inputs that a step needs together."""
        ...

    def launch_draws(self, logits: torch.Tensor, items: Items) -> torch.Tensor:
        """`draw`: int64 [items, 2] on the device, `token` and `status` of each item."""
        ...

    def launch_logprobs(
        self, logits: torch.Tensor, items: Items, drawn: torch.Tensor | None = None
    ) -> Callable[[], Logprobs]:
        """`logprobs`, which the answer waits for. drawn: a result of `launch_draws`; the token of
        an item is then the number of its draw there."""
        ...

    def take_drawn(self, token_ids: torch.Tensor, drawn: torch.Tensor) -> None:
        """Replace -1 - i in `token_ids`, int64 [tokens], by the token of draw i of `drawn`, a
        result of `launch_draws`; by any token where the draw failed."""
        ...

    def fetch(self, tensor: torch.Tensor) -> Callable[[], NDArray[np.int64]]:
        """Begin to copy a contiguous int64 tensor to the host; the answer waits for it."""
        ...


def create_device(config: EngineConfig) -> Device:
    """The device that `config` names. Raises ConfigError if it is unknown or incomplete."""
    config = resolved(config)
    device = devices.create(config.device, config)
    if not isinstance(device, Device):
        members = {name for kind in Device.__mro__ for name in vars(kind) if name[0] != "_"}
        lacking = sorted(name for name in members if not hasattr(device, name))
        raise ConfigError(f"device {config.device!r} lacks {', '.join(lacking)}")
    if config.cuda_graph_sizes and not device.pads_steps:
        raise ConfigError(
            f"cuda_graph_sizes is for GPUs; one capture of device {device.name!r} serves steps of "
            "any size, so leave it out"
        )
    return device


def resolved(config: EngineConfig) -> EngineConfig:
    """`config` with the device that "auto" stands for."""
    return config.with_(device=_best()) if config.device == "auto" else config


def _best() -> str:
    """The first GPU that Octavo has kernels for, else the CPU."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability(0) >= OLDEST_GPU:
        return "cuda"
    return "cpu"


def cpu(config: EngineConfig) -> Device:
    """The processor and its memory."""
    from octavo.kernels.cpu.device import CpuDevice

    return CpuDevice(config)


def cuda(config: EngineConfig) -> Device:
    """An NVIDIA GPU. One that cannot be used is refused before Triton is found missing: a build of
    torch that can use it brings Triton."""
    from octavo.kernels.gpu import cards

    cards.check(cards.card(config.device))
    with triton_needed(f"device {config.device!r}"):
        from octavo.kernels.gpu.device import CudaDevice

    return CudaDevice(config)


def interpret(config: EngineConfig) -> Device:
    """The path of a GPU in Triton's interpreter, for tests."""
    with triton_needed(f"device {config.device!r}"):
        from octavo.kernels.gpu.device import InterpretDevice

    return InterpretDevice(config)
