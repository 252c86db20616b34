"""The layout of weight-only codes: nothing is lost, and every byte is where it should be."""

import pytest
import torch

from octavo.kernels.codes import SUPER, Codes, Form, GroupedCodes, as_grouped, linear
from octavo.kernels.cpu.weight_only_layout import PackedCodes, block_bytes, pack, shapes, unpack

NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def drawn(form: Form, n: int, k: int, seed: int = 0) -> GroupedCodes:
    generator = torch.Generator().manual_seed(seed)
    groups = -(-k // form.group)
    codes = torch.randint(0, 2**form.bits, (n, k), generator=generator).to(torch.uint8)
    shape = (n, groups, form.num_terms)
    if form.terms == "super":
        terms = torch.randint(-60, 63, shape, generator=generator).to(torch.int8)
        factors = torch.rand(n, -(-k // SUPER), form.num_terms, generator=generator) / 1000
        return GroupedCodes(form, codes, terms, factors.half())
    terms = torch.rand(shape, generator=generator) / 50
    if form.offset == "zero":
        terms[..., 1] = torch.randint(0, 16, shape[:2], generator=generator)
    return GroupedCodes(form, codes, terms.to(form.terms_dtype))


FORMS = [
    Form(4, 32, "half", "none", linear(4, -8)),
    Form(4, 32, "super", "minimum", linear(4, 0)),
    Form(4, 16, "super", "none", NON_LINEAR),
    Form(5, 32, "half", "minimum", linear(5, 0)),
    Form(6, 16, "super", "none", linear(6, -32)),
    Form(8, 128, "single", "zero", linear(8, -128)),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_is_packed_is_unpacked(form):
    for n, k in ((1, 8), (33, 100), (96, 512)):
        weight = drawn(form, n, k)
        packed = pack(weight)
        found = unpack(packed)
        assert torch.equal(found.codes, weight.codes)
        assert torch.equal(found.terms, weight.terms)
        assert torch.equal(found.dequantized(), weight.dequantized())
        empty = PackedCodes.empty(form, n, k)
        assert [empty.codes.shape, empty.terms.shape] == list(shapes(form, n, k)[:2])
        assert (empty.codes.shape, empty.terms.shape) == (packed.codes.shape, packed.terms.shape)
        assert packed.num_bytes == empty.num_bytes


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_each_bit_of_the_planes(bits):
    form = Form(bits, 32, "half", "none", linear(bits, 0))
    weight = drawn(form, 64, 48)
    block = pack(weight).codes[1, 2].numpy()  # columns 32.., k 32..
    assert len(block) == block_bytes(bits)
    width = bits - 4
    for half in range(2):
        low = block[128 * half :][:128].view("<u2").reshape(2, 16, 2)
        high = block[256 + 32 * width * half :][: 32 * width].view("<u2" if bits == 6 else "u1")
        for column in range(16):
            for k in range(16):
                unit, s, h = k // 8, k % 8 // 2, k % 2
                code = int(low[unit, column, h]) >> (4 * s) & 15
                if width:
                    field = int(high[2 * column + h]) >> (width * (k // 2))
                    code |= (field & (2**width - 1)) << 4
                assert code == weight.codes[32 + 16 * half + column, 32 + k]


def test_each_byte_of_eight_bits():
    weight = drawn(Form(8, 32, "half", "none", linear(8, -128)), 32, 32)
    block = pack(weight).codes[0, 1].view(torch.int8).view(2, 16, 16)  # half, k, column
    values = weight.codes.int() - 128
    assert torch.equal(block.int(), values[:, 16:].T.reshape(16, 2, 16).transpose(0, 1))


def test_terms_lie_by_panel_group_and_column():
    weight = drawn(Form(4, 16, "half", "minimum", linear(4, 0)), 40, 64)
    terms = pack(weight).terms
    assert terms.shape == (2, 4, 2, 32)
    assert terms[1, 3, 1, 7] == weight.terms[39, 3, 1]
    assert not terms[1, :, :, 8:].any()


def test_gate_and_up_alternate():
    weight = drawn(FORMS[1], 64, 256)
    found = unpack(pack(weight).interleaved()).dequantized()
    gate, up = weight.dequantized().split(32)
    assert torch.equal(found, torch.cat((gate[:16], up[:16], gate[16:], up[16:])))


def stored(bits, zero, scale, minimum=None):
    codes = torch.arange(16 * 64, dtype=torch.int32).view(16, 64) % 2**bits
    scales = torch.full((16, 2), scale)
    low = -scales * zero if minimum is None else torch.full((16, 2), minimum)
    return Codes(codes.to(torch.uint8), scales, low, 32, bits)


@pytest.mark.parametrize(
    ("codes", "terms", "offset", "first"),
    [
        (stored(4, 8, 0.25), "half", "none", -8),
        (stored(4, 8, 0.1), "single", "none", -8),
        (stored(4, torch.tensor([3.0, 7.0]), 0.25), "half", "zero", 0),
        (stored(4, 0, 0.25, -0.375), "half", "minimum", 0),
        (stored(4, 0, 0.25, -0.3), "single", "minimum", 0),
        (stored(8, 128, 0.25), "half", "none", -128),
        (stored(8, torch.tensor([3.0, 255.0]), 0.25), "half", "zero", -128),
        (stored(8, 0, 0.25, -0.375), "half", "minimum", -128),
        (stored(4, 0, 2.0**-20, -1.0), "half", "minimum", 0),  # a zero that float16 does not hold
    ],
)
def test_codes_take_the_shortest_form_that_is_exact(codes, terms, offset, first):
    grouped = as_grouped(codes)
    form = grouped.form
    assert (form.terms, form.offset, form.values[0]) == (terms, offset, first)
    torch.testing.assert_close(grouped.dequantized(), codes.values(), rtol=1e-6, atol=1e-7)
