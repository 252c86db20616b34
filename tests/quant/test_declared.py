"""How a checkpoint says that it is quantized: each quantizer's file and spelling, one reader."""

from typing import Any

import pytest

from octavo.errors import CheckpointError
from octavo.quant.declared import declared
from octavo.quant.registry import describe

SOURCE = "m/config.json"
AUTOGPTQ = {"bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": False, "sym": True,
            "static_groups": False, "true_sequential": True, "model_name_or_path": None,
            "model_file_base_name": "model"}  # fmt: skip
AUTOAWQ = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
TODAY = {"awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True,
                 "version": "gemm", "modules_to_not_convert": None},
         "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False,
                  "sym": True, "checkpoint_format": "gptq"}}  # fmt: skip


@pytest.mark.parametrize(
    ("method", "config", "files"),
    [
        ("awq", TODAY["awq"], {}),
        ("awq", None, {"quant_config.json": AUTOAWQ}),
        ("awq", TODAY["awq"], {"quant_config.json": AUTOAWQ}),
        (
            "awq",
            {
                "bits": 4,
                "group_size": 128,
                "quant_method": "awq",
                "format": "gemm",
                "zero_point": True,
            },
            {},
        ),
        ("gptq", TODAY["gptq"], {}),
        ("gptq", None, {"quantize_config.json": AUTOGPTQ}),
        ("gptq", TODAY["gptq"], {"quantize_config.json": AUTOGPTQ}),
        ("gptq", None, {"quantize_config.json": {"wbits": 4, "groupsize": 128}}),
        ("awq", None, {"quantize_config.json": {**AUTOAWQ, "quant_method": "awq"}}),
    ],
)
def test_every_place_and_spelling_gives_the_same(
    method: str, config: Any, files: dict[str, Any]
) -> None:
    found = describe(declared(SOURCE, config, files), SOURCE)
    assert found == describe(TODAY[method], SOURCE)


def test_nothing_said_is_nothing_quantized() -> None:
    assert declared(SOURCE, None, {}) is None


@pytest.mark.parametrize(
    ("config", "files", "said"),
    [
        (TODAY["gptq"], {"quantize_config.json": {**AUTOGPTQ, "group_size": 64}},
         r"quantization_config.group_size is 128, but quantize_config.json .*says 64"),
        (TODAY["awq"], {"quant_config.json": {**AUTOAWQ, "w_bit": 8}}, r"bits is 4, but quant_con"),
        (None, {"quant_config.json": AUTOAWQ, "quantize_config.json": AUTOGPTQ},
         "quant_method is"),
        (None, {"quant_config.json": {**AUTOAWQ, "bits": 8}}, "bits is there twice: 4, 8"),
        (TODAY["gptq"], {"quantize_config.json": {"quant_method": "awq"}}, "_method is 'gptq'"),
        ({**TODAY["awq"], "format": "gemv"}, {}, "version is 'gemm', but checkpoint_format 'gemv'"),
        ({**TODAY["awq"], "version": "gemv"}, {}, "version is 'gemv'"),
        ({**TODAY["gptq"], "is_marlin_format": True}, {}, "is_marlin_format is True"),
        ({**TODAY["gptq"], "dynamic": {"-:.*": {}}}, {}, "dynamic is"),
        ({**TODAY["gptq"], "pack_dtype": "int16"}, {}, "pack_dtype is 'int16'"),
    ],
)  # fmt: skip
def test_what_contradicts_or_is_not_served_is_named(
    config: Any, files: dict[str, Any], said: str
) -> None:
    if len(files) == 2:
        files = {**files, "quant_config.json": {**AUTOAWQ, "quant_method": "awq"}}
        files["quantize_config.json"] = {**AUTOGPTQ, "quant_method": "gptq"}
    with pytest.raises(CheckpointError, match=said):
        describe(declared(SOURCE, config, files), SOURCE)
