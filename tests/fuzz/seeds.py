"""Small models that load, of which the fuzzer makes ones that may not.

Sizes are tiny: a case must take milliseconds.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.fuzz.formats import ARRAY, STRING, field, gguf_bytes, json_bytes, spm_bytes

import kit
from octavo.checkpoint.base import StoredTensor, TensorFormat
from octavo.models import gguf_config
from octavo.models.config import from_config
from octavo.models.decoder import Decoder
from octavo.models.spec import ModelSpec

TEMPLATE = kit.CHAT_TEMPLATE
_NUMBER = {int: 4, float: 6, bool: 7, str: STRING}
_SIZES = {"vocab_size": 272, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
          "max_position_embeddings": 128, "tie_word_embeddings": True}  # fmt: skip
_FAMILY_CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5,
        "rope_theta": 1e4, "hidden_act": "silu", "torch_dtype": "float32", "bos_token_id": 256,
        "eos_token_id": [257], "attention_bias": False, "mlp_bias": False,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 16,
        "max_window_layers": 1, "eos_token_id": 257, "dtype": "bfloat16",
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
                         "beta_fast": 32, "beta_slow": 1, "mscale": 1.0},
    },
    "gemma3_text": {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {
            **_SIZES, "model_type": "gemma3_text", "query_pre_attn_scalar": 8,
            "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
        },
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 64, "sliding_window": None,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5],
                         "long_factor": [2.0, 3.0]},
    },
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0], "rope_theta": 2e6,
        "pad_token_id": 0, "quantization_config": {
            "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False,
            "checkpoint_format": "gptq"},
    },
}  # fmt: skip
# A double array that replaces "h" by "H": the root, its child "h", and the leaf of that.
_UNITS = [0] * 512
_CHILD = 256 ^ ord("h")
_UNITS[0], _UNITS[_CHILD], _UNITS[1] = 256 << 10, (_CHILD ^ 1) << 10 | 256 | ord("h"), 1 << 31
CHARSMAP = struct.pack("<513I", 2048, *_UNITS) + b"H\0"
GENERATION = {
    "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.05,
    "eos_token_id": [257, 258], "do_sample": True,
}  # fmt: skip


def config(family: str) -> dict[str, Any]:
    own = _FAMILY_CONFIGS[family]
    return dict(own) if "text_config" in own else {**_SIZES, **own}


FAMILIES = tuple(_FAMILY_CONFIGS)


def _tensors(spec: ModelSpec) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found: dict[str, torch.Tensor] = {}
    products = Decoder.product_weights(spec)
    for name, shape in Decoder.parameter_shapes(spec).items():
        if spec.quantization is not None and name in products:
            for ending, part in spec.quantization.parts(shape).items():
                found[name.removesuffix("weight") + ending] = torch.zeros(
                    part.shape, dtype=part.dtype
                )
            continue
        found[name] = torch.randn(shape)
    return found


def folder(path: Path, family: str, sharded: bool = False) -> Path:
    """A checkpoint of a family, with its tokenizer and generation config."""
    kit.write_tokenizer(path)
    described = config(family)
    (path / "config.json").write_bytes(json_bytes(described))
    (path / "generation_config.json").write_bytes(json_bytes(GENERATION))
    tensors = _tensors(from_config(described))
    if not sharded:
        save_file(tensors, path / "model.safetensors")
        return path
    names = list(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2],
              "model-00002-of-00002.safetensors": names[1::2]}  # fmt: skip
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, path / file)
    index = {name: file for file, part in halves.items() for name in part}
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    (path / "model.safetensors.index.json").write_text(text)
    return path


def spm_model() -> dict[str, list[bytes]]:
    """A BPE model of SentencePiece: 3 control pieces, 256 bytes, letters and a few words."""
    texts = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((f"<0x{b:02X}>", 6) for b in range(256))]
    texts += [(t, 1) for t in ["\u2581", "h", "e", "l", "o", "he", "ll", "hell", "hello"]]
    texts += [("<sep>", 4)]
    pieces = [
        field(1, 2, text.encode()) + field(2, 5, struct.pack("<f", -float(i))) + field(3, 0, kind)
        for i, (text, kind) in enumerate(texts)
    ]
    trainer = [field(3, 0, 2), field(35, 0, 1), field(40, 0, 0), field(41, 0, 1), field(42, 0, 2),
               field(43, 0, -1)]  # fmt: skip
    normalizer = [field(1, 2, b"identity"), field(2, 2, CHARSMAP), field(3, 0, 1), field(4, 0, 0)]
    return {"pieces": pieces, "trainer": trainer, "normalizer": normalizer}


def spm_folder(path: Path) -> Path:
    """A folder with a `tokenizer.model` and what save_pretrained writes beside it."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.model").write_bytes(spm_bytes(spm_model()))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"},
                "add_bos_token": True, "legacy": True, "chat_template": TEMPLATE,
                "added_tokens_decoder": {"269": {"content": "<|eot|>", "special": True,
                "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}},
                "additional_special_tokens": ["<|eot|>"]}  # fmt: skip
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "special_tokens_map.json").write_text(json.dumps({"unk_token": "<unk>"}))
    return path


