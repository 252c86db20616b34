"""The plain torch backend: the specification of paged attention, on any device and any shape.

Cache of a layer: [blocks, 2, block_size, kv_heads, head_dim], keys first. It gathers each row's
keys and values and works row by row, so it is right and slow.
"""

import torch

from octavo.attention.base import AttentionMetadata, AttentionSpec, Capabilities
from octavo.kernels import reference

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class TorchAttention:
    """Paged attention in plain torch."""

    name = "torch"
    capabilities = Capabilities(dtypes=_FLOATS, kv_dtypes=_FLOATS, devices=("cpu", "cuda"))

    def kv_layout(
        self, spec: AttentionSpec, num_blocks: int, block_size: int, kv_dtype: torch.dtype
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """See AttentionBackend.kv_layout."""
        return (num_blocks, 2, block_size, spec.num_kv_heads, spec.head_dim), kv_dtype

    def write(
        self, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata
    ) -> None:
        """See AttentionBackend.write."""
        block, offset = meta.slots // meta.block_size, meta.slots % meta.block_size
        cache[block, 0, offset] = key.to(cache.dtype)
        cache[block, 1, offset] = value.to(cache.dtype)

    def attend(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        meta: AttentionMetadata,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """See AttentionBackend.attend."""
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        starts, lengths = meta.query_starts.tolist(), meta.seq_lens.tolist()
        for row in range(meta.num_rows):
            begin, end, length = starts[row], starts[row + 1], lengths[row]
            table = meta.block_tables[row, : -(-length // meta.block_size)].long()
            kv = cache[table].transpose(0, 1).flatten(1, 2)[:, :length]
            out[begin:end] = reference.attention(
                query[begin:end], kv[0], kv[1], spec.scale, spec.window, spec.soft_cap
            ).to(query.dtype)
        return out.flatten(1)
