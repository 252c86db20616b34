"""Flattens a plan's rows into the tensors that the model reads, in reused buffers.

The only state kept between steps is the block table last written for each row position, so that
unchanged tables are not copied again.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.attention.base import AttentionMetadata, HostLengths
from octavo.core.plan import PlanRow, StepPlan
from octavo.runner.device import Device, DrawsAhead

Tables = NDArray[np.int32]
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """token_ids: int64 [tokens]; -1 - i for draw i of the step before. metas: one per KV group.
    sample_index: int64 [sampled tokens], those whose logits are needed, in the plan's order: of
    each row that draws its last token, and before it one for each draft."""

    token_ids: torch.Tensor
    metas: tuple[AttentionMetadata, ...]
    sample_index: torch.Tensor


class BatchBuilder:
    """Builds StepInputs for `num_groups` KV groups, of at most `max_blocks` logical blocks a row.

    Buffers grow to the largest step seen and are then reused.
    """

    def __init__(
        self, block_size: int, max_blocks: int, device: Device, num_groups: int = 1
    ) -> None:
        self.block_size = block_size
        self.num_groups = num_groups
        self._max_blocks = max_blocks
        self._tensor = device.tensor
        # Where it takes one copy to send all inputs, and else one for each.
        self._tensors = device.tensors if isinstance(device, DrawsAhead) else None
        self._tables = np.zeros((num_groups, 0, max_blocks), np.int32)  # [groups, rows, blocks]
        self._written: list[tuple[tuple[int, ...], ...]] = []

    def build(self, plan: StepPlan) -> StepInputs:
        rows = plan.rows
        counts = np.fromiter((len(r.token_ids) for r in rows), np.int64, len(rows))
        starts = np.fromiter((r.start for r in rows), np.int64, len(rows))
        ends = np.cumsum(counts)
        tokens = np.array([t for r in rows for t in _token_ids(r)], np.int64)
        row_of = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(len(tokens)) + (starts - ends + counts)[row_of]
        tables = self._fill_tables(rows)
        size = self.block_size
        seq_lens = starts + counts
        most_blocks = int(-(-seq_lens.max() // size))
        host = HostLengths(np.concatenate(([0], ends)).astype(np.int32), seq_lens.astype(np.int32))
        arrays: dict[str, NDArray[np.generic]] = {
            "token_ids": tokens,
            "query_starts": host.query_starts,
            "seq_lens": host.seq_lens,
            "positions": positions,
            "sample_index": _sample_index(rows, ends),
        }
        for group, table in enumerate(tables):
            arrays[f"block_tables.{group}"] = table[:, :most_blocks]
            arrays[f"slots.{group}"] = _slots(table, row_of, positions, size)
        sent = self._sent(arrays)
        meta = AttentionMetadata(
            query_starts=sent["query_starts"],
            seq_lens=sent["seq_lens"],
            block_tables=sent["block_tables.0"],
            slots=sent["slots.0"],
            positions=sent["positions"],
            num_tokens=len(tokens),
            num_rows=len(rows),
            max_query_len=int(counts.max()),
            max_seq_len=int(seq_lens.max()),
            block_size=size,
            max_blocks=self._max_blocks,
            host=host,
        )
        others = [
            replace(
                meta,
                block_tables=sent[f"block_tables.{group}"],
                slots=sent[f"slots.{group}"],
                group=group,
            )
            for group in range(1, self.num_groups)
        ]
        return StepInputs(sent["token_ids"], (meta, *others), sent["sample_index"])

    def _sent(self, arrays: dict[str, NDArray[np.generic]]) -> dict[str, torch.Tensor]:
        """The arrays on the device."""
        if self._tensors:
            tensors = self._tensors("inputs", list(arrays.values()))
            return dict(zip(arrays, tensors, strict=True))
        return {name: self._tensor(name, array) for name, array in arrays.items()}

    def _fill_tables(self, rows: tuple[PlanRow, ...]) -> Tables:
        """[groups, rows, max_blocks]"""
        if len(rows) > len(self._written):
            self._tables = np.zeros((self.num_groups, 2 * len(rows), self._max_blocks), np.int32)
            self._written = [()] * (2 * len(rows))
        for index, row in enumerate(rows):
            # The scheduler passes the same tuple until a table changes.
            if self._written[index] is not row.block_ids:
                before = len(self._written[index][0]) if self._written[index] else 0
                for table, blocks in zip(self._tables, row.block_ids, strict=True):
                    table[index, : len(blocks)] = blocks
                    table[index, len(blocks) : before] = 0
                self._written[index] = row.block_ids
        return self._tables[:, : len(rows)]


def _token_ids(row: PlanRow) -> tuple[int, ...]:
    return row.token_ids if row.from_draw is None else (-1 - row.from_draw,)


def _slots(tables: Tables, row_of: Indices, positions: Indices, block_size: int) -> Indices:
    """The slot of each token; tables: [rows, blocks], row_of and positions: [tokens]."""
    blocks = tables[row_of, positions // block_size].astype(np.int64)
    return blocks * block_size + positions % block_size


def _sample_index(rows: tuple[PlanRow, ...], ends: Indices) -> Indices:
    """The last token of each row that draws, and before it one for each of its drafts."""
    # Offsets of a row descend to 0, so the first one gives the number of sampled tokens.
    counts = np.fromiter(
        (r.samples[0].offset + 1 if r.samples else 0 for r in rows), np.int64, len(rows)
    )
    before = np.cumsum(counts) - counts
    return np.repeat(ends - counts - before, counts) + np.arange(counts.sum())
