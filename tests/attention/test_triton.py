"""The work lists of the Triton backend; its kernels are tested in tests/kernels/gpu."""

import numpy as np
import pytest
import torch

from octavo.attention.base import AttentionSpec
from octavo.attention.triton import WorkLists, plan, tiles
from octavo.attention.triton_cache import SPLIT_KEYS

ROWS = [(1, 1), (1, 256), (1, 257), (1, 900), (3, 700), (0, 0), (4, 4), (40, 40), (129, 1000)]


def _plan(spec: AttentionSpec, rows: list[tuple[int, int]]) -> WorkLists:
    counts, lengths = np.array(rows, np.int32).T
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return plan(starts, lengths, spec, 16, 64)


@pytest.mark.parametrize("window", [None, 1, 100, 300])
@pytest.mark.parametrize("group", [1, 4, 3])
def test_each_visible_key_of_each_query_is_in_one_item(group: int, window: int | None) -> None:
    spec = AttentionSpec(2 * group, 2, 64, 1.0, window)
    work = _plan(spec, ROWS)
    seen: dict[tuple[int, int], list[int]] = {}
    for items in (work.split, work.whole):
        for row, token, queries, position, begin, end, _, _ in items.tolist():
            for i in range(queries):
                keys = [
                    key
                    for key in range(begin, end)
                    if position + i - (window or 10**6) < key <= position + i
                ]
                seen.setdefault((row, token + i), []).extend(keys)
    token = 0
    for row, (count, length) in enumerate(ROWS):
        for i in range(count):
            position = length - count + i
            low = max(0, position + 1 - window) if window else 0
            assert sorted(seen.pop((row, token))) == list(range(low, position + 1))
            token += 1
    assert not seen


def test_pieces_end_at_fixed_keys() -> None:
    """So a row's bits do not depend on when it was split."""
    work = _plan(AttentionSpec(8, 2, 64, 1.0), ROWS)
    assert not (work.split[:, 4] % SPLIT_KEYS).any()
    inner = work.split[:, 5] % SPLIT_KEYS != 0
    last = {row: max(work.split[work.split[:, 0] == row, 5]) for row in set(work.split[:, 0])}
    assert all(end == last[row] for row, end in work.split[inner][:, [0, 5]])


def test_partial_results_do_not_overlap_and_are_joined_in_the_order_of_keys() -> None:
    group = 4
    work = _plan(AttentionSpec(2 * group, 2, 64, 1.0), ROWS)
    owners = np.zeros(work.lines, int)
    for _, _, queries, _, _, _, line, _ in work.split.tolist():
        if line >= 0:
            owners[line : line + queries * group] += 1
    assert (owners == 1).all()
    firsts = {line: (token, begin) for _, token, _, _, begin, _, line, _ in work.split.tolist()}
    for token, line, pieces, step in work.joins.tolist():
        begins = []
        for piece in range(pieces):
            base = max(first for first in firsts if 0 <= first <= line + piece * step)
            assert firsts[base][0] + (line + piece * step - base) // group == token
            begins.append(firsts[base][1])
        assert begins == sorted(begins)
        assert len(set(begins)) == pieces > 1


def test_a_row_is_planned_alike_whatever_else_is_in_the_step() -> None:
    spec = AttentionSpec(8, 2, 64, 1.0)
    together = _plan(spec, ROWS)
    for row, one in enumerate(ROWS):
        alone = _plan(spec, [one])
        for name in ("split", "whole"):
            items, own = getattr(together, name), getattr(alone, name)
            items = items[items[:, 0] == row]
            assert np.array_equal(items[:, 2:6], own[:, 2:6])
            assert np.array_equal(items[:, 6] >= 0, own[:, 6] >= 0)


def test_tiles_hold_a_group_of_any_size() -> None:
    for group in (1, 3, 8, 71):
        for tile in tiles(AttentionSpec(group, 1, 64, 1.0), torch.bfloat16).values():
            assert tile.rows >= group
