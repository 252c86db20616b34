"""The compiled layout of GGUF's blocks against its torch twins, bit for bit."""

import pytest
import torch
from tests.kernels.cpu.test_gguf import KINDS, stored

from octavo.kernels.codes import StoredRows
from octavo.kernels.cpu.gguf_pack_call import pack
from octavo.kernels.cpu.weight_only_layout import PackedCodes, unpack
from octavo.kernels.cpu.weight_only_layout import pack as twin
from octavo.quant.gguf import BLOCKS
from octavo.quant.tensors import grouped_codes


def rows_of(name: str, raw: torch.Tensor, order: torch.Tensor | None = None) -> StoredRows:
    columns = raw.shape[1] // KINDS[name].block_bytes * KINDS[name].block_values
    return StoredRows(
        name, BLOCKS[name].form, raw, columns, order, lambda _: None, lambda: None
    )  # fmt: skip


def same(a: PackedCodes, b: PackedCodes) -> bool:
    both = ((a.codes, b.codes), (a.terms, b.terms), (a.factors, b.factors))
    equal = all(x is None if y is None else bytes_of(x) == bytes_of(y) for x, y in both)
    return equal and (a.form, a.in_size, a.out_size) == (b.form, b.in_size, b.out_size)


def bytes_of(tensor: torch.Tensor | None) -> bytes:
    assert tensor is not None
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", KINDS)
def test_layout_equals_the_twin(name: str) -> None:
    kind, codec = KINDS[name], BLOCKS[name]
    for rows, blocks in ((70, 5), (32, 1), (3, 40 if kind.block_values == 32 else 5)):
        raw = stored(kind, rows * blocks).view(rows, blocks, -1)
        columns = blocks * kind.block_values
        packed = pack([rows_of(name, raw.flatten(1))])
        assert same(packed, twin(grouped_codes(codec, raw)))
        values = codec.decode(raw.flatten(0, 1)).view(rows, columns)
        assert torch.equal(unpack(packed).dequantized(), values)


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0"])
def test_rows_in_another_order_and_with_gaps(name: str) -> None:
    kind, codec = KINDS[name], BLOCKS[name]
    raw = stored(kind, 40 * 4).view(40, -1)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:37]
    middle = raw[:, kind.block_bytes : 3 * kind.block_bytes]
    packed = pack([rows_of(name, middle, order)])
    wanted = grouped_codes(codec, middle[order].view(37, 2, -1))
    assert same(packed, twin(wanted))


def test_tensors_are_stacked_and_gate_and_up_alternate() -> None:
    first, second = (stored(KINDS["Q5_0"], 32 * seed).view(32, -1)[:, : 2 * 22] for seed in (4, 6))
    both = torch.cat((first, second))
    plain = twin(grouped_codes(BLOCKS["Q5_0"], both.reshape(64, 2, -1)))
    parts = [rows_of("Q5_0", first), rows_of("Q5_0", second)]
    assert same(pack(parts), plain)
    assert same(pack(parts, interleaved=True), plain.interleaved())


@pytest.mark.parametrize("inner", [16, 48])
def test_gate_and_up_of_halves_of_panels_alternate(inner: int) -> None:
    parts = [stored(KINDS["Q5_0"], inner * 2 + i).view(-1, 22)[i:] for i in (0, 1)]
    rows = [part.reshape(inner, -1) for part in parts]
    plain = twin(grouped_codes(BLOCKS["Q5_0"], torch.cat(rows).view(2 * inner, 2, -1)))
    packed = pack([rows_of("Q5_0", part) for part in rows], interleaved=True)
    assert same(packed, plain.interleaved())
    assert same(packed, plain) == (inner == 16)
