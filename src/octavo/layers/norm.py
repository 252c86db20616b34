"""RMS norms: one over the hidden size, fused with the residual sum; one over each head."""

import torch

from octavo.kernels.dispatch import Ops


class RMSNorm:
    """y = x / rms(x) * weight. `weight` [H]."""

    __slots__ = ("_eps", "_op", "_weight")

    def __init__(self, ops: Ops, weight: torch.Tensor, eps: float) -> None:
        self._op = ops.rms_norm
        self._weight = weight
        self._eps = eps

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, H] -> (norm of x + residual, x + residual); residual is updated in place."""
        return self._op(x, self._weight, self._eps, residual)


class HeadNorm:
    """Norm of each head of x [T, heads, head_dim], in place. `weight` [head_dim]."""

    __slots__ = ("_eps", "_op", "_weight")

    def __init__(self, ops: Ops, weight: torch.Tensor, eps: float) -> None:
        self._op = ops.head_norm
        self._weight = weight
        self._eps = eps

    def forward(self, x: torch.Tensor) -> None:
        self._op(x, self._weight, self._eps)
