"""An attention backend of your own, in some twenty lines of torch.

A backend owns the layout of its KV cache and does two things: it writes the keys and values of
new tokens to their slots, and it attends over the blocks of each sequence. The rest of the engine
(paging, prefix caching, preemption, chunked prefill) works over it unchanged. Prints the answers
of this backend and of a built-in one, which are the same.

    python examples/custom_attention.py
"""

import argparse

import torch
from torch.nn.functional import scaled_dot_product_attention

from octavo import LLM, SamplingParams
from octavo.attention import (
    AttentionMetadata,
    AttentionSpec,
    Capabilities,
    register_attention_impl,
)


class GatherAttention:
    """Collects the blocks of each sequence, then calls torch: simple, not fast."""

    name = "gather"
    # What the engine checks before it chooses a backend; the error says what is missing.
    capabilities = Capabilities(
        dtypes=(torch.float32, torch.bfloat16),
        kv_dtypes=(torch.float32, torch.bfloat16),
        devices=("cpu",),
        window=False,
        soft_cap=False,
    )

    def kv_layout(
        self, spec: AttentionSpec, num_blocks: int, block_size: int, kv_dtype: torch.dtype
    ) -> tuple[tuple[int, ...], torch.dtype]:
        return (num_blocks, block_size, 2, spec.num_kv_heads, spec.head_dim), kv_dtype

    def write(
        self, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata
    ) -> None:
        slots = cache.flatten(0, 1)  # a view: [slots, 2, kv_heads, head_dim]
        slots[meta.slots] = torch.stack((key, value), dim=1).to(cache.dtype)

    def attend(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        meta: AttentionMetadata,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        out = torch.empty_like(query)  # [tokens, heads, head_dim]
        starts, lengths = meta.query_starts.tolist(), meta.seq_lens.tolist()
        for row, length in enumerate(lengths):
            begin, end = starts[row], starts[row + 1]
            table = meta.block_tables[row, : -(-length // meta.block_size)]
            keys, values = cache[table].flatten(0, 1)[:length].transpose(0, 2).unbind(1)
            # The queries are the last tokens of the sequence; each sees what precedes it.
            mask = torch.ones(end - begin, length, dtype=torch.bool).tril(length - (end - begin))
            out[begin:end] = scaled_dot_product_attention(
                query[None, begin:end].transpose(1, 2),
                keys[None],
                values[None],
                attn_mask=mask,
                scale=spec.scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
        return out.flatten(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()

    register_attention_impl("gather", GatherAttention)
    for name in ("gather", "torch"):
        llm = LLM(args.model, attention_impl=name, dtype="float32")
        params = SamplingParams(temperature=0.0, max_tokens=16)
        (output,) = llm.generate("The capital of France is", params, use_tqdm=False)
        print(f"{name:7} {output.outputs[0].text!r}")
        llm.close()


if __name__ == "__main__":
    main()
