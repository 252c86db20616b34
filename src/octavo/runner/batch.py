"""A plan's rows as the flat tensors that the model reads, in buffers made once.

Nothing of a request lives here from step to step but the block table that was last written for
a row position, kept so that a table which did not change is not copied again.
"""

from dataclasses import dataclass

import numpy as np
import torch

from octavo.attention.base import AttentionMetadata
from octavo.core.plan import PlanRow, StepPlan
from octavo.runner.device import Device


@dataclass(frozen=True, slots=True)
class StepInputs:
    """token_ids: int64 [tokens]. sample_index: int64 [sampled tokens], those whose logits are
    needed, in the plan's order: of each row that draws its last token, and before it one for
    each draft."""

    token_ids: torch.Tensor
    meta: AttentionMetadata
    sample_index: torch.Tensor


class BatchBuilder:
    """Builds StepInputs. Buffers grow to the largest step seen and are then reused."""

    def __init__(self, block_size: int, max_blocks: int, device: Device) -> None:
        self.block_size = block_size
        self._max_blocks = max_blocks
        self._device = device
        self._tables = np.zeros((0, max_blocks), np.int32)
        self._held: list[tuple[int, ...]] = []

    def build(self, plan: StepPlan) -> StepInputs:
        rows = plan.rows
        counts = np.fromiter((len(r.token_ids) for r in rows), np.int64, len(rows))
        starts = np.fromiter((r.start for r in rows), np.int64, len(rows))
        ends = np.cumsum(counts)
        tokens = np.array([t for r in rows for t in r.token_ids], np.int64)
        row_of = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(len(tokens)) + (starts - ends + counts)[row_of]
        tables = self._fill_tables(rows)
        size = self.block_size
        slots = tables[row_of, positions // size].astype(np.int64) * size + positions % size
        seq_lens = starts + counts
        most_blocks = int(-(-seq_lens.max() // size))
        tensor = self._device.tensor
        meta = AttentionMetadata(
            query_starts=tensor("query_starts", np.concatenate(([0], ends)).astype(np.int32)),
            seq_lens=tensor("seq_lens", seq_lens.astype(np.int32)),
            block_tables=tensor("block_tables", tables[:, :most_blocks]),
            slots=tensor("slots", slots),
            positions=tensor("positions", positions),
            num_tokens=len(tokens),
            num_rows=len(rows),
            max_query_len=int(counts.max()),
            max_seq_len=int(seq_lens.max()),
            block_size=size,
        )
        return StepInputs(
            tensor("token_ids", tokens), meta, tensor("sample_index", _sample_index(rows, ends))
        )

    def _fill_tables(
        self, rows: tuple[PlanRow, ...]
    ) -> "np.ndarray[tuple[int, int], np.dtype[np.int32]]":
        if len(rows) > len(self._tables):
            self._tables = np.zeros((2 * len(rows), self._max_blocks), np.int32)
            self._held = [()] * (2 * len(rows))
        for index, row in enumerate(rows):
            # The scheduler passes the same tuple until a table changes.
            if self._held[index] is not row.block_ids:
                self._tables[index, : len(row.block_ids)] = row.block_ids
                self._held[index] = row.block_ids
        return self._tables[: len(rows)]


def _sample_index(
    rows: tuple[PlanRow, ...], ends: "np.ndarray[tuple[int], np.dtype[np.int64]]"
) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """The last token of each row that draws, and before it one for each of its drafts."""
    # Offsets of a row fall to 0, so the first one says how many tokens are sampled.
    counts = np.fromiter(
        (r.samples[0].offset + 1 if r.samples else 0 for r in rows), np.int64, len(rows)
    )
    before = np.cumsum(counts) - counts
    return np.repeat(ends - counts - before, counts) + np.arange(counts.sum())
