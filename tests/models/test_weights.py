"""Parameters from stored tensors: the architecture says which are products, of any number of
dimensions."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.quant import packers

from octavo.checkpoint.base import Checkpoint, StoredTensor, TensorFormat
from octavo.checkpoint.safetensors import SAFETENSORS
from octavo.errors import CheckpointError
from octavo.models.sharding import REPLICATED, WHOLE, Cut, Shard, Span, column, row
from octavo.models.weights import Weights
from octavo.quant.awq import Awq
from octavo.quant.base import INT4, NONE, Codes, StoredPart
from octavo.quant.gptq import Gptq

HEAD, EMBEDDING = "lm_head.weight", "embed.weight"
NAMES = {torch.float32: "F32", torch.int32: "I32", torch.int64: "I64", torch.uint8: "U8",
         torch.float16: "F16"}  # fmt: skip


def stored(tensor: torch.Tensor) -> StoredTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    form = TensorFormat(NAMES[tensor.dtype], 1, tensor.dtype.itemsize, dtype)
    return StoredTensor(Path("a file"), tuple(tensor.shape), form, tensor.contiguous)


def weights(
    shapes: dict[str, tuple[int, ...]],
    products: set[str],
    quantization: Any,
    tied: bool = True,
    device: str = "cpu",
    upload: Any = None,
    cut: Cut = REPLICATED,
    shard: Shard = WHOLE,
    **tensors: Any,
) -> Weights:
    """Of an architecture with these parameters; "." in a tensor's name is "__" here.

    cut: of every parameter.
    """
    architecture: Any = SimpleNamespace(
        HEAD=HEAD,
        EMBEDDING=EMBEDDING,
        parameter_shapes=lambda spec: shapes,
        parameter_cuts=lambda spec: dict.fromkeys(shapes, cut),
        product_weights=lambda spec: frozenset(products),
        parameter_name=lambda spec, name: name,
    )
    spec: Any = SimpleNamespace(tie_embeddings=tied, quantization=quantization)
    held = {name.replace("__", "."): stored(tensor) for name, tensor in tensors.items()}
    checkpoint = Checkpoint(Path("a"), (Path("a file"),), SAFETENSORS, held, {})
    return Weights(
        spec, architecture, checkpoint, device, torch.float32, shard=shard, upload=upload
    )


def experts(parts_of: Any, **options: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Three matrices as a stack of each part, and their values [3 * N, K]."""
    made = [parts_of(seed=seed, **options) for seed in range(3)]
    parts = {f"experts__{name}": torch.stack([p[name] for p, _ in made]) for name in made[0][0]}
    return parts, torch.cat([values for _, values in made])


SHAPE = (3, packers.N, packers.K)


@pytest.mark.parametrize(
    ("quantization", "parts_of"),
    [(Awq(4, 32), packers.awq_parts), (Gptq(4, 32), packers.gptq_parts)],
)
def test_a_quantized_stack_of_matrices_is_codes_row_by_row(
    quantization: Any, parts_of: Any
) -> None:
    parts, values = experts(parts_of)
    found = weights({"experts.weight": SHAPE}, {"experts.weight"}, quantization, **parts)
    codes = found.matrix(INT4, "experts.weight")
    assert isinstance(codes, Codes)
    torch.testing.assert_close(codes.values(), values, rtol=1e-5, atol=1e-6)


def test_a_quantized_stack_that_no_kernel_computes_on_is_values() -> None:
    order = torch.randperm(packers.K, generator=torch.Generator().manual_seed(1)) % 3
    parts, values = experts(packers.gptq_parts, order=order)
    quantization = Gptq(4, 32, any_order=True)
    found = weights({"experts.weight": SHAPE}, {"experts.weight"}, quantization, **parts)
    torch.testing.assert_close(found.matrix(NONE, "experts.weight"), values, rtol=1e-5, atol=1e-6)


def test_a_head_that_is_stored_quantized_is_found() -> None:
    parts, values = packers.awq_parts()
    tensors = {f"lm_head__{name}": part for name, part in parts.items()}
    shapes = {HEAD: (packers.N, packers.K)}
    codes = weights(shapes, {HEAD}, Awq(4, 32), tied=False, **tensors).matrix(NONE, HEAD)
    assert isinstance(codes, Codes)
    torch.testing.assert_close(codes.values(), values, rtol=1e-5, atol=1e-6)
    del tensors["lm_head__scales"]
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.scales"):
        weights(shapes, {HEAD}, Awq(4, 32), tied=False, **tensors)
    with pytest.raises(CheckpointError, match=r"holds no 'lm_head\.weight'"):
        weights(shapes, {HEAD}, Awq(4, 32), tied=False)


