"""An attention layer over the paged cache: fused QKV product, rotary, cache write, attention."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from octavo.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec, HeadNorms
from octavo.kernels.dispatch import Ops
from octavo.layers.linear import Product
from octavo.layers.norm import DividedRowNorms, HeadNorm, RowNorm


@runtime_checkable
class RopeWriter(Protocol):
    """Optional interface of a backend: rotary embedding and cache write in one pass."""

    def rope_write(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos_sin: torch.Tensor,
        cache: torch.Tensor,
        meta: AttentionMetadata,
    ) -> None:
        """Rotate query and key in place by meta.positions; store key and value at meta.slots."""
        ...


@runtime_checkable
class NormRopeWriter(Protocol):
    """Optional interface of a RopeWriter: the norms of heads in the same pass."""

    def norm_rope_write(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        norms: HeadNorms,
        cos_sin: torch.Tensor,
        cache: torch.Tensor,
        meta: AttentionMetadata,
    ) -> None:
        """Norm the heads of query and key, then as `rope_write`."""
        ...


class Attention:
    """qkv: H -> (heads + 2 kv_heads) * head_dim, q first, then k, then v; output: back to H.

    cos_sin: as `layers.rope.cos_sin_table` makes it; None: no rotary embedding. query_cos_sin:
    that of the queries where it differs (temperature by position). q_norm, k_norm: norms
    before the rotary embedding, or None; row_norms: in place of both. sinks: [heads] where the
    spec says so.
    """

    __slots__ = (
        "_attend", "_cos_sin", "_k_norm", "_output", "_q_norm", "_qkv", "_query_cos_sin", "_rope",
        "_rope_write", "_row_norms", "_shape", "_sizes", "_write", "spec",
    )  # fmt: skip

    def __init__(
        self,
        ops: Ops,
        backend: AttentionBackend,
        spec: AttentionSpec,
        qkv: Product,
        output: Product,
        cos_sin: torch.Tensor | None,
        q_norm: HeadNorm | RowNorm | None = None,
        k_norm: HeadNorm | RowNorm | None = None,
        query_cos_sin: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        row_norms: DividedRowNorms | None = None,
    ) -> None:
        self.spec = spec
        self._sizes = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        self._shape = (-1, sum(self._sizes), spec.head_dim)
        self._qkv, self._output = qkv, output
        self._cos_sin, self._query_cos_sin = cos_sin, query_cos_sin
        self._q_norm, self._k_norm, self._row_norms = q_norm, k_norm, row_norms
        self._rope = ops.rope
        attend: Callable[..., torch.Tensor] = backend.attend
        self._write, self._attend = backend.write, attend
        if sinks is not None:
            self._attend = lambda *args: attend(*args, sinks)
        self._rope_write: Callable[..., None] | None = None
        if isinstance(backend, RopeWriter) and cos_sin is not None and query_cos_sin is None:
            self._rope_write = backend.rope_write
            if isinstance(backend, NormRopeWriter):
                self._norm_into(backend.norm_rope_write)

    def _norm_into(self, norm_rope_write: Callable[..., None]) -> None:
        """Leave norms of heads to `norm_rope_write`."""
        q, k = self._q_norm, self._k_norm
        if not (isinstance(q, HeadNorm) and isinstance(k, HeadNorm)):
            return
        if (q.eps, q.cast_first) == (k.eps, k.cast_first):
            norms = HeadNorms(q.weight, k.weight, q.eps, q.cast_first)
            self._q_norm = self._k_norm = None
            self._rope_write = lambda query, key, value, *rest: norm_rope_write(
                query, key, value, norms, *rest
            )

    def forward(
        self, x: torch.Tensor, meta: AttentionMetadata, cache: torch.Tensor
    ) -> torch.Tensor:
        """x [T, H] -> [T, H]; this step's keys and values are stored in `cache`."""
        query, key, value = torch.split_with_sizes(self._qkv(x).view(self._shape), self._sizes, 1)
        if self._q_norm is not None and self._k_norm is not None:
            self._q_norm.forward(query)
            self._k_norm.forward(key)
        elif self._row_norms is not None:
            self._row_norms.forward(query, key)
        if self._rope_write is not None and self._cos_sin is not None:
            self._rope_write(query, key, value, self._cos_sin, cache, meta)
        else:
            self._rotate(query, key, meta.positions)
            self._write(key, value, cache, meta)
        return self._output(self._attend(query, cache, meta, self.spec))

    def _rotate(self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor) -> None:
        if self._query_cos_sin is not None:
            self._rope(query, None, self._query_cos_sin, positions)
            if self._cos_sin is not None:
                self._rope(key, None, self._cos_sin, positions)
        elif self._cos_sin is not None:
            self._rope(query, key, self._cos_sin, positions)
