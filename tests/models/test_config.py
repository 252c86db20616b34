"""Reading configs: transformers' defaults and precedence, and no value that is guessed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.models import toys

import kit
from octavo.errors import CheckpointError
from octavo.layers.rope import RopeSpec
from octavo.models.config import from_config, load_spec
from octavo.models.files import resolve
from octavo.models.moe import experts_of, has_experts
from octavo.models.registry import FAMILIES
from octavo.models.spec import ModelSpec

SIZES = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 32,
}  # fmt: skip


def spec(
    family: str = "llama", generation: dict[str, Any] | None = None, **fields: Any
) -> ModelSpec:
    return from_config({"model_type": family, **SIZES, **fields}, generation)


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_what_a_config_leaves_out_is_what_transformers_assumes(family: str) -> None:
    """Only the sizes are given; everything else must equal the config class's own defaults."""
    found = spec(family)
    wanted = toys.classes(family)[0](**SIZES)
    attention = found.layers[0].attention
    assert attention.num_kv_heads == wanted.num_key_value_heads
    assert attention.head_dim == (getattr(wanted, "head_dim", None) or 2)
    assert found.max_position == wanted.max_position_embeddings
    assert found.final_norm.eps == wanted.rms_norm_eps
    assert found.tie_embeddings == wanted.tie_word_embeddings
    assert found.bos_token_id == wanted.bos_token_id
    eos = wanted.eos_token_id
    assert found.eos_token_ids == (() if eos is None else (eos,))
    assert found.embedding_scale == {
        "gemma2": 8.0, "gemma3_text": 8.0,
    }.get(family, 1.0)  # fmt: skip
    assert found.logit_soft_cap == getattr(wanted, "final_logit_softcapping", None)
    types = getattr(wanted, "layer_types", None) or ["sliding_attention"] * 4
    for layer, kind in zip(found.layers, types, strict=True):
        window = getattr(wanted, "sliding_window", None) if kind == "sliding_attention" else None
        assert layer.attention.window == window
        assert layer.attention.soft_cap == getattr(wanted, "attn_logit_softcapping", None)
        rope = wanted.rope_parameters.get(kind, wanted.rope_parameters)
        if layer.rope is not None:
            assert (layer.rope.theta, layer.rope.kind) == (rope["rope_theta"], rope["rope_type"])
    rotated = getattr(wanted, "no_rope_layers", [1] * 4)
    assert [layer.rope is not None for layer in found.layers] == [bool(n) for n in rotated]


def windows(spec: ModelSpec) -> tuple[int | None, ...]:
    return tuple(layer.attention.window for layer in spec.layers)


def rope(spec: ModelSpec) -> RopeSpec:
    assert spec.layers[0].rope is not None
    return spec.layers[0].rope


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_a_saved_config_gives_the_same_spec(family: str, tmp_path: Path) -> None:
    config = toys.classes(family)[0](**SIZES)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    found = from_config(saved)
    assert replace(found, extra={}) == replace(spec(family), extra={})
    if found.family.decoder.startswith("octavo.models.moe:"):
        assert experts_of(found) == experts_of(spec(family))
        assert has_experts(found) == has_experts(spec(family)) == [True] * 4


