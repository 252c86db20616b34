"""Models by name: what their config.json says of their shape, for plans without files.

Sizes only. What a model needs beside them (tokenizer, weights) comes with its files; whoever loads
a model names those.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_LLAMA3_ROPE = {
    "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def _config(
    architecture: str,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    window: int,
    **more: Any,
) -> Mapping[str, Any]:
    return MappingProxyType({
        "architectures": [architecture], "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "max_position_embeddings": window,
        **more,
    })  # fmt: skip


def _llama2(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> Mapping[str, Any]:
    return _config("LlamaForCausalLM", hidden, inner, layers, heads, kv_heads, 32000, 4096)


def _llama3(
    hidden: int, inner: int, layers: int, heads: int, factor: float = 8.0, **more: Any
) -> Mapping[str, Any]:
    return _config(
        "LlamaForCausalLM", hidden, inner, layers, heads, 8, 128256, 131072, rope_theta=5e5,
        rope_scaling={**_LLAMA3_ROPE, "factor": factor}, **more,
    )  # fmt: skip


def _qwen25(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, tied: bool = False
) -> Mapping[str, Any]:
    vocab = 151936 if tied else 152064
    return _config("Qwen2ForCausalLM", hidden, inner, layers, heads, kv_heads, vocab, 32768,
                   rope_theta=1e6, tie_word_embeddings=tied)  # fmt: skip


def _qwen3(
    hidden: int, inner: int, layers: int, heads: int, tied: bool = False
) -> Mapping[str, Any]:
    return _config("Qwen3ForCausalLM", hidden, inner, layers, heads, 8, 151936, 40960,
                   rope_theta=1e6, head_dim=128, tie_word_embeddings=tied)  # fmt: skip


def _gemma2(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head: int, scale: int
) -> Mapping[str, Any]:
    return _config("Gemma2ForCausalLM", hidden, inner, layers, heads, kv_heads, 256000, 8192,
                   head_dim=head, query_pre_attn_scalar=scale, sliding_window=4096)  # fmt: skip


def _gemma3(
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    attended: int,
    head: int = 256,
    scale: int = 256,
    window: int = 131072,
    vocab: int = 262208,
) -> Mapping[str, Any]:
    scaling = {"rope_type": "linear", "factor": 8.0} if window > 32768 else None
    return _config("Gemma3ForCausalLM", hidden, inner, layers, heads, kv_heads, vocab, window,
                   head_dim=head, query_pre_attn_scalar=scale, sliding_window=attended,
                   rope_scaling=scaling)  # fmt: skip


def _smollm2(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> Mapping[str, Any]:
    return _config("LlamaForCausalLM", hidden, inner, layers, heads, kv_heads, 49152, 8192,
                   rope_theta=1e5, tie_word_embeddings=True)  # fmt: skip


CONFIGS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "llama-13b": _config("LlamaForCausalLM", 5120, 13824, 40, 40, 40, 32000, 2048),
    "llama-2-7b": _llama2(4096, 11008, 32, 32, 32),
    "llama-2-13b": _llama2(5120, 13824, 40, 40, 40),
    "llama-2-70b": _llama2(8192, 28672, 80, 64, 8),
    "llama-3.1-8b": _llama3(4096, 14336, 32, 32),
    "llama-3.1-70b": _llama3(8192, 28672, 80, 64),
    "llama-3.1-405b": _llama3(16384, 53248, 126, 128),
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, 32.0, tie_word_embeddings=True),
    "llama-3.2-3b": _llama3(3072, 8192, 28, 24, 32.0, tie_word_embeddings=True),
    "llama-3.3-70b": _llama3(8192, 28672, 80, 64),
    "mistral-7b": _config("MistralForCausalLM", 4096, 14336, 32, 32, 8, 32768, 32768,
                          rope_theta=1e6, sliding_window=None),
    "mixtral-8x7b": _config("MixtralForCausalLM", 4096, 14336, 32, 32, 8, 32000, 32768,
                            rope_theta=1e6, sliding_window=None, num_local_experts=8,
                            num_experts_per_tok=2),
    "qwen2.5-0.5b": _qwen25(896, 4864, 24, 14, 2, tied=True),
    "qwen2.5-1.5b": _qwen25(1536, 8960, 28, 12, 2, tied=True),
    "qwen2.5-3b": _qwen25(2048, 11008, 36, 16, 2, tied=True),
    "qwen2.5-7b": _qwen25(3584, 18944, 28, 28, 4),
    "qwen2.5-14b": _qwen25(5120, 13824, 48, 40, 8),
    "qwen2.5-32b": _qwen25(5120, 27648, 64, 40, 8),
    "qwen2.5-72b": _qwen25(8192, 29568, 80, 64, 8),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    "qwen3-30b-a3b": _config("Qwen3MoeForCausalLM", 2048, 6144, 48, 32, 4, 151936, 40960,
                             rope_theta=1e6, head_dim=128, num_experts=128,
                             num_experts_per_tok=8, moe_intermediate_size=768,
                             norm_topk_prob=True),
    "gemma-2-2b": _gemma2(2304, 9216, 26, 8, 4, 256, 256),
    "gemma-2-9b": _gemma2(3584, 14336, 42, 16, 8, 256, 256),
    "gemma-2-27b": _gemma2(4608, 36864, 46, 32, 16, 128, 144),
    "gemma-3-270m": _gemma3(640, 2048, 18, 4, 1, 512, window=32768, vocab=262144),
    "gemma-3-1b": _gemma3(1152, 6912, 26, 4, 1, 512, window=32768, vocab=262144),
    "gemma-3-4b": _gemma3(2560, 10240, 34, 8, 4, 1024),
    "gemma-3-12b": _gemma3(3840, 15360, 48, 16, 8, 1024),
    "gemma-3-27b": _gemma3(5376, 21504, 62, 32, 16, 1024, 128, 168),
    "phi-4": _config("Phi3ForCausalLM", 5120, 17920, 40, 40, 10, 100352, 16384,
                     rope_theta=250000.0, sliding_window=None, bos_token_id=100257,
                     eos_token_id=100257),
    "smollm2-135m": _smollm2(576, 1536, 30, 9, 3),
    "smollm2-360m": _smollm2(960, 2560, 32, 15, 5),
    "smollm2-1.7b": _smollm2(2048, 8192, 24, 32, 32),
    "smollm3-3b": _config("SmolLM3ForCausalLM", 2048, 11008, 36, 16, 4, 128256, 65536),
})  # fmt: skip
