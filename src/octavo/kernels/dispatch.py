"""The ops of a device and dtype: which function implements each, and why.

A device provides its own (`runner.device`); otherwise the torch reference is used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from octavo.kernels import reference

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Ops:
    """The ops of a device and dtype; signatures and meaning as in `kernels.reference`."""

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float, torch.Tensor | None, bool], Pair]
    head_norm: Callable[[torch.Tensor, torch.Tensor, float, bool], None]
    row_norm: Callable[[torch.Tensor, torch.Tensor, float, bool], None]
    row_squares: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    divided_row_norm: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, int, int, float, bool], None
    ]
    add: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    rope: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor], None]
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor]
    gelu_and_mul: Callable[[torch.Tensor], torch.Tensor]
    reason: str

    @staticmethod
    def of(source: Any, reason: str) -> "Ops":
        """The attributes of `source` that are named as the ops are."""
        return Ops(**{name: getattr(source, name) for name in OPS}, reason=reason)

    def explain(self) -> dict[str, str]:
        """For each op, the function that implements it and why it was chosen."""
        chosen = {name: getattr(self, name) for name in OPS}
        return {n: f"{f.__module__}.{f.__qualname__}: {self.reason}" for n, f in chosen.items()}


OPS = tuple(name for name in Ops.__slots__ if name != "reason")


def reference_ops(reason: str) -> Ops:
    """Plain torch for every op; `reason` is what `explain` says of it."""
    return Ops.of(reference, reason)
