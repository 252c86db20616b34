"""Which function serves an op on a device in a dtype, and why."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from octavo.kernels import reference
from octavo.kernels.cpu import fused_call as cpu_ops
from octavo.kernels.cpu import target

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Ops:
    """The ops of a device and dtype; signatures and meaning as in `kernels.reference`."""

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float, torch.Tensor | None], Pair]
    head_norm: Callable[[torch.Tensor, torch.Tensor, float], None]
    add: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    rope: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor], None]
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor]
    gelu_and_mul: Callable[[torch.Tensor], torch.Tensor]
    reason: str

    def explain(self) -> dict[str, str]:
        """For each op, the function that serves it and why it was chosen."""
        chosen = {n: getattr(self, n) for n in self.__slots__ if n != "reason"}
        return {n: f"{f.__module__}.{f.__qualname__}: {self.reason}" for n, f in chosen.items()}


def select(device: str, dtype: torch.dtype) -> Ops:
    """The fastest ops there are for `device` ("cpu", "cuda:0") and `dtype`; never fails.

    What has no kernel of its own runs the torch reference, and `explain` says so.
    """
    if device.partition(":")[0] == "cpu" and dtype in cpu_ops.DTYPES:
        return _cpu(dtype)
    return _reference(f"there are no kernels for {device} in {dtype}")


def _cpu(dtype: torch.dtype) -> Ops:
    ops = cpu_ops.CpuOps(dtype)
    return Ops(
        rms_norm=ops.rms_norm,
        head_norm=ops.head_norm,
        add=ops.add,
        rope=ops.rope,
        silu_and_mul=ops.silu_and_mul,
        gelu_and_mul=ops.gelu_and_mul,
        reason=f"compiled kernels for {dtype} on {target.cpu()[0]}",
    )


def _reference(reason: str) -> Ops:
    return Ops(
        rms_norm=reference.rms_norm,
        head_norm=reference.head_norm,
        add=reference.add,
        rope=reference.rope,
        silu_and_mul=reference.silu_and_mul,
        gelu_and_mul=reference.gelu_and_mul,
        reason=reason,
    )