# --- GGUF ----------------------------------------------------------------------------------


def _pair(key: str, value: Any) -> list[Any]:
    if isinstance(value, list):
        return [key, ARRAY, [_NUMBER[type(value[0])] if value else 4, value]]
    return [key, _NUMBER[type(value)], value]


_GGUF: Mapping[str, dict[str, Any]] = {
    "llama": {"rope.freq_base": 1e4, "rope.dimension_count": 8, "rope.scaling.type": "yarn",
              "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
              "rope.scaling.yarn_log_multiplier": 0.5},
    "gemma2": {"rope.freq_base": 1e4, "attention.sliding_window": 16,
               "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "phi3": {"rope.freq_base": 1e4, "rope.dimension_count": 4, "attention.sliding_window": 0,
             "rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.1},
    "mistral3": {"rope.freq_base": 1e6, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                 "rope.scaling.original_context_length": 32, "rope.scaling.yarn_beta_fast": 32.0,
                 "rope.scaling.yarn_beta_slow": 1.0, "rope.scaling.yarn_log_multiplier": 1.0,
                 "attention.temperature_scale": 0.1},
}  # fmt: skip
GGUF_NAMES = tuple(_GGUF)


def _gguf_tokenizer(kind: str) -> dict[str, Any]:
    if kind == "gpt2":
        tokens = [*kit.byte_alphabet(), "<s>", "</s>", "<|eot|>", "he", "ll", "hell", "hello"]
        kinds = [1] * 256 + [3] * 3 + [1] * 4
        return {
            "model": "gpt2", "pre": "smollm", "tokens": tokens, "token_type": kinds,
            "merges": ["h e", "l l", "he ll", "hell o"], "bos_token_id": 256, "eos_token_id": 257,
            "eot_token_id": 258, "add_bos_token": True, "add_eos_token": False,
        }  # fmt: skip
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", "h", "e",
             "l", "o", "he", "ll", "hell", "hello"]  # fmt: skip
    return {
        "model": "llama", "pre": "default", "tokens": texts,
        "scores": [-float(i) for i in range(len(texts))],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * 9, "bos_token_id": 1, "eos_token_id": 2,
        "unknown_token_id": 0, "padding_token_id": 0, "add_space_prefix": True,
        "add_bos_token": True, "add_eos_token": False,
    }  # fmt: skip


def gguf_model(arch: str, tokenizer: str) -> dict[str, Any]:
    """A file as `formats.gguf_bytes` writes it; the first product in Q8_0, the rest in F32."""
    told = _gguf_tokenizer(tokenizer)
    facts = {
        "block_count": 2, "context_length": 128, "embedding_length": 32, "feed_forward_length": 32,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 8,
        "attention.value_length": 8, "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": len(told["tokens"]), **_GGUF[arch],
    }  # fmt: skip
    metadata = {"general.architecture": arch, "general.name": "fuzz", "general.alignment": 32}
    metadata |= {f"{arch}.{key}": value for key, value in facts.items()}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in told.items()}
    metadata["tokenizer.chat_template"] = TEMPLATE
    divisors = ("rope_factors_long.weight", "rope_factors_short.weight") if arch == "phi3" else ()
    form = TensorFormat("F32", 1, 4, "float32")
    ones = memoryview(bytearray(struct.pack("<2f", 1.0, 1.5)))
    pair = StoredTensor(Path("seed"), (2,), form, lambda: ones)
    stored = dict.fromkeys((*divisors, "one of layer 0", "one of layer 1"), pair)
    spec = gguf_config.read("seed", metadata, stored)
    shapes = dict.fromkeys(divisors, (2,))
    for name, target in Decoder.gguf_tensors(spec).items():
        shape = Decoder.parameter_shapes(spec).get(target.parameter)
        if shape is not None:
            shapes[name] = shape
    tensors: list[list[Any]] = []
    offset = 0
    for name, shape in shapes.items():
        count = int(torch.tensor(shape).prod())
        blocks = name.startswith("blk.0.ffn_down")
        data = bytes(count // 32 * 34) if blocks else struct.pack(f"<{count}f", *[0.5] * count)
        tensors.append([name, list(reversed(shape)), 8 if blocks else 0, offset, data])
        offset += len(data) + -len(data) % 32
    pairs = [_pair(key, value) for key, value in metadata.items()]
    return {"version": 3, "counts": {}, "pairs": pairs, "tensors": tensors}


def gguf_seeds() -> dict[str, dict[str, Any]]:
    return {
        f"{arch}-{kind}": gguf_model(arch, kind)
        for arch, kind in zip(GGUF_NAMES, ("gpt2", "llama", "llama", "gpt2"), strict=True)
    }


__all__ = ["FAMILIES", "config", "folder", "gguf_bytes", "gguf_seeds", "spm_folder", "spm_model"]
