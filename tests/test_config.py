"""The configuration: checked once, and frozen."""

from dataclasses import FrozenInstanceError, fields

import pytest

from octavo.config import EngineConfig
from octavo.errors import ConfigError


def refused(cls=EngineConfig, **options):
    """The message of bad options; it names the field."""
    with pytest.raises(ConfigError) as caught:
        cls(**options)
    assert next(iter(options)) in str(caught.value)
    return str(caught.value)


def test_defaults_are_valid_and_each_field_is_explained():
    config = EngineConfig()
    for field in fields(config):
        assert field.metadata["help"], field.name
        assert getattr(config, field.name) == field.default


@pytest.mark.parametrize("field", [f.name for f in fields(EngineConfig)])
def test_wrong_types_are_refused(field):
    for value in (object(), [], b"x", 1j):
        refused(**{field: value})


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("model", ["smollm2", "a/b"], ["", "  ", None, 5]),
        ("dtype", ["auto", "bfloat16", "float16", "float32"], ["float8", "bf16", None]),
        ("device", ["auto", "cpu", "cuda", "cuda:1"], ["cuda:", "cpu:1", ""]),
        ("block_size", [8, 16, 128], [0, 15, 256, 16.0, True, "16"]),
        ("gpu_memory_utilization", [0.1, 1, 1.0], [0, -0.5, 1.01, float("nan"), "0.9", True]),
        ("swap_space", [0, 4, 0.5], [-1, float("inf"), float("nan")]),
        ("max_num_seqs", [1, 128], [0, -1, 1.5, None]),
        ("max_num_batched_tokens", [1, 2048], [0, None]),
        ("max_model_len", [None, 1, 4096], [0, -1, "4096"]),
        ("num_gpu_blocks_override", [None, 1], [0]),
        ("kv_cache_memory_bytes", [None, 1], [0]),
        ("max_waiting", [None, 0, 5], [-1]),
        ("enable_prefix_caching", [True, False], [1, 0, "true", None]),
        ("generation_config", ["auto", "octavo"], ["vllm"]),
        ("seed", [0, -1, None], [0.5, "1"]),
    ],
)
def test_ranges(field, good, bad):
    for value in good:
        assert getattr(EngineConfig(**{field: value}), field) == value
    for value in bad:
        assert repr(value) in refused(**{field: value}) or value in ("", "  ")


def test_messages_say_what_would_be_right():
    assert "one of (8, 16, 32, 64, 128)" in refused(block_size=15)
    assert "'auto', 'bfloat16', 'float16', 'float32'" in refused(dtype="fp16")
    assert "at least 1" in refused(max_num_seqs=0)


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'max_model_len'"):
        EngineConfig.from_options({"max_model_length": 5})
    with pytest.raises(ConfigError, match="did you mean 'block_size'"):
        EngineConfig().with_(blocksize=16)


def test_a_value_is_frozen_and_a_changed_one_is_checked():
    config = EngineConfig(max_num_seqs=4)
    with pytest.raises(FrozenInstanceError):
        config.max_num_seqs = 8
    assert config.with_(block_size=32) == EngineConfig(max_num_seqs=4, block_size=32)
    with pytest.raises(ConfigError):
        config.with_(block_size=3)


def test_waiting_limit():
    assert EngineConfig(max_num_seqs=10).waiting_limit == 1064
    assert EngineConfig(max_waiting=0).waiting_limit == 0


def test_a_type_of_the_kv_cache_that_there_is_not():
    assert EngineConfig(kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8_e4m3"
    assert "'int8', 'fp8'" in refused(kv_cache_dtype="int4")
