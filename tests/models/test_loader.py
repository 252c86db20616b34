"""Loading is strict both ways, and gives the values that the checkpoint holds."""

import copy
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models import toys

import kit
from octavo import progress
from octavo.checkpoint.gguf import FORMATS
from octavo.config import EngineConfig
from octavo.errors import CheckpointError, ConfigError, NotEnoughMemoryError
from octavo.kernels.cpu import target
from octavo.kernels.cpu.device import CpuDevice
from octavo.models.decoder import Decoder
from octavo.models.files import INDEX, embedded_path
from octavo.models.loader import prepare

TOLERANCE = {"rtol": 0, "atol": 1e-4}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with toys.one_thread():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return kit.tiny(tmp_path / "tiny")


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Change (or, with None, drop) tensors of the folder's one safetensors file."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({k: v.contiguous() for k, v in tensors.items() if v is not None}, path)


def shard(folder: Path) -> dict[str, str]:
    """Split the folder's checkpoint into two shards with an index; returns the index."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    names = sorted(tensors)
    index = {}
    for number, part in enumerate([names[::2], names[1::2]]):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        index |= dict.fromkeys(part, file)
    write_index(folder, index)
    return index


def write_index(folder: Path, index: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def logits(folder: str | Path, **options: Any) -> torch.Tensor:
    return toys.Paged(toys.load(folder, **options)).step([("a", toys.prompt(20))])[0]


def test_sharded_equals_single(folder: Path) -> None:
    before = logits(folder)
    shard(folder)
    assert torch.equal(logits(folder), before)


def test_mdl_03_stray_files_are_not_read(folder: Path) -> None:
    before = logits(folder)
    other = load_file(folder / "model.safetensors")
    shard(folder)
    strange = {name: tensor + 1 for name, tensor in other.items()}
    for name in ("model.safetensors", "consolidated.safetensors", "original/model.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        save_file(strange, folder / name)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04never read")
    assert torch.equal(logits(folder), before)


def test_mdl_03_an_empty_tensor_is_accepted(folder: Path) -> None:
    before = logits(folder)
    rewrite(folder, **{"model.extra": torch.empty(0, 4)})
    assert torch.equal(logits(folder), before)


def test_derived_tensors_of_old_checkpoints_are_accepted(folder: Path) -> None:
    rewrite(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    toys.load(folder)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, r"missing: model\.layers\.1\.mlp\.up_proj"),
        ("model.layers.1.self_attn.q_proj.bias", torch.ones(64), "unexpected: .*q_proj.bias"),
        ("model.norm.weight", torch.ones(63), r"model\.norm\.weight.*\(63,\), not \(64,\)"),
        ("model.norm.weight", torch.ones(64, dtype=torch.int32), "type I32"),
        (EMBED, torch.ones(64, 259), r"\(64, 259\), not \(259, 64\)"),
    ],
)
def test_mdl_01_each_disagreement_is_named(
    name: str, value: torch.Tensor | None, said: str, folder: Path
) -> None:
    rewrite(folder, **{name: value})
    with pytest.raises(CheckpointError, match=said) as error:
        toys.load(folder)
    assert "model.safetensors" in str(error.value)


def test_mdl_01_all_problems_are_listed_at_once(folder: Path) -> None:
    rewrite(folder, **{"model.norm.weight": None, "stray": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"missing: model\.norm\.weight; unexpected: stray"):
        toys.load(folder)


def test_mdl_01_a_shard_without_a_tensor_of_the_index(folder: Path) -> None:
    index = shard(folder)
    write_index(folder, {**index, "model.new.weight": "model-0.safetensors"})
    with pytest.raises(CheckpointError, match=r"model-0\.safetensors lacks .*model\.new\.weight"):
        toys.load(folder)


def test_mdl_01_a_tensor_in_two_shards(folder: Path) -> None:
    shard(folder)
    tensors = load_file(folder / "model-0.safetensors")
    assert EMBED not in tensors
    save_file({**tensors, EMBED: torch.ones(259, 64)}, folder / "model-0.safetensors")
    with pytest.raises(CheckpointError, match=r"model-0\.safetensors holds .*embed_tokens"):
        toys.load(folder)


def test_mdl_01_a_gguf_without_a_tensor(tmp_path: Path) -> None:
    path = toys.write_gguf(
        toys.make("qwen2"), tmp_path / "m.gguf", drop=["model.layers.2.self_attn.q_proj.bias"]
    )
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.2\.self_attn\.q_proj.bias"):
        toys.load(path)


class TestTiedEmbeddings:
    """MDL-04: tie_word_embeddings true or false, lm_head present or absent."""

    def reference(self, folder: Path) -> torch.Tensor:
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        )
        return toys.reference_logits(model, toys.prompt(20))

    @pytest.mark.parametrize("shards", [False, True])
    def test_mdl_04_tied_and_absent(self, shards: bool, folder: Path) -> None:
        toys.edit_config(folder, tie_word_embeddings=True)
        rewrite(folder, **{HEAD: None})
        if shards:
            shard(folder)
        torch.testing.assert_close(logits(folder), self.reference(folder), **TOLERANCE)

    @pytest.mark.filterwarnings("ignore")
    def test_mdl_04_tied_and_another_head(
        self, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        toys.edit_config(folder, tie_word_embeddings=True)
        with caplog.at_level(logging.WARNING, "octavo"):
            found = logits(folder)
        assert "the embedding is used" in caplog.text
        rewrite(folder, **{HEAD: None})
        torch.testing.assert_close(found, self.reference(folder), **TOLERANCE)

    def test_mdl_04_tied_and_the_same_head(
        self, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        toys.edit_config(folder, tie_word_embeddings=True)
        rewrite(folder, **{HEAD: load_file(folder / "model.safetensors")[EMBED].clone()})
        with caplog.at_level(logging.WARNING, "octavo"):
            logits(folder)
        assert caplog.text == ""

    def test_mdl_04_untied_and_present(self, folder: Path) -> None:
        torch.testing.assert_close(logits(folder), self.reference(folder), **TOLERANCE)

    @pytest.mark.parametrize("say", [{"tie_word_embeddings": False}, {}])
    def test_mdl_04_untied_and_absent(self, say: dict[str, bool], folder: Path) -> None:
        toys.edit_config(folder, remove=["tie_word_embeddings"], **say)
        rewrite(folder, **{HEAD: None})
        with pytest.raises(CheckpointError, match=r"no 'lm_head\.weight'.*tie_word_embeddings"):
            toys.load(folder)


def test_weights_are_rounded_once_to_the_dtype(folder: Path) -> None:
    wide = load_file(folder / "model.safetensors")
    exact = logits(folder)
    narrow = toys.load(folder, dtype=torch.bfloat16)
    with torch.inference_mode():
        embedded = narrow.embed(torch.arange(259))
    assert torch.equal(embedded, wide[EMBED].bfloat16())
    rewrite(folder, **{name: tensor.double() for name, tensor in wide.items()})
    assert torch.equal(logits(folder), exact)


@pytest.mark.parametrize("architecture", ["GemmaForCausalLM", "LlamaForSequenceClassification"])
def test_mdl_15_an_unknown_architecture_lists_the_known(architecture: str, folder: Path) -> None:
    toys.edit_config(folder, architectures=[architecture])
    with pytest.raises(CheckpointError, match=f"{architecture}.*known: LlamaForCausalLM, Mistral"):
        toys.load(folder)


def test_mdl_15_a_config_that_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON"):
        toys.load(folder)


def test_progress_counts_every_byte(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phases: list[progress.Phase] = []
    during = progress.during
    monkeypatch.setattr(progress, "during", lambda phase: phases.append(phase) or during(phase))
    toys.load(folder)
    held = load_file(folder / "model.safetensors").values()
    (phase,) = phases
    assert phase.done == phase.total == sum(t.numel() * t.element_size() for t in held)
    assert phase.name == "reading weights"


def test_options_that_no_model_can_have(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len is 513.*at most 512"):
        toys.load(folder, max_model_len=513)
    with pytest.raises(ConfigError, match="quantization 'awq'"):
        toys.load(folder, quantization="awq")


@pytest.mark.parametrize("kind", [kind.name for kind in FORMATS.values()])
def test_gguf_of_every_block_type_equals_transformers(kind: str, tmp_path: Path) -> None:
    reference, path = toys.blocks_of(kind, tmp_path / "m.gguf")
    ids = toys.prompt(30)
    wanted = toys.reference_logits(reference, ids)
    model = toys.load(path, quantization="none")
    found = toys.Paged(model).step([("a", ids)])[0]
    torch.testing.assert_close(found, wanted, **TOLERANCE)


@pytest.mark.parametrize("tied", [False, True])
def test_blocks_are_computed_on_as_stored(tied: bool, tmp_path: Path) -> None:
    """Values have the type of another than queries and keys: one product of both."""
    reference = toys.make(
        "llama", hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    path = toys.write_gguf(reference, tmp_path / "m.gguf", "Q5_0", others={"v_proj": "Q8_0"})
    model, ids = toys.load(path), toys.prompt(30)
    assert "stored weights" in model.explain()["linear"]
    embedded = model.embed(torch.tensor(ids))
    assert torch.equal(embedded, reference.get_input_embeddings().weight[ids])
    found = toys.Paged(model).step([("a", ids)])[0]
    torch.testing.assert_close(found, toys.reference_logits(reference, ids), **TOLERANCE)
    assert "stored" not in toys.load(path, quantization="none").explain()["linear"]


@pytest.mark.skipif(not target.has_fma(), reason="no AVX2 here")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_stay_as_they_are_in_float32(
    kind: torch.dtype, tied: bool, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4}
    reference = toys.make("llama", **sizes, tie_word_embeddings=tied)
    for parameter in reference.parameters():
        parameter.data = parameter.to(kind).float()
    path = toys.save(copy.deepcopy(reference).to(kind), tmp_path / "m")
    model, ids = toys.load(path), toys.prompt(30)
    name = str(kind).removeprefix("torch.")
    assert f"{name} weights x float32 rows" in model.explain()["linear"]
    embedded = model.embed(torch.tensor(ids))
    assert embedded.dtype == torch.float32
    assert torch.equal(embedded, reference.get_input_embeddings().weight[ids])
    found, wanted = toys.Paged(model).step([("a", ids)])[0], toys.reference_logits(reference, ids)
    torch.testing.assert_close(found, wanted, **TOLERANCE)

    config = EngineConfig(model=str(path), attention_impl="auto")
    outline = prepare(config, toys.cpu_device(), torch.float32)
    norms = sum(p.numel() for p in reference.parameters() if p.dim() == 1)
    matrices = sum(p.numel() for p in reference.parameters()) - norms
    assert outline.weight_bytes == 2 * matrices + 4 * norms


def test_blocks_are_decoded_where_the_device_does_not_keep_them_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    reference = toys.make("llama", **sizes, num_attention_heads=4, num_key_value_heads=2)
    path = toys.write_gguf(reference, tmp_path / "m.gguf", "Q8_0")
    monkeypatch.setattr(CpuDevice, "keeps_blocks", False)
    assert "stored" not in toys.load(path).explain()["linear"]
    assert "stored weights" in toys.load(path, quantization="gguf").explain()["linear"]


def test_only_a_file_in_blocks_is_computed_on_as_one(tmp_path: Path) -> None:
    path = toys.write_gguf(toys.make("llama", head_dim=16), tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match="'gguf' is for GGUF files with quantized tensors"):
        toys.load(path, quantization="gguf")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True}), ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}), ("qwen3", {"head_dim": 20}),
    ],
)  # fmt: skip
def test_gguf_of_every_family(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    reference = toys.make(family, **changes)
    path = toys.write_gguf(reference, tmp_path / "m.gguf")
    model = toys.load(path)
    assert model.spec.eos_token_ids == (2,)
    ids = toys.prompt(30)
    found = toys.Paged(model).step([("a", ids)])[0]
    torch.testing.assert_close(found, toys.reference_logits(reference, ids), **TOLERANCE)


def test_gguf_rope_scaling_by_metadata(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
            "rope_theta": 1e4}  # fmt: skip
    reference = toys.make("llama", rope_parameters=rope)
    path = toys.write_gguf(
        reference, tmp_path / "m.gguf", **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128},
    )  # fmt: skip
    ids = toys.prompt(300)
    found = toys.Paged(toys.load(path)).step([("a", ids)])[0]
    torch.testing.assert_close(found, toys.reference_logits(reference, ids), **TOLERANCE)


def test_mdl_07_gguf_rope_divisors_are_llama_3_scaling(tmp_path: Path) -> None:
    """llama.cpp stores Llama 3's scaling as a tensor of divisors, one per frequency."""
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64, "rope_theta": 5e5}  # fmt: skip
    reference = toys.make("llama", rope_parameters=rope, head_dim=16)
    plain = 1 / 5e5 ** (torch.arange(0, 16, 2) / 16)
    divisors = (plain / reference.model.rotary_emb.inv_freq).numpy()
    path = toys.write_gguf(reference, tmp_path / "m.gguf", extra={"rope_freqs.weight": divisors})
    ids = toys.prompt(300)
    found = toys.Paged(toys.load(path)).step([("a", ids)])[0]
    torch.testing.assert_close(found, toys.reference_logits(reference, ids), **TOLERANCE)


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Decoder]:
    """transformers' model and ours, from the same file, in fp32."""
    import transformers

    path = embedded_path("smollm2")
    if not path.is_file():
        pytest.skip("the embedded model is not here: octavo pull smollm2")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, attn_implementation="eager", dtype=torch.float32
    )
    return reference, toys.load("smollm2")


LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 21, 34, 55, 89, 127, 144, 233, 377, 610, 987, 1500)


def real_prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(3, 49000, length).tolist()


@pytest.mark.slow  # transformers takes long to decode the file
@pytest.mark.model
def test_smollm2_equals_transformers_on_the_same_file(smollm2: tuple[Any, Decoder]) -> None:
    reference, model = smollm2
    paged = toys.Paged(model)
    for length in (1, 17, 150):
        wanted = toys.reference_logits(reference, real_prompt(length))
        found = paged.step([(f"s{length}", real_prompt(length))])[0]
        assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()
        assert torch.equal(found.argmax(-1), wanted.argmax(-1))


@pytest.mark.slow
@pytest.mark.model
def test_smollm2_gives_the_same_tokens_over_prompts_of_all_lengths(
    smollm2: tuple[Any, Decoder],
) -> None:
    reference, model = smollm2
    torch.set_num_threads(2)
    for length in LENGTHS:
        paged, ids = toys.Paged(model), real_prompt(length)
        wanted = reference.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, length), max_new_tokens=8,
            min_new_tokens=8, do_sample=False, pad_token_id=0,
        )[0, length:].tolist()  # fmt: skip
        found: list[int] = []
        for _ in range(8):
            logits = paged.step([("a", found[-1:] or ids)])[0][-1].clone()
            logits[list(model.spec.eos_token_ids)] = -torch.inf  # as min_new_tokens does
            found.append(int(logits.argmax()))
        assert found == wanted, length


def test_tables_larger_than_the_weights_are_not_made(folder: Path) -> None:
    """A window that only a damaged config can name."""
    toys.edit_config(folder, max_position_embeddings=2**30)
    with pytest.raises(NotEnoughMemoryError, match=r"64\.0 GiB, more than the weights; set max_"):
        toys.load(folder)
    assert toys.load(folder, max_model_len=64).spec.max_position == 2**30


def test_rotary_fields_that_give_no_frequencies_are_an_error(folder: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    toys.edit_config(folder, rope_theta=1.0, rope_scaling=scaling)
    with pytest.raises(CheckpointError, match=r"tiny: the rotary embedding's fields give no"):
        toys.load(folder)
