"""A declared layout: packed by keyword, read by offset, filled as a NumPy record."""

import struct

import numpy as np
import pytest

from octavo.kernels.cpu.arguments import Arguments, Kind, Record

SOME = Arguments(
    "module:maker",
    counter=Kind.COUNTER, rows=Kind.ROWS, x=Kind.POINTER, seed=Kind.U64, eps=Kind.F64,
)  # fmt: skip


def test_what_is_packed_lies_at_the_offsets():
    packed = SOME.packer()(rows=7, x=2**40, seed=2**64 - 1, eps=0.5)
    assert len(packed) == SOME.nbytes == 40
    assert struct.unpack("<3qQd", packed) == (0, 7, 2**40, 2**64 - 1, 0.5)
    offset = SOME.offset
    assert (offset.counter, offset.rows, offset.x, offset.seed, offset.eps) == (0, 8, 16, 24, 32)


def test_fixed_fields_are_packed_with_each_call():
    pack = SOME.packer(x=3, eps=2.0)
    assert pack(rows=1, seed=4) == SOME.packer()(rows=1, seed=4, x=3, eps=2.0)
    assert pack(rows=2, seed=4) != pack(rows=1, seed=4)
    assert SOME.packer(x=4, eps=2.0)(rows=1, seed=4) != pack(rows=1, seed=4)


def test_each_call_gives_memory_of_its_own():
    """A kernel writes to its counters."""
    pack = SOME.packer(rows=1, x=0, seed=0, eps=0.0)
    assert pack() is not pack()


@pytest.mark.parametrize(
    "given",
    [
        {"rows": 1, "x": 2, "seed": 3},
        {"rows": 1, "x": 2, "seed": 3, "eps": 4.0, "more": 5},
        {"rows": 1, "x": 2, "seed": 3, "eps": 4.0, "counter": 1},
    ],
)
def test_a_field_that_is_missing_or_unknown_is_an_error(given):
    with pytest.raises(TypeError):
        SOME.packer()(**given)
    with pytest.raises(TypeError):
        SOME.packer(more=1)


def test_an_array_of_records_is_laid_out_alike():
    record = Record(row=Kind.I64, seed=Kind.U64, temperature=Kind.F64)
    items = np.zeros(2, record.dtype)
    items["row"], items["seed"], items["temperature"] = (1, 2), (3, 2**64 - 4), (0.5, 6.0)
    assert items.tobytes() == struct.pack("<qQdqQd", 1, 3, 0.5, 2, 2**64 - 4, 6.0)
    assert record.nbytes == items.itemsize == 24


def test_fields_of_a_kind():
    assert SOME.words_of(Kind.POINTER) == (2,)
    assert SOME.words_of(Kind.ROWS) == (1,)
    assert SOME.words_of(Kind.CHUNK) == ()
