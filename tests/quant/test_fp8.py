"""float8 tensors and their scales give the values that they stand for."""

import pytest
import torch

from octavo.errors import CheckpointError
from octavo.quant.base import Codes
from octavo.quant.registry import describe

N, K = 200, 300


def config(**changes: object) -> dict[str, object]:
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", **changes}


def compressed(**weights: object) -> dict[str, object]:
    fields = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False,
              "symmetric": True, **weights}  # fmt: skip
    groups = {"group_0": {"targets": ["Linear"], "weights": fields, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized",
            "config_groups": groups, "ignore": ["lm_head"]}  # fmt: skip


BLOCKS = config(weight_block_size=[128, 128])


@pytest.mark.parametrize(
    ("said", "name", "shape"),
    [
        (BLOCKS, "weight_scale_inv", (2, 3)),
        (compressed(strategy="block", block_structure=[128, 128]), "weight_scale", (2, 3)),
        (compressed(), "weight_scale", (N, 1)),
        (compressed(strategy="tensor"), "weight_scale", (1,)),
        (config(), "weight_scale", (1,)),
        (config(activation_scheme="static"), "weight_scale_inv", ()),
    ],
)
def test_codes(said: dict[str, object], name: str, shape: tuple[int, ...]) -> None:
    form = describe(said, "config.json")
    torch.manual_seed(0)
    weight, scale = torch.randn(N, K).to(torch.float8_e4m3fn), torch.rand(shape) + 0.5
    wanted = form.parts((N, K))
    for part, tensor in (("weight", weight), (name, scale)):
        assert tensor.shape in (wanted[part].shape, *wanted[part].also)
    codes = form.decode({"weight": weight, name: scale})
    assert isinstance(codes, Codes)
    assert (codes.are_floats, codes.group, form.computed_as) == (
        True, 128 if shape == (2, 3) else K, "fp8",
    )  # fmt: skip
    for n, k in ((0, 0), (127, 128), (128, 127), (199, 299), (130, 256)):
        at = (n // 128, k // 128) if shape == (2, 3) else (n, 0)[: len(shape)]
        factor = scale.reshape(-1)[0] if scale.numel() == 1 else scale[at]
        assert codes.values()[n, k] == weight[n, k].float() * factor


def test_a_scale_is_needed_and_only_one() -> None:
    form = describe(BLOCKS, "config.json")
    weight = torch.zeros(N, K).to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"weight_scale and weight_scale_inv.*neither"):
        form.decode({"weight": weight})
    both = dict.fromkeys(("weight_scale", "weight_scale_inv"), torch.ones(2, 3))
    with pytest.raises(CheckpointError, match=r"weight_scale and weight_scale_inv.*both"):
        form.decode({"weight": weight, **both})


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (config(fmt="e5m2"), "fmt is 'e5m2'; it must be 'e4m3'"),
        (config(activation_scheme="other"), "activation_scheme is 'other'"),
        (config(weight_block_size=[128]), "weight_block_size is .128.*of a block"),
        (config(weight_block_size=128), "weight_block_size is 128"),
        ({**compressed(), "format": "pack-quantized"}, "format is 'pack-quantized'"),
        ({**compressed(), "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is"),
        ({**compressed(), "config_groups": {}}, "config_groups is"),
        (compressed(num_bits=4), "num_bits is 4, not 8"),
        (compressed(type="int"), "type is 'int', not 'float'"),
        (compressed(strategy="group"), "strategy is 'group'"),
        (compressed(strategy="block"), "config_groups.*outputs and inputs of a block"),
    ],
)
def test_what_is_not_known_is_refused_by_name(said: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        describe(said, "config.json")


def test_groups_of_two_kinds_are_refused() -> None:
    one, other = compressed(), compressed(strategy="block", block_structure=[64, 64])
    assert isinstance(one["config_groups"], dict)
    assert isinstance(other["config_groups"], dict)
    one["config_groups"]["group_1"] = other["config_groups"]["group_0"]
    with pytest.raises(CheckpointError, match="scales of one kind"):
        describe(one, "config.json")


def test_a_stack_of_matrices_is_stored_as_stacks() -> None:
    parts = describe(BLOCKS, "config.json").parts((5, N, K))
    assert parts["weight"].shape == (5, N, K)
    assert parts["weight_scale_inv"].shape == (5, 2, 3)
