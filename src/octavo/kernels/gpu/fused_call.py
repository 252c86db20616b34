"""Torch tensors in, torch tensors out: the callers of the Triton kernels in `fused` and `cache`.

Signatures and meaning are those of `kernels.reference`, which also computes what is not contiguous
within a row.
"""

import torch
import triton

from octavo.kernels import reference
from octavo.kernels.gpu import cache, fused

# Heads that one program computes, and columns of one row.
_HEADS_AT_ONCE = 8
_COLUMNS = 1024
# Rows of a program in the interpreter, whose time is by operations, whatever their size.
_INTERPRETED = 64


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    cast_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.rms_norm`."""
    summed = x if residual is None else residual
    if not (x.stride(1) == summed.stride(1) == weight.stride(0) == 1):
        return reference.rms_norm(x, weight, eps, residual, cast_first)
    tokens, size = x.shape
    out = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    _norm(out, x, weight, eps, cast_first, 1, size, 0, residual)
    return out, summed


def head_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, cast_first: bool = False) -> None:
    """See `reference.head_norm`."""
    if x.stride(2) != 1 or not weight.is_contiguous():
        reference.head_norm(x, weight, eps, cast_first)
        return
    _norm(x, x, weight, eps, cast_first, x.shape[1], x.shape[2], x.stride(1))


def row_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, cast_first: bool = False) -> None:
    """See `reference.row_norm`."""
    if not (_in_rows(x) and weight.is_contiguous()):
        reference.row_norm(x, weight, eps, cast_first)
        return
    _norm(x, x, weight, eps, cast_first, 1, x.shape[1] * x.shape[2], 0)


# Of rows that ranks divide (OLMo 2): a few small kernels of torch.
row_squares, divided_row_norm = reference.row_squares, reference.divided_row_norm


def _norm(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cast_first: bool,
    heads: int,
    size: int,
    stride_head: int,
    residual: torch.Tensor | None = None,
) -> None:
    """`fused.rms_norm`: `heads` norms over `size` columns in each token of x."""
    if not len(x):
        return
    rows = len(x) * heads
    at_once = min(triton.next_power_of_2(heads), _HEADS_AT_ONCE) if x.is_cuda else _INTERPRETED
    summed = x if residual is None else residual
    fused.rms_norm[triton.cdiv(rows, at_once),](
        out, x, summed, weight, out.stride(0), x.stride(0), summed.stride(0), stride_head,
        eps, rows, HEADS=heads, ROWS=at_once, ADDS=residual is not None, CAST_FIRST=cast_first,
        **norm_constants(size, at_once),
    )  # fmt: skip


def norm_constants(size: int, rows: int) -> dict[str, int]:
    """SIZE, COLUMNS and num_warps of `fused.rms_norm` with ROWS = `rows`: 16 values a thread."""
    columns = triton.next_power_of_2(size)
    warps = min(max(columns * rows // 512, 4), 16)
    return {"SIZE": size, "COLUMNS": columns, "num_warps": warps}


def add(x: torch.Tensor, residual: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """See `reference.add`."""
    if not x.stride(1) == residual.stride(1) == 1:
        return reference.add(x, residual, scale)
    rows, size = x.shape
    if rows:
        at_once = 1 if x.is_cuda else _INTERPRETED
        fused.add[triton.cdiv(rows, at_once), triton.cdiv(size, _COLUMNS)](
            x, residual, x.stride(0), residual.stride(0), rows, size, scale,
            ROWS=at_once, COLUMNS=_COLUMNS,
        )  # fmt: skip
    return residual


def rope(
    q: torch.Tensor, k: torch.Tensor | None, cos_sin: torch.Tensor, positions: torch.Tensor
) -> None:
    """See `reference.rope`."""
    if not (_in_rows(q) and (k is None or _in_rows(k))):
        reference.rope(q, k, cos_sin, positions)
        return
    if k is not None and _follows(k, q):  # as in the output of a joined product
        q, k = q.as_strided((len(q), q.shape[1] + k.shape[1], q.shape[2]), q.stride()), None
    for x in (q,) if k is None else (q, k):
        _rotate(x, cos_sin, positions)


def _rotate(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> None:
    """Rotary embedding of x, in place, as the queries of `cache.rotate_and_write`."""
    tokens, heads, head_dim = x.shape
    if not tokens:
        return
    at_once = min(triton.next_power_of_2(heads), _HEADS_AT_ONCE if x.is_cuda else 64)
    cache.rotate_and_write[tokens, triton.cdiv(heads, at_once)](
        x, x, x, x, x, x, x, cos_sin, positions, positions, 0.0,
        0, 0, 0, x.stride(0), x.stride(0), x.stride(0), cos_sin.stride(0),
        Q_HEADS=heads, KV_HEADS=1, HEADS=at_once, HEAD_DIM=head_dim,
        DIMS=triton.next_power_of_2(head_dim), HALF=cos_sin.shape[1] // 2, BLOCK=1,
        FORM=cache.PLAIN, WRITES=False, NORMS=False, CAST_FIRST=False, num_warps=4,
    )  # fmt: skip


def _in_rows(x: torch.Tensor) -> bool:
    """Whether each token of x [tokens, heads, head_dim] is contiguous."""
    return x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1)


def _follows(k: torch.Tensor, q: torch.Tensor) -> bool:
    """Whether each token's k begins where its q ends."""
    end = q.data_ptr() + q.shape[1] * q.shape[2] * q.itemsize
    return k.data_ptr() == end and k.stride(0) == q.stride(0) and q.stride(1) == q.shape[2]


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `reference.silu_and_mul`."""
    return _gated(gate_up, gelu=False)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `reference.gelu_and_mul`."""
    return _gated(gate_up, gelu=True)


def _gated(gate_up: torch.Tensor, gelu: bool) -> torch.Tensor:
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        at_once = 1 if gate_up.is_cuda else _INTERPRETED
        fused.gated[triton.cdiv(rows, at_once), triton.cdiv(size, _COLUMNS)](
            out, gate_up, out.stride(0), gate_up.stride(0), rows, size,
            GELU=gelu, ROWS=at_once, COLUMNS=_COLUMNS,
        )  # fmt: skip
    return out
