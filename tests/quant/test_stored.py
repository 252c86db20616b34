"""AWQ and GPTQ tensors, packed here bit by bit, give the values that they stand for."""

import pytest
import torch

from octavo.errors import CheckpointError, ConfigError
from octavo.quant.base import Codes
from octavo.quant.stored import check_agrees, stored_format

N, K = 16, 96
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def word(values, bits):
    """Unsigned values into one int32, the first in the lowest bits."""
    whole = sum(int(v) << (bits * i) for i, v in enumerate(values))
    return whole - 2**32 if whole >= 2**31 else whole


def awq_packed(values):
    """[rows, N] -> int32 [rows, N / 8], eight columns a word in AutoAWQ's order."""
    return torch.tensor(
        [
            [word([row[c + j] for j in AWQ_COLUMNS], 4) for c in range(0, len(row), 8)]
            for row in values.tolist()
        ],
        dtype=torch.int32,
    )


def gptq_packed(values, bits):
    """[rows, n] -> int32 [rows, n * bits / 32], neighbours in a word in their own order."""
    each = 32 // bits
    return torch.tensor(
        [
            [word(row[c : c + each], bits) for c in range(0, len(row), each)]
            for row in values.tolist()
        ],
        dtype=torch.int32,
    )


def drawn(bits, groups, seed=0):
    """Codes [K, N], zero points and scales [groups, N]."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (K, N), generator=g)
    zeros = torch.randint(1, 2**bits, (groups, N), generator=g)
    return codes, zeros, (torch.rand(groups, N, generator=g) / 50).half()


def awq_parts(group=32, seed=0):
    codes, zeros, scales = drawn(4, K // group, seed)
    parts = {"qweight": awq_packed(codes), "qzeros": awq_packed(zeros), "scales": scales}
    index = torch.arange(K) // group
    return parts, ((codes - zeros[index]) * scales.float()[index]).T


def gptq_parts(bits=4, group=32, v2=False, order=None, seed=0):
    codes, zeros, scales = drawn(bits, K // group, seed)
    index = torch.arange(K) // group if order is None else order
    parts = {
        "qweight": gptq_packed(codes.T, bits).T.contiguous(),
        "qzeros": gptq_packed(zeros - (0 if v2 else 1), bits),
        "scales": scales,
        "g_idx": index.int(),
    }
    return parts, ((codes - zeros[index]) * scales.float()[index]).T


def awq_config(**changes):
    return {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True,
            "version": "gemm", **changes}  # fmt: skip


def gptq_config(**changes):
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True,
            **changes}  # fmt: skip


def test_awq():
    kind = stored_format(awq_config(), "config.json")
    parts, values = awq_parts()
    shapes = {name: tuple(part.shape) for name, part in parts.items()}
    assert shapes == kind.parts(N, K)
    codes = kind.codes(parts)
    assert isinstance(codes, Codes)
    assert (codes.group, codes.bits, kind.computed_as) == (32, 4, "int4")
    torch.testing.assert_close(codes.values(), values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("v2", [False, True])
def test_gptq(bits, v2):
    changes = {"checkpoint_format": "gptq_v2"} if v2 else {}
    kind = stored_format(gptq_config(bits=bits, **changes), "config.json")
    parts, values = gptq_parts(bits, v2=v2)
    assert {name: tuple(part.shape) for name, part in parts.items()} == kind.parts(N, K)
    codes = kind.codes(parts)
    assert isinstance(codes, Codes)
    assert (codes.bits, kind.computed_as) == (bits, "int4" if bits == 4 else "int8")
    torch.testing.assert_close(codes.values(), values, rtol=1e-5, atol=2e-6)


def test_one_group_for_all_inputs():
    kind = stored_format(gptq_config(group_size=-1), "config.json")
    parts, values = gptq_parts(group=K)
    assert {name: tuple(part.shape) for name, part in parts.items()} == kind.parts(N, K)
    torch.testing.assert_close(kind.codes(parts).values(), values, rtol=1e-5, atol=1e-6)


def test_groups_in_any_order_become_values():
    order = torch.randperm(K, generator=torch.Generator().manual_seed(1)) % (K // 32)
    kind = stored_format(gptq_config(desc_act=True), "config.json")
    assert kind.computed_as == "none"
    assert "expanded" in kind.explain()
    parts, values = gptq_parts(order=order)
    found = kind.codes(parts)
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, values, rtol=1e-5, atol=1e-6)


def test_a_group_that_does_not_exist():
    parts, _ = gptq_parts()
    parts["g_idx"][5] = 3
    with pytest.raises(CheckpointError, match="groups 0 to 3; there are 3"):
        stored_format(gptq_config(), "config.json").codes(parts)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"quant_method": "bitsandbytes"},
            r"'bitsandbytes' are not supported \(known: awq, gptq\)",
        ),
        ("awq", "not an object"),
        (awq_config(bits=3), "bits is 3; it must be 4"),
        (awq_config(version="gemv"), "version is 'gemv'; it must be 'gemm'"),
        (awq_config(group_size=0), "group_size is 0"),
        (awq_config(group_size=None), "group_size is None"),
        (gptq_config(bits=2), "bits is 2; it must be 4 or 8"),
        (gptq_config(checkpoint_format="marlin"), "checkpoint_format is 'marlin'"),
        (gptq_config(desc_act="no"), "desc_act is 'no'"),
    ],
)
def test_what_is_not_known_is_refused_by_name(config, said):
    with pytest.raises(CheckpointError, match=said):
        stored_format(config, "config.json")


def test_groups_that_no_kernel_computes_on_are_expanded():
    kind = stored_format(awq_config(group_size=16), "config.json")
    assert kind.computed_as == "none"
    assert "groups of 16" in kind.explain()


def test_an_option_that_disagrees_with_the_checkpoint():
    kind = stored_format(awq_config(), "config.json")
    check_agrees(None, kind)
    check_agrees("awq", kind)
    check_agrees("int8", None)
    with pytest.raises(ConfigError, match=r"'int4', but .* with 'awq' already"):
        check_agrees("int4", kind)
    with pytest.raises(ConfigError, match=r"'gptq' is how .* holds weights of 'awq'"):
        check_agrees("gptq", kind)
    with pytest.raises(ConfigError, match=r"'awq' is how .* no quantized weights"):
        check_agrees("awq", None)
