"""Steps over a paged cache made by hand, and a comparison that is known to be able to fail."""

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from octavo.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec
from octavo.kernels import reference

CODES = (torch.int8, torch.float8_e4m3fn)
Rows = Sequence[tuple[int, int]]  # (queries, length) of each row: its last queries of length keys


def metadata(rows: Rows, block_size: int, seed: int = 0) -> AttentionMetadata:
    """A step of `rows` whose blocks are dealt out in random order."""
    sizes = [-(-length // block_size) for _, length in rows]
    blocks = random.Random(seed).sample(range(1, sum(sizes) + 1), sum(sizes))
    tables = torch.zeros(len(rows), max(sizes), dtype=torch.int32)
    for row, size in enumerate(sizes):
        tables[row, :size] = torch.tensor([blocks.pop() for _ in range(size)])
    counts = torch.tensor([queries for queries, _ in rows])
    positions = torch.cat([torch.arange(length - n, length) for n, length in rows])
    row_of = torch.repeat_interleave(torch.arange(len(rows)), counts)
    slots = tables[row_of, positions // block_size].long() * block_size + positions % block_size
    return AttentionMetadata(
        query_starts=torch.cat((torch.zeros(1), counts.cumsum(0))).int(),
        seq_lens=torch.tensor([length for _, length in rows]).int(),
        block_tables=tables,
        slots=slots,
        positions=positions,
        num_tokens=len(positions),
        num_rows=len(rows),
        max_query_len=int(counts.max()),
        max_seq_len=max(length for _, length in rows),
        block_size=block_size,
    )


class Sequences:
    """Random q, k, v of whole sequences, written to a cache that held NaN before.

    With another `kv_dtype`, k and v are what the reference makes of its codes or values: so what is
    compared is the computation on one cache, not its loss.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        spec: AttentionSpec,
        lengths: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        seed: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.backend, self.spec, self.lengths, self.block_size = backend, spec, lengths, block_size
        torch.manual_seed(seed)
        self.q, self.k, self.v = (
            [torch.randn(n, heads, spec.head_dim).to(dtype) for n in lengths]
            for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        )
        whole = metadata([(n, n) for n in lengths], block_size)
        blocks = 1 + sum(-(-n // block_size) for n in lengths)
        shape, kind = backend.kv_layout(spec, blocks, block_size, kv_dtype or dtype)
        self.cache = torch.empty(shape, dtype=kind)
        self.cache.view(torch.uint8).fill_(0xFF)  # NaN, but for int8, of which the scales are
        self.cache[0].zero_()
        backend.write(torch.cat(self.k), torch.cat(self.v), self.cache, whole)
        if kv_dtype in CODES:
            self.k, self.v = ([decoded(x, kind) for x in part] for part in (self.k, self.v))
        elif kv_dtype is not None:
            self.k, self.v = ([x.to(kind).to(dtype) for x in part] for part in (self.k, self.v))
        self.sinks = (torch.randn(spec.num_heads).to(dtype),) if spec.sinks else ()

    def attend(self, queries: Sequence[int]) -> list[torch.Tensor]:
        """The last `queries[i]` queries of each sequence, all in one step."""
        step = metadata(list(zip(queries, self.lengths, strict=True)), self.block_size)
        query = torch.cat([q[len(q) - n :] for q, n in zip(self.q, queries, strict=True)])
        out = self.backend.attend(query, self.cache, step, self.spec, *self.sinks)
        return list(torch.split(out, list(queries)))

    def chunks(self, index: int, size: int) -> torch.Tensor:
        """All queries of one sequence, `size` at a time, each chunk in a step of its own."""
        q, parts = self.q[index], []
        for start in range(0, len(q), size):
            end = min(start + size, len(q))
            step = metadata([(n, n) for n in self.lengths], self.block_size)
            blocks = -(-end // self.block_size)
            alone = metadata([(end - start, end)], self.block_size)
            table = step.block_tables[index : index + 1, :blocks].contiguous()
            alone = replace(alone, block_tables=table)
            parts.append(self.backend.attend(q[start:end], self.cache, alone, self.spec))
        return torch.cat(parts)

    def expected(self, index: int) -> torch.Tensor:
        """The reference for all queries of one sequence, float32 [tokens, heads * head_dim]."""
        spec = self.spec
        out = reference.attention(
            self.q[index], self.k[index], self.v[index], spec.scale, spec.window, spec.soft_cap,
            *self.sinks,
        )  # fmt: skip
        return out.flatten(1)


def decoded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x as it comes back from a cache of codes, float32."""
    return reference.dequantize_kv(*reference.quantize_kv(x, dtype))


# Root mean square of the difference over that of the reference. bfloat16 rounds
# to 2^-9, float16 to 2^-11 (and the weights of keys are rounded to it).
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to rounding of got's dtype; and sure that an error of 1% would be seen."""
    limit = TOLERANCE[got.dtype]
    assert _distance(got.float(), expected.float()) < limit
    assert _distance(got.float() * 1.01, expected.float()) > limit


def _distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape
    difference = (got - expected).square().mean().sqrt()
    value = difference / expected.square().mean().sqrt()
    assert torch.isfinite(value)
    return float(value)
