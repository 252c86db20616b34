"""Checkpoints and tokenizers made on the spot, so that no test needs a download.

TINY: random weights with a fixed seed; attention, rope and cache faults change its answers.
CHAIN: the next-token distribution depends on the last token alone, so a test scripts what the
model says, token for token, through the real engine.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from octavo.config import EngineConfig
from octavo.runner.device import Device, cpu

# Ids 0..255 are the bytes; then control tokens; then whole pieces that a test asks for.
BOS, EOS, EOT = 256, 257, 258
CONTROL = {"<s>": BOS, "</s>": EOS, "<|eot|>": EOT}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def cpu_device() -> Device:
    """The CPU, for what takes a device."""
    return cpu(EngineConfig())


def byte_alphabet() -> list[str]:
    """The printable stand-in of each byte, in byte order, as byte-level BPE spells them."""
    table = {}
    spare = 256
    for byte in range(256):
        printable = 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255
        table[byte] = chr(byte) if printable else chr(spare)
        spare += not printable
    return [table[byte] for byte in range(256)]


def write_tokenizer(
    folder: Path, pieces: Sequence[str] = (), chat: bool = True, added: Sequence[str] = ()
) -> int:
    """A byte-level tokenizer with whole `pieces` from id 259 on. Returns its vocabulary size.

    Pieces are never the outcome of encoding (there are no merges): they are for scripts.
    added: further added tokens, such as markers of tool calls, behind the pieces.
    """
    alphabet = byte_alphabet()
    vocab = {symbol: byte for byte, symbol in enumerate(alphabet)}
    vocab.update(CONTROL)
    for piece in pieces:
        spelled = "".join(alphabet[byte] for byte in piece.encode())
        vocab.setdefault(spelled, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {
        "bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    if chat:
        settings["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(vocab) + len(added)


def llama_config(vocab_size: int, **changes: object) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab_size,
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "bos_token_id": BOS, "eos_token_id": EOS,
        "hidden_act": "silu", "torch_dtype": "float32",
    }  # fmt: skip
    return {**config, **changes}


def llama_tensors(config: Mapping[str, object], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights, large enough that a wrong position or head changes the answer."""
    size, inner, vocab = (
        int(str(config[k])) for k in ("hidden_size", "intermediate_size", "vocab_size")
    )
    heads, kv, dim = (
        int(str(config[k])) for k in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * (1.5 / math.sqrt(shape[-1]))

    tensors = {
        "model.embed_tokens.weight": torch.randn(vocab, size, generator=generator),
        "model.norm.weight": 1 + 0.2 * torch.randn(size, generator=generator),
        "lm_head.weight": random(vocab, size) * 2,
    }
    for layer in range(int(str(config["num_hidden_layers"]))):
        at = f"model.layers.{layer}."
        tensors |= {
            at + "input_layernorm.weight": 1 + 0.2 * torch.randn(size, generator=generator),
            at + "post_attention_layernorm.weight": 1
            + 0.2 * torch.randn(size, generator=generator),
            at + "self_attn.q_proj.weight": random(heads * dim, size),
            at + "self_attn.k_proj.weight": random(kv * dim, size),
            at + "self_attn.v_proj.weight": random(kv * dim, size),
            at + "self_attn.o_proj.weight": random(size, heads * dim),
            at + "mlp.gate_proj.weight": random(inner, size),
            at + "mlp.up_proj.weight": random(inner, size),
            at + "mlp.down_proj.weight": random(size, inner),
        }
    return tensors


def write_checkpoint(
    folder: Path,
    config: Mapping[str, object],
    tensors: Mapping[str, torch.Tensor],
    generation: Mapping[str, object] | None = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def tiny(folder: Path, seed: int = 0, **changes: object) -> Path:
    """A TINY checkpoint with its tokenizer."""
    config = llama_config(write_tokenizer(folder), **changes)
    return write_checkpoint(folder, config, llama_tensors(config, seed))


def chain(
    folder: Path,
    successors: Mapping[int, int | Mapping[int, float]],
    pieces: Sequence[str] = (),
    generation: Mapping[str, object] | None = None,
    **changes: object,
) -> Path:
    """A CHAIN checkpoint: after token t comes successors[t].

    A successor is a token (a logit gap of 20) or a distribution {token: probability}. Tokens
    without a successor are followed by end-of-text.
    """
    vocab = write_tokenizer(folder, pieces)
    named = sorted(successors)
    hidden = 16 * (len(named) // 16 + 1)
    heads = hidden // 16
    config = llama_config(
        vocab,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        rms_norm_eps=1e-12,
        **changes,
    )
    tensors = llama_tensors(config)
    for name in tensors:
        if "o_proj" in name or "down_proj" in name:
            tensors[name] = torch.zeros_like(tensors[name])
        elif "norm" in name:
            tensors[name] = torch.ones_like(tensors[name])
    # One dimension for each named token; all others share the last one.
    dimension = {token: i for i, token in enumerate(named)}
    embed = torch.zeros(vocab, hidden)
    head = torch.zeros(vocab, hidden)
    scale = 1 / math.sqrt(hidden)  # RMSNorm turns a one-hot row into sqrt(hidden)
    for token in range(vocab):
        embed[token, dimension.get(token, hidden - 1)] = 1.0
    head[EOS, hidden - 1] = 20 * scale
    for token, after in successors.items():
        if isinstance(after, Mapping):
            head[:, dimension[token]] = -30 * scale
            for successor, probability in after.items():
                head[successor, dimension[token]] = math.log(probability) * scale
        else:
            head[after, dimension[token]] = 20 * scale
    tensors["model.embed_tokens.weight"] = embed
    tensors["lm_head.weight"] = head
    return write_checkpoint(folder, config, tensors, generation)


def piece_ids(folder: Path, *pieces: str) -> list[int]:
    """The ids of whole pieces of a tokenizer made by `write_tokenizer`."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    alphabet = byte_alphabet()
    found = [tokenizer.token_to_id("".join(alphabet[b] for b in p.encode())) for p in pieces]
    assert None not in found, pieces
    return [int(i) for i in found if i is not None]


def script(ids: Sequence[int], start: int, end: int = EOS) -> dict[int, int | Mapping[int, float]]:
    """Successors that say `ids` after token `start`, then `end`. Ids must be distinct."""
    path = [start, *ids, end]
    assert len(set(path)) == len(path), "a chain cannot say a token twice"
    return dict(itertools.pairwise(path))
