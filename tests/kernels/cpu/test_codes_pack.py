"""The compiled rounding and layout of weights against their torch twins, bit for bit."""

import pytest
import torch
from tests.kernels.cpu.test_gguf_pack import same

from octavo.kernels.codes import Codes, as_grouped, round_to_bytes, round_to_codes
from octavo.kernels.cpu import codes_pack_call
from octavo.kernels.cpu.codes_pack_call import pack_codes, pack_rounded
from octavo.kernels.cpu.weight_only_layout import pack as twin

ROUND = {4: round_to_codes, 8: round_to_bytes}
GROUPS = {4: 32, 8: 64}
SHAPES = [(1, 64), (32, 128), (70, 1088), (33, 2112)]


def values(rows, columns, seed=0):
    made = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    made[0, :40] = 0.0
    made[-1, -32:] = -1.5
    return made * torch.logspace(-3, 3, rows).unsqueeze(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [4, 8])
def test_rounded_values_equal_the_twin(bits, dtype):
    for shape in SHAPES:
        weight = values(*shape).to(dtype)
        wanted = twin(as_grouped(ROUND[bits](weight, GROUPS[bits])))
        assert same(pack_rounded(weight, bits, GROUPS[bits]), wanted)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_of_zeros_and_rows_with_gaps(bits):
    for weight in (torch.zeros(3, 64), values(40, 256)[:37, 64:192]):
        wanted = twin(as_grouped(ROUND[bits](weight, GROUPS[bits])))
        assert same(pack_rounded(weight, bits, GROUPS[bits]), wanted)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_not_a_number_stays_none(bits):
    """In the terms of its group, so that the answer says so."""
    weight = values(4, 128)
    weight[2, 97] = float("nan")
    terms = pack_rounded(weight, bits, GROUPS[bits]).terms.float()
    group = 97 // GROUPS[bits]
    assert terms[0, group, 0, 2].isnan()
    terms[0, group, :, 2] = 0
    assert not terms.isnan().any()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, 32, 128, 0])
def test_codes_equal_the_twin(bits, group):
    for rows, columns in SHAPES:
        each = group or columns
        count = -(-columns // each)
        generator = torch.Generator().manual_seed(rows)
        codes = torch.randint(0, 2**bits, (rows, columns), generator=generator, dtype=torch.uint8)
        scale = torch.rand(rows, count, generator=generator).half().float() + 0.5
        zero = torch.randint(0, 2**bits, (rows, count), generator=generator)
        given = Codes(codes, scale, -zero * scale, each, bits)
        assert same(pack_codes(given), twin(as_grouped(given)))


def test_rows_of_parts_of_groups_are_left_to_torch(monkeypatch):
    def kernel(*_):
        raise AssertionError("the kernels take whole groups")

    monkeypatch.setattr(codes_pack_call, "kernel", kernel)
    weight = values(5, 72)
    assert same(pack_rounded(weight, 4, 32), twin(as_grouped(round_to_codes(weight))))
    codes = Codes(
        torch.ones((5, 40), dtype=torch.uint8), torch.ones(5, 1), torch.zeros(5, 1), 40, 4
    )
    assert same(pack_codes(codes), twin(as_grouped(codes)))