def test_a_stack_of_floats_is_one_matrix() -> None:
    values = torch.randn(3, 4, 8)
    found = weights({"experts.weight": (3, 4, 8)}, {"experts.weight"}, None, experts__weight=values)
    assert torch.equal(found.matrix(NONE, "experts.weight"), values.view(12, 8))


def test_a_stack_with_a_part_of_another_shape_is_named() -> None:
    parts, _ = experts(packers.awq_parts)
    parts["experts__scales"] = parts["experts__scales"][:2]
    with pytest.raises(CheckpointError, match=r"experts\.scales' has the shape \(2, 3, 16\), not"):
        weights({"experts.weight": SHAPE}, {"experts.weight"}, Awq(4, 32), **parts)


def test_two_dimensions_do_not_make_a_product() -> None:
    """What the architecture does not call a product is never looked for in parts."""
    parts, _ = packers.awq_parts()
    tensors = {f"table__{name}": part for name, part in parts.items()}
    with pytest.raises(
        CheckpointError, match=r"missing: table\.weight; unexpected: table\.qweight"
    ):
        weights({"table.weight": (packers.N, packers.K)}, set(), Awq(4, 32), **tensors)


def test_integers_are_read_as_integers_that_can_hold_them() -> None:
    parts, _ = packers.awq_parts()
    tensors = {f"a__{name}": part for name, part in parts.items()}
    tensors["a__qzeros"] = parts["qzeros"].long()
    with pytest.raises(CheckpointError, match=r"'a\.qzeros' has the type I64"):
        weights({"a.weight": (packers.N, packers.K)}, {"a.weight"}, Awq(4, 32), **tensors)


