"""Codes on AMX: to the bit what the decoded weight gives there, in any company."""

import ctypes
from pathlib import Path

import pytest
import torch
from tests.kernels.cpu.test_gguf import KINDS, stored
from tests.kernels.cpu.test_weight_only import FORMS, INT4, check, inputs, named, product
from tests.kernels.cpu.test_weight_only_layout import drawn
from tests.models import toys

from octavo.kernels.codes import Form, GroupedCodes, StoredMatrix, StoredRows, linear
from octavo.kernels.cpu import openmp, target
from octavo.kernels.cpu.gemm_bf16_call import TiledWeight
from octavo.kernels.cpu.gemm_int8_call import Workspace
from octavo.kernels.cpu.stored import GatedOnly, make_product
from octavo.kernels.cpu.weight_only_call import WeightOnly
from octavo.kernels.cpu.weight_only_layout import pack
from octavo.quant.gguf import BLOCKS
from octavo.quant.tensors import decode_into

pytestmark = pytest.mark.skipif(not target.has_tiles(), reason="no AMX here")

BF16 = torch.bfloat16
ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 70)
MOST = 1100  # more than the rows of a work item


def decoded(weight: GroupedCodes) -> torch.Tensor:
    return weight.dequantized().bfloat16()


@pytest.mark.parametrize("form", FORMS, ids=named)
def test_it_is_the_product_of_the_decoded_weight_to_the_bit(form: Form) -> None:
    """Also at one step of k, and at panels, rows and steps that a last work item has fewer of."""
    for n, k in ((1, 32), (33, 96), (100, 288), (544, 1056)):
        weight, bias = drawn(form, n, k), inputs(1, n, BF16, seed=5)[0]
        made, wanted = product(pack(weight), BF16, bias), TiledWeight(decoded(weight), bias)
        x = inputs(max(ROWS), k, BF16)
        for rows in ROWS:
            assert torch.equal(made(x[:rows]), wanted(x[:rows])), (n, k, rows)
        check(made(x), x.double() @ decoded(weight).double().T + bias.double())


@pytest.mark.parametrize("k", [8, 16, 33, 100, 600])
def test_sizes_that_are_no_whole_steps(k: int) -> None:
    weight, workspace = drawn(INT4, 70, k), Workspace()
    made, values = WeightOnly(pack(weight), None, BF16, workspace), decoded(weight).double()
    wide = torch.full((40, 700), torch.nan, dtype=BF16)
    wide[:, 9 : 9 + k] = x = inputs(40, k, BF16)
    for rows in (1, 17, 40):  # what scratch and the memory around the rows hold does not matter
        ctypes.memset(workspace.memory(1 << 20), 0xFF, 1 << 20)
        check(made(wide[:rows, 9 : 9 + k]), x[:rows].double() @ values.T)
    assert torch.equal(made(x[:7]), made(x)[:7])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_whatever_the_batch_and_on_any_threads(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = drawn(INT4, 160, 96), inputs(MOST, 96, BF16)
    whole = TiledWeight(decoded(weight))(x)
    monkeypatch.setattr(openmp, "threads", lambda: threads)
    made = product(pack(weight), BF16)
    for rows in (*range(1, 71), 1024, 1025, MOST):
        assert torch.equal(made(x[-rows:].contiguous()), whole[-rows:]), rows


@pytest.mark.parametrize(
    "form",
    [Form(4, group, "half", "minimum", linear(4, 0)) for group in (16, 32, 48, 80, 256, 1024)],
    ids=lambda form: str(form.group),
)
def test_groups_of_any_size(form: Form) -> None:
    """Chunks of them are whole steps of k; the last one may be shorter."""
    for k in (96, 480, 2080):
        weight, x = drawn(form, 40, k), inputs(33, k, BF16)
        made, wanted = product(pack(weight), BF16), TiledWeight(decoded(weight))
        for rows in (3, 33):
            assert torch.equal(made(x[:rows]), wanted(x[:rows])), (k, rows)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_activation_of_a_gated_mlp_is_fused(activation: str) -> None:
    for inner in (16, 48, 160):
        weight, x = drawn(INT4, 2 * inner, 96), inputs(61, 96, BF16)
        fused = product(pack(weight), BF16).gated(activation)
        wanted = TiledWeight(decoded(weight)).gated(activation)
        assert fused is not None
        assert wanted is not None
        for rows in (1, 20, 61):
            assert torch.equal(fused(x[:rows]), wanted(x[:rows])), (inner, rows)
        bias = torch.ones(2 * inner)
        biased = product(pack(weight), BF16, bias).gated(activation)
        assert biased is not None
        assert not torch.equal(biased(x), fused(x))


@pytest.mark.parametrize("name", KINDS)
def test_every_block_type_is_what_decoding_it_gives(name: str) -> None:
    kind, k, n = KINDS[name], 512, 64
    raw = stored(kind, n * k // kind.block_values).view(n, -1)
    rows = StoredRows(
        name, BLOCKS[name].form, raw, k, None,
        lambda out: decode_into(kind, raw.flatten(), out), lambda: None,
    )  # fmt: skip
    matrix, x = StoredMatrix((rows,)), inputs(40, k, BF16)
    wanted = TiledWeight(matrix.values(BF16))
    made = make_product(matrix, None, BF16, Workspace(), "", None)
    for count in (1, 40):
        assert torch.equal(made(x[:count]), wanted(x[:count])), count
    assert not torch.equal(made(x), TiledWeight(matrix.values(BF16).flip(0))(x))
    gated = make_product(matrix, None, BF16, Workspace(), "silu", None)
    assert isinstance(gated, GatedOnly)
    assert torch.equal(gated.gated("silu")(x), wanted.gated("silu")(x))


@pytest.mark.parametrize("tied", [False, True])
def test_a_file_computed_on_as_stored_answers_as_the_decoded_one(
    tied: bool, tmp_path: Path
) -> None:
    """To the bit, by default, at a prompt and at single tokens; with products of two types."""
    reference = toys.make(
        "llama", hidden_size=256, intermediate_size=256, num_hidden_layers=2, head_dim=64,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    path = toys.write_gguf(reference, tmp_path / "m.gguf", "Q4_K", others={"v_proj": "Q6_K"})
    as_stored, plain = toys.load(path, BF16), toys.load(path, BF16, quantization="none")
    assert "bfloat16 rows on AMX tiles" in as_stored.explain()["linear"]
    assert "stored" not in plain.explain()["linear"]
    found, wanted = (toys.Paged(model, dtype=BF16) for model in (as_stored, plain))
    for step in ([("a", toys.prompt(40))], [("a", [7]), ("b", toys.prompt(3))], [("b", [1])]):
        for ours, theirs in zip(found.step(step), wanted.step(step), strict=True):
            assert torch.equal(ours, theirs)


def test_rows_without_a_number_stay_by_themselves() -> None:
    made, x = product(pack(drawn(INT4, 64, 96)), BF16), inputs(40, 96, BF16)
    clean = made(x)
    x[17, 5], x[20, 6] = torch.nan, torch.inf
    found, others = made(x), [row for row in range(40) if row not in (17, 20)]
    assert found[17].isnan().all()
    assert not found[20].isfinite().any()
    assert torch.equal(found[others], clean[others])
