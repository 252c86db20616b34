"""Which method serves which component."""

import pytest

from octavo.errors import ConfigError
from octavo.quant.base import quant_config

PARTS = ["layers.0.self_attn.qkv_proj", "layers.0.mlp.down_proj", "layers.11.mlp.down_proj",
         "lm_head"]  # fmt: skip


def methods(quantization, override=None):
    how = quant_config(quantization, override)
    how.check(PARTS)
    return [how.method(part) for part in PARTS]


def test_one_method_for_all_and_eight_bits_for_the_head_of_int4():
    assert methods(None) == ["none"] * 4
    assert methods("int8") == ["int8"] * 4
    assert methods("int4") == ["int4"] * 3 + ["int8"]


def test_the_last_override_that_fits_wins():
    found = methods("int4", "*.mlp.*=int8, layers.1*=none,lm_head=int4")
    assert found == ["int4", "int8", "none", "int4"]
    assert methods(None, "lm_head=int8") == ["none"] * 3 + ["int8"]


def test_an_unknown_method_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"'itn8' is not supported.*int8.*known: int8, int4"):
        quant_config("itn8", None)


@pytest.mark.parametrize("override", ["lm_head", "lm_head=", "=int8", "lm_head=int7"])
def test_an_override_that_says_nothing_is_refused(override):
    with pytest.raises(ConfigError, match="not PATTERN=METHOD with a method of none, int8, int4"):
        quant_config("int8", override)


def test_a_pattern_that_fits_nothing_names_what_there_is():
    with pytest.raises(ConfigError, match=r"'layers\.7\.\*'.*layers\.\*\.mlp\.down_proj.*lm_head"):
        methods("int8", "layers.7.*=none")
