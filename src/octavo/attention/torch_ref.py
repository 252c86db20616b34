"""The plain torch backend: the specification of paged attention, on any device and any shape.

Cache of a layer: [blocks, 2, block_size, kv_heads, head_dim], keys first; in a cache of codes each
head is followed by the four bytes of its float32 scale. It gathers each row's keys and values and
processes one row at a time: simple and slow.
"""

import torch

from octavo.attention.base import AttentionMetadata, AttentionSpec, Capabilities
from octavo.kernels import reference

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_CODES = (torch.int8, torch.float8_e4m3fn)


class TorchAttention:
    """Paged attention in plain torch."""

    name = "torch"
    capabilities = Capabilities(
        dtypes=_FLOATS,
        kv_dtypes=(*_FLOATS, *_CODES),
        devices=("cpu", "cuda"),
        block_strides=True,
        sinks=True,
    )

    def kv_layout(
        self, spec: AttentionSpec, num_blocks: int, block_size: int, kv_dtype: torch.dtype
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """See AttentionBackend.kv_layout."""
        size = spec.head_dim + (4 if kv_dtype in _CODES else 0)
        return (num_blocks, 2, block_size, spec.num_kv_heads, size), kv_dtype

    def write(
        self, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata
    ) -> None:
        """See AttentionBackend.write."""
        block, offset = meta.slots // meta.block_size, meta.slots % meta.block_size
        for index, x in enumerate((key, value)):
            cache[block, index, offset] = _stored(x, cache.dtype)

    def attend(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        meta: AttentionMetadata,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend.attend."""
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        starts, lengths = meta.query_starts.tolist(), meta.seq_lens.tolist()
        for row in range(meta.num_rows):
            begin, end, length = starts[row], starts[row + 1], lengths[row]
            table = meta.block_tables[row, : -(-length // meta.block_size)].long()
            kv = _read(cache[table]).transpose(0, 1).flatten(1, 2)[:, :length]
            out[begin:end] = reference.attention(
                query[begin:end], kv[0], kv[1], spec.scale, spec.window, spec.soft_cap, sinks
            ).to(query.dtype)
        return out.flatten(1)


def _stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype not in _CODES:
        return x.to(dtype)
    codes, scale = reference.quantize_kv(x, dtype)
    return torch.cat((codes, scale.unsqueeze(-1).view(dtype)), dim=-1)


def _read(cache: torch.Tensor) -> torch.Tensor:
    if cache.dtype not in _CODES:
        return cache
    scale = cache[..., -4:].contiguous().view(torch.float32).squeeze(-1)
    return reference.dequantize_kv(cache[..., :-4], scale)