@dataclass(frozen=True)
class Scaled:
    """A format one of whose parts is called "weight", too."""

    METHOD = "scaled"
    computed_as = NONE

    def parts(self, shape: tuple[int, ...]) -> dict[str, StoredPart]:
        return {
            "weight": StoredPart(shape, torch.uint8),
            "weight_scale": StoredPart((shape[0], 1), torch.float32),
        }

    def decode(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        return parts["weight"].float() * parts["weight_scale"]


def test_codes_are_moved_to_the_device() -> None:
    parts, _ = packers.awq_parts()
    parts = {f"a__{name}": part for name, part in parts.items()}
    found = weights(
        {"a.weight": (packers.N, packers.K)}, {"a.weight"}, Awq(4, 32), device="meta",
        **parts,
    )  # fmt: skip
    codes = found.matrix(INT4, "a.weight")
    assert isinstance(codes, Codes)
    for tensor in (codes.codes, codes.scale, codes.minimum):
        assert tensor.device.type == "meta"


def test_codes_and_values_are_uploaded_in_pieces() -> None:
    def upload(out: torch.Tensor, read: Any) -> None:
        for begin in range(0, len(out), 3):
            host = torch.empty_like(out[begin : begin + 3])
            read(begin, begin + len(host), host)
            out[begin : begin + 3] = host
        asked.append(len(out))

    asked: list[int] = []
    parts, values = packers.awq_parts()
    stored = {f"a__{name}": part for name, part in parts.items()}
    wide = torch.randn(7, 5)
    shapes = {"a.weight": (packers.N, packers.K), "b.weight": (7, 5)}
    found = weights(shapes, {"a.weight"}, Awq(4, 32), upload=upload, **stored, b__weight=wide)
    codes = found.matrix(INT4, "a.weight")
    assert isinstance(codes, Codes)
    torch.testing.assert_close(codes.values(), values, rtol=1e-5, atol=1e-6)
    assert torch.equal(found.take("b.weight"), wide)
    assert asked == [packers.N] * 3 + [7]


def test_a_part_may_have_the_name_of_the_weight() -> None:
    shapes = {"a.weight": (2, 3), "b.weight": (2, 3)}
    whole, scale, plain = (
        torch.arange(6, dtype=torch.uint8).view(2, 3),
        torch.rand(2, 1),
        torch.rand(2, 3),
    )
    found = weights(
        shapes, set(shapes), Scaled(), a__weight=whole, a__weight_scale=scale, b__weight=plain
    )
    assert torch.equal(
        found.matrix(NONE, "a.weight", "b.weight"), torch.cat([whole * scale, plain])
    )
    with pytest.raises(CheckpointError, match=r"'b\.weight' has the type U8"):
        weights(shapes, set(shapes), Scaled(), a__weight=whole, a__weight_scale=scale,
                b__weight=whole)  # fmt: skip


# Outputs in two units and inputs in three, as heads are.
OUTPUTS, INPUTS = Span(packers.N, 2, "outputs"), Span(packers.K, 3, "inputs")
FORMATS = [
    (Awq(4, 32), packers.awq_parts, {}),
    (Awq(4, 0), packers.awq_parts, {"group": packers.K}),
    (Gptq(4, 32), packers.gptq_parts, {}),
    (Gptq(8, 32, zeros_less_one=False), packers.gptq_parts, {"bits": 8, "v2": True}),
    (Gptq(4, 0), packers.gptq_parts, {"group": packers.K}),
    (
        Gptq(4, 32, any_order=True),
        packers.gptq_parts,
        {"order": torch.randperm(packers.K, generator=torch.Generator().manual_seed(2)) % 3},
    ),
]


def held(found: torch.Tensor | Codes) -> torch.Tensor:
    return found.values() if isinstance(found, Codes) else found


@pytest.mark.parametrize(("quantization", "parts_of", "options"), FORMATS)
def test_a_rank_has_its_part_of_a_quantized_weight(
    quantization: Any, parts_of: Any, options: Any
) -> None:
    """Of a matrix and of a stack of them, in codes wherever the whole is in codes."""
    single, values = parts_of(**options)
    stack, all_values = experts(parts_of, **options)
    tensors = {**{f"one__{name}": part for name, part in single.items()}, **stack}
    shapes = {"one.weight": SHAPE[1:], "experts.weight": SHAPE}

    def part(cut: Cut, shard: Shard, name: str) -> torch.Tensor | Codes:
        found = weights(shapes, set(shapes), quantization, cut=cut, shard=shard, **tensors)
        return found.matrix(INT4, name)

    kind = type(part(REPLICATED, WHOLE, "one.weight"))
    for cut, size, dim in ((column(OUTPUTS), 2, 1), (row(INPUTS), 3, 2)):
        for rank in range(size):
            one = part(cut, Shard(rank, size), "one.weight")
            wanted = values.chunk(size, dim - 1)[rank]
            assert type(one) is kind
            torch.testing.assert_close(held(one), wanted, rtol=1e-5, atol=1e-6)
            several = part(cut, Shard(rank, size), "experts.weight")
            wanted = all_values.view(SHAPE).chunk(size, dim)[rank].flatten(0, 1)
            torch.testing.assert_close(held(several), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("cut", "size", "dim"), [(column(OUTPUTS), 2, 0), (row(INPUTS), 3, 1)])
def test_a_format_that_does_not_say_how_it_is_cut_is_read_whole(
    cut: Cut, size: int, dim: int
) -> None:
    shape = SHAPE[1:]
    whole = torch.arange(packers.N * packers.K).remainder(251).to(torch.uint8).view(shape)
    scale = torch.rand(packers.N, 1)
    for rank in range(size):
        found = weights(
            {"a.weight": shape}, {"a.weight"}, Scaled(), cut=cut, shard=Shard(rank, size),
            a__weight=whole, a__weight_scale=scale,
        )  # fmt: skip
        wanted = (whole * scale).chunk(size, dim)[rank]
        assert torch.equal(found.matrix(NONE, "a.weight"), wanted)


def test_a_rank_has_its_part_of_a_stack_of_floats() -> None:
    values = torch.randn(SHAPE)
    for cut, size, dim in ((column(OUTPUTS), 2, 1), (row(INPUTS), 3, 2)):
        found = weights({"a.weight": SHAPE}, {"a.weight"}, None, cut=cut, shard=Shard(1, size),
                        a__weight=values)  # fmt: skip
        assert torch.equal(found.take("a.weight"), values.chunk(size, dim)[1])
