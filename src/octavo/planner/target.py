"""The device of a plan: this machine's, a card by name, or one that is described."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from octavo import hardware
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.hardware import Card
from octavo.kernels.gpu import cards, graph
from octavo.models.loader import QuantizingDevice
from octavo.runner.device import ComputesIn, create_device
from octavo.runner.memory import PartOfMemory
from octavo.runner.promises import Promises

# Estimates of what a program takes beside weights, in bytes. On a CPU: the interpreter, torch and
# compiled kernels; on a GPU: the driver's context and kernels, which it counts as not free.
CPU_PROGRAM = 324 * 2**20
GPU_CONTEXT = 600 * 2**20
# Devices of this machine, as `octavo.devices` names them.
HERE = ("auto", "cpu", "cuda")


class PlannedDevice(QuantizingDevice, ComputesIn, Protocol):
    """What of a device its memory depends on: `runner.device.Device` has all of it."""

    @property
    def torch_device(self) -> str: ...

    @property
    def attention_order(self) -> Sequence[str]: ...

    @property
    def shares_host_memory(self) -> bool: ...

    def capture_sizes(self, max_tokens: int) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class CardDevice:
    """A GPU that need not be here."""

    graph_sizes: tuple[int, ...] = ()
    name: str = "cuda"
    torch_device: str = "cuda"
    shares_host_memory: bool = False
    attention_order: Sequence[str] = cards.ATTENTION_ORDER
    quantization: Collection[str] = cards.QUANTIZATION
    keeps_blocks: bool = False
    dtypes: Collection[torch.dtype] = cards.DTYPES

    def default_dtype(self) -> torch.dtype:
        """See ComputesIn."""
        return cards.DEFAULT_DTYPE

    def capture_sizes(self, max_tokens: int) -> Sequence[int]:
        """See PlannedDevice."""
        return graph.capture_sizes(max_tokens, self.graph_sizes)


@dataclass(frozen=True, slots=True)
class Target:
    """A device and its memory. label: for people; before: its memory without the model.

    promised: to other engines of this machine. is_measured: `before` is as it is now, not as it
    was described.
    """

    label: str
    device: PlannedDevice
    before: PartOfMemory
    promised: int = 0
    is_measured: bool = False
    check: Callable[[EngineConfig], None] = field(default=lambda config: None)

    def after(self, loaded: int) -> PartOfMemory:
        """The memory once weights of `loaded` bytes are there, of one rank."""
        memory = self.before
        return PartOfMemory(memory.total, max(0, memory.free - loaded), memory.used + loaded)


def target(config: EngineConfig, name: str, memory: int | None) -> Target:
    """The device called `name`. memory: its bytes, where they are given, which `described` needs.

    Raises ConfigError.
    """
    if name in HERE:
        return _here(config.with_(device=name), memory)
    if name == hardware.DESCRIBED:
        if memory is None:
            raise ConfigError("a described device needs --memory, such as --memory 40GiB")
        card = Card("the described device", memory, capability=cards.OLDEST_FP8)
    else:
        card = hardware.find(name)
    return _of_card(config, card, memory)


def _here(config: EngineConfig, memory: int | None) -> Target:
    device = create_device(config)
    found = device.memory()
    shares = device.shares_host_memory
    if memory is not None:
        used = CPU_PROGRAM if shares else 0
        free = memory - (used if shares else GPU_CONTEXT)
        before = PartOfMemory(memory, max(0, free), used)
        return Target(f"{device.name} with the memory given", device, before)
    # The engine's process has compiled kernels and more that this one lacks.
    more = max(0, CPU_PROGRAM - found.used) if shares else 0
    before = PartOfMemory(found.total, max(0, found.free - more), found.used + more)
    others = Promises.of_user().others() if shares else []
    promised = sum(other.outstanding for other in others)
    return Target(f"this machine ({device.name})", device, before, promised, is_measured=True)


def _of_card(config: EngineConfig, card: Card, memory: int | None) -> Target:
    total = card.memory if memory is None else memory
    before = PartOfMemory(total, max(0, total - GPU_CONTEXT), 0)
    device = CardDevice(config.graph_sizes)

    def check(changed: EngineConfig) -> None:
        cards.check_kv_of(card.name, card.capability, changed.kv_cache_dtype)

    given = memory is not None and memory != card.memory
    label = f"{card.name} with the memory given" if given else card.name
    return Target(label, device, before, check=check)
