"""The memory of the Triton backend: its KV cache, and what captured steps hold.

Apart from the backend, so that it is known without Triton: what a GPU can hold is planned on
machines that have none.
"""

import torch

from octavo.attention.base import AttentionSpec, Capabilities

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CODES = (torch.int8, torch.float8_e4m3fn)

# Keys of a piece: a constant, since results depend on where pieces end.
SPLIT_KEYS = 256
# Floats of partial results of captured steps, 256 MiB; a step with more is not replayed.
_MOST_PARTIALS = 2**26


class TritonCache:
    """The part of `AttentionBackend` that says what memory is needed."""

    name = "triton"
    capabilities = Capabilities(
        dtypes=FLOATS,
        kv_dtypes=(*FLOATS, *CODES),
        devices=("cuda",),
        head_dims=tuple(range(8, 257, 8)),
        block_sizes=(8, 16, 32, 64, 128),
        graph_safe=True,
        padding_slot=-1,
        block_strides=True,
        sinks=True,
    )

    def kv_layout(
        self, spec: AttentionSpec, num_blocks: int, block_size: int, kv_dtype: torch.dtype
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """See AttentionBackend.kv_layout."""
        size = block_size * (spec.head_dim + (4 if kv_dtype in CODES else 0))
        return (num_blocks, 2, spec.num_kv_heads, size), kv_dtype

    def static_bytes(self, spec: AttentionSpec, tokens: int, longest: int) -> int:
        """See HoldsStaticMemory; without the lists, which are small."""
        lines = static_lines(spec, tokens, longest)
        return 4 * lines * spec.num_kv_heads * (spec.head_dim + 2)


def static_lines(spec: AttentionSpec, tokens: int, longest: int) -> int:
    """Lines of partial results of captured steps."""
    group, pieces = spec.num_heads // spec.num_kv_heads, -(-longest // SPLIT_KEYS)
    most = max(1, _MOST_PARTIALS // (spec.num_kv_heads * spec.head_dim))
    return min(tokens * pieces * group, most)
