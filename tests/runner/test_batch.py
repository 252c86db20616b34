"""A plan's rows as flat inputs, checked against a plain loop."""

import random

import msgspec
import torch
from tests import kit

from octavo.core.plan import PlanRow, SampleSpec, StepPlan
from octavo.params import SamplingParams
from octavo.runner.batch import BatchBuilder

CPU = kit.cpu_device()
SPEC = SampleSpec(SamplingParams(), 0, 0, 0)


def check(builder, rows, size):
    inputs = builder.build(StepPlan(1, tuple(rows)))
    for group, meta in enumerate(inputs.metas):
        assert meta.group == group
        check_group(inputs, meta, rows, size)


def check_group(inputs, meta, rows, size):
    tokens, positions, slots, last, begin = [], [], [], [], 0
    for index, row in enumerate(rows):
        assert meta.query_starts[index] == begin
        begin += len(row.token_ids)
        assert meta.seq_lens[index] == row.start + len(row.token_ids)
        used = -(-int(meta.seq_lens[index]) // size)
        assert meta.block_tables[index, :used].tolist() == list(row.block_ids[meta.group][:used])
        for position, token in enumerate(row.token_ids, row.start):
            tokens.append(token)
            positions.append(position)
            slots.append(row.block_ids[meta.group][position // size] * size + position % size)
        if row.samples:
            last += range(begin - 1 - row.num_drafts, begin)
    assert inputs.token_ids.tolist() == tokens
    assert meta.positions.tolist() == positions
    assert meta.slots.tolist() == slots
    assert meta.slots.dtype == torch.int64
    assert inputs.sample_index.tolist() == last
    assert (meta.num_tokens, meta.num_rows) == (len(tokens), len(rows))
    assert meta.max_query_len == max(len(r.token_ids) for r in rows)
    assert meta.max_seq_len == max(r.start + len(r.token_ids) for r in rows)


def test_random_plans_equal_a_plain_loop():
    draw = random.Random(0)
    size = 4
    builder = BatchBuilder(size, 32, CPU)
    for _ in range(200):
        rows = []
        for name in range(draw.randint(1, 9)):
            start, count = draw.randrange(60), draw.randint(1, 30)
            blocks = tuple(draw.randrange(1, 1000) for _ in range(-(-(start + count) // size)))
            samples = (SPEC,) * draw.choice([0, 1, 1, 3])
            if count > 1 and draw.random() < 0.3:  # drafts: each of the last tokens is sampled
                offsets = range(draw.randint(1, count - 1), -1, -1)
                samples = tuple(msgspec.structs.replace(SPEC, offset=n) for n in offsets)
            tokens = tuple(draw.randrange(99) for _ in range(count))
            rows.append(PlanRow(str(name), tokens, start, (blocks,), samples))
        check(builder, rows, size)


def test_a_table_that_grows_in_place_is_followed():
    """Rows keep their place while tables grow, shrink and change hands."""
    builder = BatchBuilder(4, 32, CPU)
    table = (5, 6)
    check(builder, [PlanRow("a", (1,), 7, (table,)), PlanRow("b", (1,), 3, ((9,),))], 4)
    check(builder, [PlanRow("a", (1,), 8, ((*table, 7),)), PlanRow("b", (1,), 3, ((9,),))], 4)
    check(builder, [PlanRow("b", (1,), 3, ((9,),))], 4)
    check(builder, [PlanRow("c", (1, 2), 0, ((8,),)), PlanRow("b", (1,), 3, ((9,),))], 4)


def test_each_group_has_its_own_tables_and_slots():
    builder = BatchBuilder(4, 32, CPU, num_groups=2)
    rows = [PlanRow("a", (1, 2), 7, ((5, 6, 7), (0, 8, 9))), PlanRow("b", (3,), 0, ((1,), (2,)))]
    check(builder, rows, 4)
    check(builder, rows[::-1], 4)
    first, second = builder.build(StepPlan(1, tuple(rows))).metas
    assert first.positions is second.positions
    assert first.query_starts is second.query_starts
    assert second.block_tables.tolist() == [[0, 8, 9], [2, 0, 0]]
