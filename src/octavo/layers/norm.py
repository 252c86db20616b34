"""Norms: of a hidden row fused with the residual sum, of each head, of a whole projected row."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from octavo.dist.base import Group
from octavo.kernels.dispatch import Ops

# RMS norm, or LayerNorm, which also subtracts the mean.
NormKind = Literal["rms", "layer"]


@dataclass(frozen=True, slots=True)
class NormSpec:
    """How a norm is computed.

    offset: added to the stored weight (Gemma: 1). Such a weight is kept in float32, so that
    1 + w does not lose the last bits of w. cast_first: the normed row is rounded to the model's
    dtype before the multiplication by the weight, not only after it.
    """

    eps: float
    kind: NormKind = "rms"
    offset: float = 0.0
    bias: bool = False
    cast_first: bool = False


class RMSNorm:
    """y = x / rms(x) * weight, x being the residual sum. `weight` [H].

    scale: factor of what is added to the residual (Granite).
    """

    __slots__ = ("_add", "_cast_first", "_eps", "_op", "_scale", "_weight")

    def __init__(self, ops: Ops, weight: torch.Tensor, spec: NormSpec, scale: float = 1.0) -> None:
        self._op, self._add = ops.rms_norm, ops.add
        self._weight, self._eps, self._scale = weight, spec.eps, scale
        self._cast_first = spec.cast_first

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, H] -> (norm of x + residual, x + residual); residual is updated in place."""
        if self._scale != 1.0 and residual is not None:
            x, residual = self._add(x, residual, self._scale), None
        return self._op(x, self._weight, self._eps, residual, self._cast_first)


class LayerNorm:
    """As RMSNorm, of LayerNorm: the mean is subtracted, and there may be a bias [H]."""

    __slots__ = ("_add", "_bias", "_eps", "_scale", "_weight")

    def __init__(
        self,
        ops: Ops,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        scale: float = 1.0,
    ) -> None:
        self._add = ops.add
        self._weight, self._bias, self._eps, self._scale = weight, bias, eps, scale

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As RMSNorm.forward."""
        if residual is not None:
            x = self._add(x, residual, self._scale)
        return F.layer_norm(x, x.shape[-1:], self._weight, self._bias, self._eps), x


class HeadNorm:
    """RMS norm of each head of x [T, heads, head_dim], in place. `weight` [head_dim]."""

    __slots__ = ("_op", "cast_first", "eps", "weight")

    def __init__(self, ops: Ops, weight: torch.Tensor, spec: NormSpec) -> None:
        self._op = ops.head_norm
        self.weight, self.eps, self.cast_first = weight, spec.eps, spec.cast_first

    def forward(self, x: torch.Tensor) -> None:
        self._op(x, self.weight, self.eps, self.cast_first)


class RowNorm:
    """RMS norm of all heads of a token together, x [T, heads, head_dim], in place (OLMo 2).

    weight: [heads * head_dim].
    """

    __slots__ = ("_cast_first", "_eps", "_op", "_weight")

    def __init__(self, ops: Ops, weight: torch.Tensor, spec: NormSpec) -> None:
        self._op = ops.row_norm
        self._weight, self._eps, self._cast_first = weight, spec.eps, spec.cast_first

    def forward(self, x: torch.Tensor) -> None:
        self._op(x, self._weight, self._eps, self._cast_first)


class DividedRowNorms:
    """RowNorm of queries and keys whose heads are divided among the ranks of a group: the mean of
    squares is that of the whole row, and one sum over the ranks serves both.

    query, key: the weights of this rank's heads. Where ranks hold copies of the same heads, all
    heads have equally many, so the mean is the same.
    """

    __slots__ = ("_cast_first", "_eps", "_group", "_norm", "_squares", "_weights")

    def __init__(
        self, ops: Ops, group: Group, query: torch.Tensor, key: torch.Tensor, spec: NormSpec
    ) -> None:
        self._squares, self._norm = ops.row_squares, ops.divided_row_norm
        self._group, self._weights = group, (query, key)
        self._eps, self._cast_first = spec.eps, spec.cast_first

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> None:
        """[T, heads, head_dim] of this rank's heads, in place."""
        squares = self._group.all_reduce(self._squares(query, key))
        for column, (x, weight) in enumerate(zip((query, key), self._weights, strict=True)):
            count = len(weight) * self._group.size
            self._norm(x, weight, squares, column, count, self._eps, self._cast_first)
