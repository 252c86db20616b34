"""The decoder against transformers (eager, fp32), for every family and its variants."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models import toys

from octavo.errors import CheckpointError
from octavo.models.decoder import Decoder
from octavo.models.registry import FAMILIES

TOLERANCE = {"rtol": 0, "atol": 1e-4}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with toys.one_thread():
        yield


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 20}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma2": ("gemma2", {"sliding_window": 6, "query_pre_attn_scalar": 24, "head_dim": 16}),
    "gemma2-untied": (
        "gemma2",
        {
            "sliding_window": 19,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {"num_hidden_layers": 7, "sliding_window": 5, "query_pre_attn_scalar": 10},
    ),
    "gemma3-linear": (
        "gemma3_text",
        {
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "phi3": ("phi3", {"sliding_window": 11}),
    "phi3-partial-tied": (
        "phi3",
        {
            "head_dim": 16,
            "hidden_size": 96,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "olmo2": ("olmo2", {"head_dim": 8}),
    "olmo2-bias-tied": ("olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    "olmo3": ("olmo3", {"num_hidden_layers": 5, "sliding_window": 6}),
    "olmo3-yarn": (
        "olmo3",
        {
            "num_hidden_layers": 5,
            "sliding_window": 6,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 8.0,
                    "rope_theta": 5e5,
                    "original_max_position_embeddings": 64,
                    "attention_factor": 1.2,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "mixtral": ("mixtral", {}),
    "mixtral-window-tied": ("mixtral", {"sliding_window": 9, "tie_word_embeddings": True}),
    "qwen3-moe": ("qwen3_moe", {"norm_topk_prob": True, "attention_bias": True}),
    "qwen3-moe-dense-layers": (
        "qwen3_moe",
        {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
    "granite-biases": (
        "granite",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "no_rope_layer_interval": 2}),
    "smollm3-windows": (
        "smollm3",
        {
            "num_hidden_layers": 5,
            "no_rope_layers": [1, 0, 1, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 7,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "ministral3": (
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "mscale": 1.0,
                "original_max_position_embeddings": 8,
                "mscale_all_dim": 1.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "llama_4_scaling_beta": 0.4,
            },
            "sliding_window": 30,
        },
    ),
}


def compare(model: Decoder, reference: Any, lengths: tuple[int, ...], tail: int = 4) -> None:
    """Prompts in one step, then tokens one at a time, all sequences together."""
    paged = toys.Paged(model)
    ids = {f"s{n}": toys.prompt(n + tail) for n in lengths}
    wanted = {name: toys.reference_logits(reference, tokens) for name, tokens in ids.items()}
    done = dict.fromkeys(ids, 0)
    steps = [{f"s{n}": n for n in lengths}] + [dict.fromkeys(ids, 1)] * tail
    for step in steps:
        rows = [(name, ids[name][done[name] : done[name] + count]) for name, count in step.items()]
        for (name, new), logits in zip(rows, paged.step(rows), strict=True):
            at = done[name]
            torch.testing.assert_close(logits, wanted[name][at : at + len(new)], **TOLERANCE)
            done[name] += len(new)


@pytest.mark.parametrize("variant", VARIANTS)
def test_mdl_12_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    reference = toys.make(family, **changes)
    model = toys.load(toys.save(reference, tmp_path))
    compare(model, reference, (1, 15, 17, 40))


def test_mdl_11_max_window_layers_of_older_configs(tmp_path: Path) -> None:
    family, changes = VARIANTS["qwen2-windows"]
    reference = toys.make(family, **changes)
    folder = toys.save(reference, tmp_path)
    toys.edit_config(folder, remove=["layer_types"])
    compare(toys.load(folder), reference, (17, 40))


def test_every_family_has_a_variant() -> None:
    assert {family.name for family in FAMILIES} == {name for name, _ in VARIANTS.values()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_equal_transformers(variant: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    reference = toys.make(family, **changes)
    paged = toys.Paged(toys.load(toys.save(reference, tmp_path)))
    ids = toys.prompt(21, seed=3)
    new, found = list(ids), []
    for _ in range(8):
        found.append(int(paged.step([("a", new)])[0][-1].argmax()))
        new = found[-1:]
    assert found == toys.greedy(reference, ids, 8)


def test_a_prompt_in_chunks_gives_the_same(tmp_path: Path) -> None:
    reference = toys.make("mistral", sliding_window=9)
    paged = toys.Paged(toys.load(toys.save(reference, tmp_path)))
    ids = toys.prompt(50)
    chunks = [paged.step([("a", ids[at : at + size])])[0] for at, size in
              ((0, 16), (16, 1), (17, 20), (37, 13))]  # fmt: skip
    torch.testing.assert_close(
        torch.cat(chunks), toys.reference_logits(reference, ids), **TOLERANCE
    )


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family.name, marks=pytest.mark.slow if family.name == "mixtral" else ())
        for family in FAMILIES
    ],
)
def test_mdl_12_every_tensor_moves_the_output(family: str, tmp_path: Path) -> None:
    """Each parameter changed once: a tensor that is loaded but not used would change nothing."""
    changes = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    reference = toys.make(family, num_hidden_layers=2, **changes)
    model = toys.load(toys.save(reference, tmp_path))
    names, kind, spec = dict(reference.named_parameters()), type(model), model.spec
    stored = load_file(tmp_path / "model.safetensors")
    wanted = kind.parameter_shapes(spec).keys()
    assert {kind.parameter_name(spec, name) for name in stored} == wanted
    ids = toys.prompt(12)
    before = toys.Paged(model).step([("a", ids)])[0]
    for name, parameter in names.items():
        with torch.no_grad():
            kept = parameter.clone()
            parameter.copy_(kept.flip(0) + 0.3)
        changed = toys.load(toys.save(reference, tmp_path))
        with torch.no_grad():
            parameter.copy_(kept)
        after = toys.Paged(changed).step([("a", ids)])[0]
        # A key's bias moves all scores of a query alike; only positions make it matter.
        assert (after - before).abs().max() > 1e-3, name


# (query heads, kv heads): groups that are no power of two, one KV head, no grouping.
@pytest.mark.parametrize("head_dim", [8, 16, 40, 64, 80, 96, 112, 128, 160, 192, 256])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2), (7, 1), (12, 4)])
def test_mdl_06_odd_head_sizes(head_dim: int, heads: tuple[int, int], tmp_path: Path) -> None:
    # Llama's config refuses a hidden size that is no multiple of the heads.
    reference = toys.make(
        "llama", hidden_size=4 * heads[0], num_attention_heads=heads[0],
        num_key_value_heads=heads[1], head_dim=head_dim, num_hidden_layers=1,
    )  # fmt: skip
    model = toys.load(toys.save(reference, tmp_path))
    compare(model, reference, (1, 15, 16, 17, 129), tail=1)


ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "llama3-8": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64, "rope_theta": 5e5,
    },
    "llama3-32": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 6.0,
        "original_max_position_embeddings": 64, "rope_theta": 5e5,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
}  # fmt: skip
for _factor in (4.0, 16.0, 64.0):
    ROPES[f"yarn-{_factor:g}"] = {
        "rope_type": "yarn", "factor": _factor, "original_max_position_embeddings": 64,
        "rope_theta": 1e4,
    }  # fmt: skip
ROPES |= {
    "yarn-attention-1": {**ROPES["yarn-4"], "attention_factor": 1.0},
    "yarn-attention-1.3": {**ROPES["yarn-4"], "attention_factor": 1.3},
    "yarn-mscale": {**ROPES["yarn-16"], "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn-mscale-apart": {**ROPES["yarn-16"], "mscale": 1.2, "mscale_all_dim": 0.7},
    "yarn-betas": {
        **ROPES["yarn-4"],
        "original_max_position_embeddings": 256,
        "beta_fast": 4.0,
        "beta_slow": 2.0,
    },
    "yarn-untruncated": {**ROPES["yarn-4"], "truncate": False},
    "yarn-no-original": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4},
}


@pytest.mark.parametrize("name", ROPES)
def test_mdl_07_09_scaled_rope(name: str, tmp_path: Path) -> None:
    reference = toys.make("llama", rope_parameters=dict(ROPES[name]), head_dim=32, hidden_size=24)
    model = toys.load(toys.save(reference, tmp_path))
    assert model.spec.max_position == 512  # never multiplied by the factor
    ids = toys.prompt(512)
    found = toys.Paged(model).step([("a", ids)])[0]
    wanted = toys.reference_logits(reference, ids)
    at = [1, 63, 64, 65, 200, 511]
    torch.testing.assert_close(found[at], wanted[at], **TOLERANCE)


def test_mdl_07_dynamic_scaling_past_the_window(tmp_path: Path) -> None:
    """At full length the frequencies are those of transformers at that length."""
    reference = toys.make(
        "llama", max_position_embeddings=64,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    )  # fmt: skip
    folder = toys.save(reference, tmp_path)
    ids = toys.prompt(200)
    found = toys.Paged(toys.load(folder, max_model_len=200)).step([("a", ids)])[0]
    torch.testing.assert_close(found, toys.reference_logits(reference, ids), **TOLERANCE)


@pytest.mark.parametrize(
    ("name", "old_style"),
    [
        ("llama3-8", {"rope_theta": 5e5, "rope_scaling": {
            "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}}),
        ("theta", {"rope_theta": 5e5, "rope_scaling": None}),
        ("linear", {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}}),
    ],
)  # fmt: skip
def test_mdl_07_older_configs(name: str, old_style: dict[str, Any], tmp_path: Path) -> None:
    reference = toys.make("llama", rope_parameters=dict(ROPES[name]))
    folder = toys.save(reference, tmp_path)
    toys.edit_config(folder, remove=["rope_parameters"], **old_style)
    ids = toys.prompt(300)
    found = toys.Paged(toys.load(folder)).step([("a", ids)])[0]
    torch.testing.assert_close(found, toys.reference_logits(reference, ids), **TOLERANCE)


def longrope() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    short, long = torch.rand(2, 6, generator=generator)
    return {
        "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
        "short_factor": (1 + short).tolist(), "long_factor": (2 + 6 * long).tolist(),
    }  # fmt: skip


@pytest.mark.parametrize("longest", [64, 512])
def test_longrope_is_chosen_by_the_longest_sequence(
    longest: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers chooses by each sequence's length; ours must be one of the two for all."""
    reference = toys.make(
        "phi3", head_dim=16, hidden_size=96, original_max_position_embeddings=64,
        rope_parameters=longrope(),
    )  # fmt: skip
    with caplog.at_level("INFO"):
        model = toys.load(toys.save(reference, tmp_path), max_model_len=longest)
    assert f"LongRoPE: {'short' if longest == 64 else 'long'} factors" in caplog.text
    ids = toys.prompt(64 if longest == 64 else 200)
    found = toys.Paged(model).step([("a", ids)])[0]
    torch.testing.assert_close(found, toys.reference_logits(reference, ids), **TOLERANCE)


