"""Rows that are looked up in packed codes, against the whole weight dequantized."""

import pytest
import torch
from tests.kernels.cpu.test_weight_only_layout import drawn

from octavo.kernels.codes import LEVELS, Form, linear
from octavo.kernels.cpu import abi
from octavo.kernels.cpu.kernel import address, kernel
from octavo.kernels.cpu.weight_only_layout import BLOCK, pack

FORMS = [
    (Form(4, 32, "super", "none", LEVELS), "float32"),
    (Form(4, 16, "super", "minimum", linear(4, 0)), "bfloat16"),
    (Form(5, 32, "half", "minimum", linear(5, 0)), "float32"),
    (Form(6, 16, "super", "none", linear(6, -32)), "bfloat16"),
    (Form(8, 32, "half", "none", linear(8, -128)), "float32"),
]


@pytest.mark.parametrize(("form", "dtype"), FORMS, ids=str)
def test_rows_equal_those_of_the_whole_to_the_bit(form: Form, dtype: str) -> None:
    for n, k in ((70, 512), (33, 48)):
        weight = drawn(form, n, k)
        packed = pack(weight)
        wanted = weight.dequantized().to(getattr(torch, dtype))
        ids = torch.tensor([n - 1, 0, 31, 32, 17, 17])
        out = torch.full((6, k + 3), 7.0, dtype=wanted.dtype)
        table, factors = torch.tensor(form.values, dtype=torch.float32), packed.factors
        arguments = abi.CODE_ROWS.packer()(
            rows=6, ids=address(ids), out=address(out), out_stride=out.stride(0) * out.itemsize,
            columns=k, codes=address(packed.codes), terms=address(packed.terms),
            terms_size=packed.terms[0].numel() * packed.terms.itemsize,
            factors=0 if factors is None else address(factors),
            factors_size=0 if factors is None else factors[0].numel() * 2, table=address(table),
            blocks=packed.codes.shape[1], group_blocks=form.group // BLOCK,
        )  # fmt: skip
        name = f"{form.bits}-{form.terms}-{form.offset}-{dtype}"
        kernel(abi.CODE_ROWS, name).run(arguments, 2)
        assert torch.equal(out[:, :k], wanted[ids])
        assert bool((out[:, k:] == 7).all())
