"""Torch tensors in, torch tensors out: the callers of the compiled CPU kernels.

Signatures and meaning are those of `reference`. Inputs of another dtype, or not contiguous within a
row, fall back to the reference. Rows are distributed over threads from about 16 thousand values
on: below, one thread finishes before a second one has started.
"""

import functools

import torch

from octavo.kernels import reference
from octavo.kernels.cpu import abi, openmp, target
from octavo.kernels.cpu.kernel import FLOAT_NAMES, Kernel, address, empty, kernel

CODES = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
DTYPES = tuple(FLOAT_NAMES)
_PARALLEL_FROM = 16384  # values
_pack_norm = abi.RMS_NORM.packer()
_pack_squares = abi.ROW_SQUARES.packer()
_pack_divided = abi.DIVIDED_ROW_NORM.packer()
_pack_add = abi.ADD.packer()
_pack_activation = abi.ACTIVATION.packer()
_pack_rope = abi.ROPE_WRITE.packer()


def _share(rows: int, values: int) -> tuple[int, int]:
    """(threads, rows claimed at a time) for `rows` rows of `values` values."""
    if rows == 1 or rows * values < _PARALLEL_FROM:
        return 1, rows
    threads = min(openmp.threads(), rows)
    return threads, max(1, rows // (threads * 4)) if threads > 1 else rows


def usual(dtype: torch.dtype) -> list[Kernel]:
    """What almost every model in `dtype` calls, in the order of a step."""
    name = FLOAT_NAMES[dtype]
    declared = ((abi.RMS_NORM, name), (abi.ROPE_WRITE, name), (abi.ACTIVATION, f"silu-{name}"))
    return [kernel(arguments, variant) for arguments, variant in declared]


class CpuOps:
    """The fused kernels of one dtype."""

    __slots__ = ("_gelu", "_itemsize", "_norm", "_norms", "_silu", "dtype")

    def __init__(self, dtype: torch.dtype) -> None:
        name = FLOAT_NAMES[dtype]
        self.dtype, self._itemsize = dtype, dtype.itemsize
        self._norms = {  # by the weight's dtype, and whether normed rows are rounded first
            (weight, cast): kernel(abi.RMS_NORM, name + _norm_flags(dtype, weight, cast))
            for weight in {dtype, torch.float32}
            for cast in (False, True)
        }
        self._norm = self._norms[dtype, False]
        self._silu = kernel(abi.ACTIVATION, f"silu-{name}")
        self._gelu = kernel(abi.ACTIVATION, f"gelu-{name}")

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None = None,
        cast_first: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `reference.rms_norm`."""
        dtype = self.dtype
        if weight.dtype is dtype and not cast_first:  # as in most models
            norm: Kernel | None = self._norm
        else:
            norm = self._norms.get((weight.dtype, cast_first))
        if norm is None or not (x.dtype is dtype and x.is_contiguous() and weight.is_contiguous()):
            return reference.rms_norm(x, weight, eps, residual, cast_first)
        if residual is not None and not (residual.dtype is dtype and residual.is_contiguous()):
            return reference.rms_norm(x, weight, eps, residual, cast_first)
        rows, size = x.shape
        out = empty((rows, size), dtype)
        threads, chunk = _share(rows, size)
        stride = size * self._itemsize
        arguments = _pack_norm(
            rows=rows, chunk=chunk, x=address(x), x_stride=stride,
            residual=0 if residual is None else address(residual), weight=address(weight),
            out=address(out), out_stride=stride, size=size, eps=eps,
        )  # fmt: skip
        norm.run(arguments, threads)
        return out, x if residual is None else residual

    def row_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, cast_first: bool = False
    ) -> None:
        """See `reference.row_norm`."""
        if not (self._fits(x) and self._takes(weight)):
            reference.row_norm(x, weight, eps, cast_first)
            return
        rows, size = x.shape[0], x.shape[1] * x.shape[2]
        threads, chunk = _share(rows, size)
        stride = x.stride(0) * self._itemsize
        arguments = _pack_norm(
            rows=rows, chunk=chunk, x=address(x), x_stride=stride, residual=0,
            weight=address(weight), out=address(x), out_stride=stride, size=size, eps=eps,
        )  # fmt: skip
        self._norms[weight.dtype, cast_first].run(arguments, threads)

    def row_squares(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """See `reference.row_squares`."""
        if not (self._fits(query) and self._fits(key)):
            return reference.row_squares(query, key)
        rows = query.shape[0]
        out = empty((rows, 2), torch.float32)
        for column, x in enumerate((query, key)):
            size = x.shape[1] * x.shape[2]
            threads, chunk = _share(rows, size)
            arguments = _pack_squares(
                rows=rows, chunk=chunk, x=address(x), x_stride=x.stride(0) * self._itemsize,
                out=address(out) + 4 * column, size=size,
            )  # fmt: skip
            kernel(abi.ROW_SQUARES, FLOAT_NAMES[self.dtype]).run(arguments, threads)
        return out

    def divided_row_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        squares: torch.Tensor,
        column: int,
        count: int,
        eps: float,
        cast_first: bool = False,
    ) -> None:
        """See `reference.divided_row_norm`."""
        if not (self._fits(x) and self._takes(weight) and squares.is_contiguous()):
            reference.divided_row_norm(x, weight, squares, column, count, eps, cast_first)
            return
        rows, size = x.shape[0], x.shape[1] * x.shape[2]
        threads, chunk = _share(rows, size)
        arguments = _pack_divided(
            rows=rows, chunk=chunk, x=address(x), x_stride=x.stride(0) * self._itemsize,
            weight=address(weight), squares=address(squares) + 4 * column, size=size, count=count,
            eps=eps,
        )  # fmt: skip
        variant = FLOAT_NAMES[self.dtype] + _norm_flags(self.dtype, weight.dtype, cast_first)
        kernel(abi.DIVIDED_ROW_NORM, variant).run(arguments, threads)

    def _takes(self, weight: torch.Tensor) -> bool:
        return weight.is_contiguous() and weight.dtype in (self.dtype, torch.float32)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `reference.silu_and_mul`."""
        return self._activation(self._silu, gate_up)

    def gelu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `reference.gelu_and_mul`."""
        return self._activation(self._gelu, gate_up)

    def _activation(self, activation: Kernel, gate_up: torch.Tensor) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = empty((rows, size), self.dtype)
        threads, chunk = _share(rows, 2 * size)
        arguments = _pack_activation(
            rows=rows, chunk=chunk, x=address(gate_up), out=address(out), size=size
        )
        activation.run(arguments, threads)
        return out

    def add(self, x: torch.Tensor, residual: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """See `reference.add`."""
        tensors = (x, residual)
        if not all(t.is_contiguous() and t.dtype == self.dtype for t in tensors):
            return reference.add(x, residual, scale)
        rows, size = x.shape
        threads, chunk = _share(rows, size)
        arguments = _pack_add(
            rows=rows, chunk=chunk, x=address(x), residual=address(residual), size=size,
            scale=scale,
        )  # fmt: skip
        kernel(abi.ADD, FLOAT_NAMES[self.dtype]).run(arguments, threads)
        return residual

    def rope(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """See `reference.rope`."""
        if not (self._fits(q) and (k is None or self._fits(k))):
            reference.rope(q, k, cos_sin, positions)
            return
        rope_write(q, k, k, cos_sin, positions)

    def head_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, cast_first: bool = False
    ) -> None:
        """See `reference.head_norm`."""
        if not (self._fits(x) and self._takes(weight)):
            reference.head_norm(x, weight, eps, cast_first)
            return
        flags = _norm_flags(x.dtype, weight.dtype, cast_first)
        rope_write(x, None, None, None, None, q_norm=weight, eps=eps, norm_flags=flags)

    def _fits(self, x: torch.Tensor) -> bool:
        return x.dtype == self.dtype and in_rows(x)


def in_rows(x: torch.Tensor) -> bool:
    """Whether each token of x [tokens, heads, head_dim] is contiguous."""
    _, heads, head_dim = x.shape
    _, head_stride, stride = x.stride()
    return stride == 1 and (head_stride == head_dim or heads == 1)


def rope_write(
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor | None,
    cache: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    block_size: int = 1,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    norm_flags: str = "",
) -> None:
    """Head norms, rope, cache write: whatever is given, in one pass (see `fused.rope_write`).

    Every q, k, v [tokens, heads, head_dim] must satisfy `in_rows` and have one dtype, which the
    cache takes (see `reads`). norm_flags: those of `_norm_flags`, if there is no cache.
    """
    some = q if q is not None else k
    assert some is not None
    tokens, _, head_dim = some.shape
    size = some.itemsize
    heads = q_at = q_stride = kv_heads = k_at = k_stride = v_at = v_stride = half = angles = 0
    if q is not None:
        heads, q_at, q_stride = q.shape[1], address(q), q.stride(0) * size
    if k is not None:
        kv_heads, k_at, k_stride = k.shape[1], address(k), k.stride(0) * size
    if v is not None:
        v_at, v_stride = address(v), v.stride(0) * size
    if cos_sin is not None:
        half, angles = cos_sin.shape[1] // 2, address(cos_sin)
    threads, chunk = _share(tokens, (heads + 2 * kv_heads) * head_dim)
    arguments = _pack_rope(
        rows=tokens, chunk=chunk, q=q_at, q_stride=q_stride, k=k_at, k_stride=k_stride, v=v_at,
        v_stride=v_stride, cos_sin=angles, half=half,
        positions=0 if positions is None else address(positions),
        cache=0 if cache is None else address(cache), slots=0 if slots is None else address(slots),
        block_size=block_size, head_dim=head_dim, heads=heads, kv_heads=kv_heads,
        q_norm=0 if q_norm is None else address(q_norm),
        k_norm=0 if k_norm is None else address(k_norm), eps=eps,
    )  # fmt: skip
    if norm_flags:
        rope = kernel(abi.ROPE_WRITE, FLOAT_NAMES[some.dtype] + norm_flags)
    else:
        rope = _rope_write(some.dtype, some.dtype if cache is None else cache.dtype)
    rope.run(arguments, threads)


@functools.cache
def _rope_write(dtype: torch.dtype, kv_dtype: torch.dtype) -> Kernel:
    return kernel(abi.ROPE_WRITE, _variant(FLOAT_NAMES[dtype], dtype, kv_dtype))


def _norm_flags(dtype: torch.dtype, weight: torch.dtype, cast_first: bool) -> str:
    """The suffix after the dtype in the variant of a kernel with a norm."""
    wide = "-wide" if weight != dtype else ""
    return wide + ("-cast" if cast_first and dtype != torch.float32 else "")


def attention_kind(dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    """Variant of the attention kernel: "float32", "bfloat16" or "tiles"; "-int8" or "-fp8", or
    "-bfloat16" for queries in float32."""
    kind = "tiles" if dtype == torch.bfloat16 and target.has_tiles() else FLOAT_NAMES[dtype]
    return _variant(kind, dtype, kv_dtype)


def _variant(kind: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    if dtype == kv_dtype:
        return kind
    return f"{kind}-{CODES.get(kv_dtype) or FLOAT_NAMES[kv_dtype]}"


def reads(dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    """Whether queries, keys and values in `dtype` need no conversion for a cache of `kv_dtype`."""
    return kv_dtype in (dtype, torch.bfloat16, *CODES)
