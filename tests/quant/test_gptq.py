"""GPTQ tensors give the values that they stand for."""

import pytest
import torch
from tests.quant.packers import K, N, gptq_config, gptq_parts, shapes

from octavo.errors import CheckpointError
from octavo.quant.base import Codes
from octavo.quant.gptq import Gptq
from octavo.quant.registry import describe


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("v2", [False, True])
def test_codes(bits: int, v2: bool) -> None:
    changes = {"checkpoint_format": "gptq_v2"} if v2 else {}
    form = describe(gptq_config(bits=bits, **changes), "config.json")
    parts, values = gptq_parts(bits, v2=v2)
    assert shapes(form.parts((N, K))) == shapes(parts)
    codes = form.decode(parts)
    assert isinstance(codes, Codes)
    assert (codes.bits, form.computed_as) == (bits, "int4" if bits == 4 else "int8")
    torch.testing.assert_close(codes.values(), values, rtol=1e-5, atol=2e-6)


def test_one_group_for_all_inputs() -> None:
    form = describe(gptq_config(group_size=-1), "config.json")
    parts, values = gptq_parts(group=K)
    assert shapes(form.parts((N, K))) == shapes(parts)
    codes = form.decode(parts)
    assert isinstance(codes, Codes)
    torch.testing.assert_close(codes.values(), values, rtol=1e-5, atol=1e-6)


def test_groups_in_any_order_become_values() -> None:
    order = torch.randperm(K, generator=torch.Generator().manual_seed(1)) % (K // 32)
    form = describe(gptq_config(desc_act=True), "config.json")
    assert form.computed_as == "none"
    assert form.explain().endswith("no kernel computes on groups in any order (desc_act)")
    parts, values = gptq_parts(order=order)
    found = form.decode(parts)
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, values, rtol=1e-5, atol=1e-6)


def test_a_group_that_does_not_exist() -> None:
    parts, _ = gptq_parts()
    parts["g_idx"][5] = 3
    with pytest.raises(CheckpointError, match="groups 0 to 3; there are 3"):
        Gptq(4, 32).decode(parts)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bits": 2}, "bits is 2; it must be 4 or 8"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"desc_act": "no"}, "desc_act is 'no'"),
    ],
)
def test_what_is_not_known_is_refused_by_name(changes: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        describe(gptq_config(**changes), "config.json")