def test_every_family_is_known_by_both_its_names() -> None:
    for family in FAMILIES:
        config = {"architectures": [family.architecture], **SIZES, "num_key_value_heads": 2}
        assert from_config(config).family is family


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_hidden_layers": None}, "lacks 'num_hidden_layers'"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"num_key_value_heads": 5}, "a divisor of 32 heads"),
        ({"head_dim": 7}, "head_dim is 7.*even"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'.*'silu'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantized with 'hqq'"),
        ({"rope_scaling": [1]}, "rope_scaling is .1.; it must be an object"),
        ({"rope_scaling": {"rope_type": "ntk"}}, "rope_type is 'ntk'.*llama3, yarn"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "short_factor is None"),
        ({"rope_scaling": {"type": "su"}}, "rope_type is 'su'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is None"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is None"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "factor is '4'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one set for all layers"),
        ({"partial_rotary_factor": 0.5, "head_dim": 8}, "partial_rotary_factor is 0.5.*must be 1"),
    ],
)
def test_mdl_07_values_that_are_not_understood(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as error:
        spec(**fields)
    assert "config.json" in str(error.value)


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("family", "fields", "said"),
    [
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'.*'gelu_pytorch_"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping is -1.0"),
        ("gemma2", {"final_logit_softcapping": "30"}, "final_logit_softcapping is '30'"),
        ("gemma3_text", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ("gemma3_text", {"sliding_window": 0}, "sliding_window is 0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is Tr"),
        ("gemma3_text", {"rope_parameters": {"linear_attention": {}}}, "rope_parameters"),
        ("gemma3_text", {"rope_local_base_freq": -1}, "rope_theta is -1"),
        ("phi3", {"partial_rotary_factor": 0.3, "head_dim": 10}, "partial_rotary_factor is 0.3"),
        ("phi3", {"rope_scaling": {**LONG, "short_factor": [1.0]}, "head_dim": 8}, "a list of 4"),
        ("phi3", {"rope_scaling": {**LONG, "long_factor": [0.0] * 4}, "head_dim": 8}, "long_fac"),
        ("phi3", {"rope_scaling": {"type": "ntk"}}, "rope_type is 'ntk'.*longrope, su"),
        ("olmo3", {"layer_types": ["full_attention"]}, "layer_types.*4 of"),
        ("granite", {"residual_multiplier": "0.2"}, "residual_multiplier is '0.2'"),
        ("granite", {"logits_scaling": 0}, "logits_scaling is 0"),
        ("granite", {"attention_multiplier": None}, "attention_multiplier is None"),
        ("smollm3", {"no_rope_layers": [1, 1]}, "no_rope_layers is .1, 1.; it must be at least 4"),
        ("smollm3", {"no_rope_layers": [1, 2, 1, 1]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
    ],
)
def test_mdl_07_each_family_refuses_what_it_does_not_know(
    family: str, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        spec(family, **fields)


def test_gemma_3_of_older_configs() -> None:
    """`sliding_window_pattern`, `rope_local_base_freq` and a `rope_scaling` of global layers."""
    found = spec(
        "gemma3_text", sliding_window_pattern=2, sliding_window=7, rope_theta=5e5,
        rope_local_base_freq=2e3, rope_scaling={"rope_type": "linear", "factor": 8.0},
    )  # fmt: skip
    assert windows(found) == (7, None, 7, None)
    local, full = found.layers[0].rope, found.layers[1].rope
    assert local == RopeSpec(2e3)
    assert full is not None
    assert (full.theta, full.kind, full.factor) == (5e5, "linear", 8.0)


def test_phi3_reads_su_and_yarn_as_longrope() -> None:
    for name in ("su", "yarn", "longrope"):
        fields = {**LONG, "type": name}
        del fields["rope_type"]
        found = rope(spec("phi3", rope_scaling=fields, head_dim=8, max_position_embeddings=16384))
        assert (found.kind, found.factor, found.original_max_position) == ("longrope", 4.0, 4096)


def test_the_text_part_of_a_wrapper() -> None:
    text = {"model_type": "gemma3_text", **SIZES}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text,
              "eos_token_id": [1, 106], "vision_config": {"hidden_size": 3}}  # fmt: skip
    found = from_config(config)
    assert (found.family.name, found.hidden_size) == ("gemma3_text", 64)
    assert found.architecture == "Gemma3ForConditionalGeneration"
    assert found.eos_token_ids == (1, 106)
    assert found.wrapper is not None
    with pytest.raises(CheckpointError, match="text_config is None"):
        from_config({"model_type": "mistral3"})


@pytest.mark.parametrize("types", ["sliding_attention", ["full_attention"], ["chunked"] * 4])
def test_mdl_11_layer_types_that_do_not_fit(types: Any) -> None:
    with pytest.raises(CheckpointError, match="layer_types"):
        spec("qwen2", layer_types=types)


@pytest.mark.parametrize(
    ("family", "fields", "wanted"),
    [
        ("llama", {"sliding_window": 8}, (None,) * 4),
        ("mistral", {"sliding_window": 8}, (8,) * 4),
        ("mistral", {"sliding_window": None}, (None,) * 4),
        ("qwen2", {"sliding_window": 8}, (None,) * 4),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
         (None, None, None, 8)),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0,
                   "layer_types": ["full_attention", "sliding_attention"] * 2},
         (None, 8, None, 8)),
    ],
)  # fmt: skip
def test_mdl_11_windows_by_layer(
    family: str, fields: dict[str, Any], wanted: tuple[int | None, ...]
) -> None:
    assert windows(spec(family, **fields)) == wanted


