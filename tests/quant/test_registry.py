"""Which format a checkpoint is in, and whether the options agree with it."""

import pytest
from tests.quant.packers import awq_config, gptq_config

from octavo.errors import CheckpointError, ConfigError
from octavo.quant import registry
from octavo.quant.awq import Awq
from octavo.quant.registry import check_agrees, describe, methods, register_quantization


def test_the_method_names_the_format() -> None:
    assert describe(awq_config(), "config.json").METHOD == "awq"
    assert describe(gptq_config(), "config.json").METHOD == "gptq"
    assert methods() == ["awq", "gptq", "fp8", "compressed-tensors"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"quant_method": "bitsandbytes"},
            r"c\.json: .* 'bitsandbytes' are not supported \(known: awq, gptq, fp8, ",
        ),
        ({}, "quantized with None are not supported"),
        ({"quant_method": ["awq"]}, "are not supported"),
        ("awq", r"c\.json: quantization_config is 'awq', not an object"),
    ],
)
def test_an_unknown_format_lists_the_known(config: object, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        describe(config, "c.json")


def test_an_option_that_disagrees_with_the_checkpoint() -> None:
    form = describe(awq_config(), "config.json")
    check_agrees(None, form)
    check_agrees("awq", form)
    check_agrees("int8", None)
    check_agrees("fp8", None)
    with pytest.raises(ConfigError, match=r"'fp8', but .* with 'awq' already"):
        check_agrees("fp8", form)
    with pytest.raises(ConfigError, match=r"'int4', but .* with 'awq' already"):
        check_agrees("int4", form)
    with pytest.raises(ConfigError, match=r"'gptq' is for .* this one holds weights of 'awq'"):
        check_agrees("gptq", form)
    with pytest.raises(ConfigError, match=r"'awq' is for .* this one holds no quantized weights"):
        check_agrees("awq", None)
    with pytest.raises(
        ConfigError, match=r"id that ends in -AWQ.*int4 and int8 quantize any model"
    ):
        check_agrees("awq", None)


def test_a_name_that_is_taken_and_a_class_that_is_not_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    with pytest.raises(ConfigError, match="'awq' is taken or empty"):
        register_quantization(Awq)

    class Half:
        METHOD = "half"
        parts = Awq.parts

    with pytest.raises(ConfigError, match="'half' lacks from_config, computed_as, explain, decode"):
        register_quantization(Half)  # type: ignore[arg-type]
    assert methods() == ["awq", "gptq", "fp8", "compressed-tensors"]