WRAPPED = {
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
    },
    "ministral3": {
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
    },
}  # fmt: skip
# As files of the hub have them, and as transformers 5 names its modules.
PREFIXES = [("language_model.model.", "language_model.lm_head.", ""),
            ("model.language_model.", "lm_head.", "model.")]  # fmt: skip


@pytest.mark.parametrize("variant", WRAPPED)
@pytest.mark.parametrize("prefixes", PREFIXES)
def test_the_text_part_of_a_model_with_a_vision_tower(
    variant: str, prefixes: tuple[str, str, str], tmp_path: Path
) -> None:
    family, changes = VARIANTS[variant]
    reference = toys.make(family, **changes)
    folder = toys.save(reference, tmp_path)
    inner, head, outer = prefixes
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**WRAPPED[variant], "text_config": config}))
    path = folder / "model.safetensors"
    named = {
        name.replace("lm_head.", head) if name.startswith("lm_head.")
        else inner + name.removeprefix("model."): tensor
        for name, tensor in load_file(path).items()
    }  # fmt: skip
    for other in ("vision_tower.vision_model.post_layernorm.weight", "multi_modal_projector.norm"):
        named[outer + other] = torch.ones(3)
    save_file(named, path)
    compare(toys.load(folder), reference, (1, 40), tail=1)
    save_file({**named, "audio_tower.weight": torch.ones(3)}, path)
    with pytest.raises(CheckpointError, match=r"unexpected: audio_tower\.weight"):
        toys.load(folder)


def test_rotary_tables_are_shared_by_layers_that_agree(tmp_path: Path) -> None:
    model = toys.load(toys.save(toys.make("gemma3_text", num_hidden_layers=7), tmp_path))
    assert len(model._tables) == 2


def test_gemma_embeddings_are_scaled_by_a_rounded_root(tmp_path: Path) -> None:
    folder = toys.save(toys.make("gemma3_text", hidden_size=640, num_attention_heads=4), tmp_path)
    model = toys.load(folder, torch.bfloat16)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].bfloat16()
    ids = torch.tensor([3, 7])
    assert torch.equal(model.embed(ids), table[ids] * 25.25)
    assert torch.equal(model.embed(ids, out=torch.empty(2, 640).bfloat16()), table[ids] * 25.25)


def test_dynamic_scaling_past_the_trained_length_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    folder = toys.save(
        toys.make("llama", max_position_embeddings=64, rope_parameters=rope), tmp_path
    )
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    with caplog.at_level("WARNING"):
        toys.load(folder)
        assert "dynamic rope" not in caplog.text
        toys.load(folder, max_model_len=128)
    assert "scaled for max_model_len=128, also in sequences within the trained length of 64" in (
        caplog.text
    )
