"""Products and tables of stored rows, against the values that the rows stand for."""

import torch
from tests.kernels.cpu.test_gguf import KINDS, stored

from octavo.kernels.codes import StoredMatrix, StoredRows
from octavo.kernels.cpu.gemm_int8_call import Workspace
from octavo.kernels.cpu.stored import GatedOnly, make_product, make_table
from octavo.quant.gguf import BLOCKS
from octavo.quant.tensors import decode_into

K = 64


def rows_of(name: str, count: int, released: list[str]) -> StoredRows:
    kind = KINDS[name]
    raw = stored(kind, count * K // 32).view(count, -1)
    raw[:, 1 :: kind.block_bytes] &= 0x2F  # scales below 1
    return StoredRows(
        name, BLOCKS[name].form, raw, K, None,
        lambda out: decode_into(kind, raw.flatten(), out), lambda: released.append(name),
    )  # fmt: skip


def test_columns_of_several_types_are_one_product() -> None:
    released: list[str] = []
    parts = [rows_of("Q5_0", n, released) for n in (40, 33)] + [rows_of("Q8_0", 31, released)]
    weight, bias = StoredMatrix(tuple(parts)), torch.randn(104)
    assert [len(run) for run in weight.runs] == [2, 1]
    wanted = weight.values(torch.float32).double()
    product = make_product(weight, bias, torch.float32, Workspace(), "", None)
    assert released == ["Q5_0", "Q5_0", "Q8_0"]
    x = torch.randn(7, K)
    exact = x.double() @ wanted.T + bias.double()
    torch.testing.assert_close(product(x).double(), exact, rtol=1e-5, atol=1e-5 * float(
        exact.abs().max()
    ))  # fmt: skip
    assert product.num_bytes > 104 * K * 5 // 8


def test_gate_and_up_are_laid_out_for_their_activation() -> None:
    parts = tuple(rows_of("Q5_0", 32, []) for _ in range(2))
    weight, bias = StoredMatrix(parts), torch.randn(64)
    made = make_product(weight, bias, torch.float32, Workspace(), "silu", None)
    assert isinstance(made, GatedOnly)
    x = torch.randn(3, K) / 100
    gate, up = (x @ weight.values(torch.float32).T + bias).split(32, dim=1)
    wanted = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(made.gated("silu")(x), wanted, rtol=1e-4, atol=1e-4)


def test_a_table_gives_rows_and_products_of_the_same_memory() -> None:
    rows = rows_of("Q5_0", 70, [])
    table = make_table(StoredMatrix((rows,)), torch.float32, Workspace(), None)
    values, ids = StoredMatrix((rows,)).values(torch.float32), torch.tensor([69, 0, 33])
    assert torch.equal(table.rows(ids, torch.empty(3, K)), values[ids])
    x = torch.randn(2, K)
    found, wanted = table.product(32, 70)(x), x @ values[32:].T
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    assert torch.equal(StoredMatrix((rows,)).rows(32, 70).values(torch.float32), values[32:])
