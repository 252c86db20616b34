"""Sizes of decoders as Llama's: their config, their tensors, what a step reads."""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A Llama model. tied: the embedding is the head."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": self.vocab,
            "hidden_size": self.hidden, "intermediate_size": self.inner,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "tie_word_embeddings": self.tied, "hidden_act": "silu", "torch_dtype": "bfloat16",
            "bos_token_id": 0, "eos_token_id": 1,
        }  # fmt: skip

    def tensors(self) -> dict[str, tuple[int, ...]]:
        size, inner = self.hidden, self.inner
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, size), "model.norm.weight": (size,),
        }  # fmt: skip
        if not self.tied:
            found["lm_head.weight"] = (self.vocab, size)
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            found |= {
                at + "input_layernorm.weight": (size,),
                at + "post_attention_layernorm.weight": (size,),
                at + "self_attn.q_proj.weight": (q, size),
                at + "self_attn.k_proj.weight": (kv, size),
                at + "self_attn.v_proj.weight": (kv, size),
                at + "self_attn.o_proj.weight": (size, q),
                at + "mlp.gate_proj.weight": (inner, size),
                at + "mlp.up_proj.weight": (inner, size),
                at + "mlp.down_proj.weight": (size, inner),
            }
        return found

    @property
    def parameters_read(self) -> int:
        """Parameters that a step reads: all but the embedding, of which it reads a few rows."""
        embedding = 0 if self.tied else self.vocab * self.hidden
        return sum(math.prod(shape) for shape in self.tensors().values()) - embedding

    def kv_bytes(self, size: int = 2) -> int:
        """Of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * size


# Names in safetensors -> in GGUF, of a layer's tensors and of the others.
_IN_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
_OUTSIDE = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """A tensor's name in GGUF, from that in safetensors."""
    whole = name.removesuffix(".weight")
    if whole in _OUTSIDE:
        return f"{_OUTSIDE[whole]}.weight"
    number, _, part = whole.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{_IN_LAYER[part]}.weight"


SHAPES = {
    "toy": Shape(2, 64, 96, 4, 2, 16, 259),
    "1B": Shape(16, 2048, 8192, 32, 8, 64, 128256, tied=True),
    "1B of 4 layers": Shape(4, 2048, 8192, 32, 8, 64, 32000, tied=True),
    "3B": Shape(28, 3072, 8192, 24, 8, 128, 128256, tied=True),
    "8B": Shape(32, 4096, 14336, 32, 8, 128, 128256),
    "13B": Shape(40, 5120, 13824, 40, 40, 128, 32000),
}