def test_mdl_09_the_window_is_never_multiplied() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    found = spec(max_position_embeddings=4096, rope_scaling=yarn)
    assert (found.max_position, found.longest) == (4096, 8192)
    assert spec(max_position_embeddings=4096).longest == 4096
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}  # fmt: skip
    assert spec(max_position_embeddings=4096, rope_scaling=llama3).longest == 4096


def test_mdl_09_yarn_without_a_factor_takes_the_ratio() -> None:
    yarn = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024}
    assert rope(spec(max_position_embeddings=4096, rope_parameters=yarn)).factor == 4.0


def test_every_end_of_text_id_counts() -> None:
    found = spec(eos_token_id=[7, 9], generation={"eos_token_id": [9, 11]})
    assert found.eos_token_ids == (7, 9, 11)
    assert spec(generation={"eos_token_id": 5}, eos_token_id=None).eos_token_ids == (5,)


def test_generation_defaults() -> None:
    generation = {"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True,
                  "max_new_tokens": 64, "transformers_version": "5"}  # fmt: skip
    assert spec(generation=generation).generation_defaults == {
        "temperature": 0.6, "top_k": 20,
    }  # fmt: skip
    with pytest.raises(CheckpointError, match=r"generation_config\.json.*top_p is 'high'"):
        spec(generation={"top_p": "high"})


def test_generation_config_is_read_from_the_folder(tmp_path: Path) -> None:
    folder = kit.tiny(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": 3}')
    found = load_spec(resolve(str(folder)).open())
    assert found.generation_defaults == {"temperature": 0.5}
    assert found.eos_token_ids == (kit.EOS, 3)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        load_spec(resolve(str(folder)).open())


def test_the_dtype_of_the_checkpoint() -> None:
    assert spec(torch_dtype="float16").checkpoint_dtype == "float16"
    assert spec(dtype="bfloat16").checkpoint_dtype == "bfloat16"
    assert spec().checkpoint_dtype is None


class TestGguf:
    def read(self, path: Path, **metadata: Any) -> ModelSpec:
        toys.write_gguf(toys.make("qwen2"), path / "m.gguf", **metadata)
        return load_spec(resolve(str(path / "m.gguf")).open())

    def test_what_the_metadata_say(self, tmp_path: Path) -> None:
        found = self.read(tmp_path, **{"attention.sliding_window": 33})
        assert (found.architecture, found.num_layers, found.layers[0].attention.head_dim) == (
            "Qwen2ForCausalLM",
            3,
            8,
        )
        assert (found.vocab_size, windows(found)) == (toys.VOCAB, (33,) * 3)
        assert (found.qkv_bias, found.output_bias, found.tie_embeddings) == (True, False, False)

    @pytest.mark.parametrize(
        ("metadata", "said"),
        [
            ({"attention.head_count": 0}, "head_count is 0"),
            ({"attention.head_count_kv": 4}, "a divisor of 6 heads"),
            ({"attention.value_length": 16}, "value_length is 16.*head size, 8"),
            ({"rope.dimension_count": 4}, "dimension_count is 4"),
            ({"rope.scaling.type": "longrope"}, "scaling.type is 'longrope'"),
            ({"rope.scaling.type": "linear"}, "scaling.factor is None"),
            ({"context_length": -1.0}, "context_length is -1"),
        ],
    )
    def test_values_that_are_not_understood(
        self, metadata: dict[str, Any], said: str, tmp_path: Path
    ) -> None:
        with pytest.raises(CheckpointError, match=said) as error:
            self.read(tmp_path, **metadata)
        assert "m.gguf" in str(error.value)

    def test_the_attention_factor_multiplies(self, tmp_path: Path) -> None:
        yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
        plain = rope(self.read(tmp_path, **yarn))
        more = rope(self.read(tmp_path, **yarn, **{"rope.scaling.attn_factor": 2.0}))
        assert plain.attention_factor is None
        assert more.attention_factor == pytest.approx(2 * 1.1386294)
