"""A model of a given size with random weights: as a .gguf file, or as a folder in bfloat16.

    python -m benchmarks.shapes TARGET --size 1B --form FORM [--layers N]

Shapes are those of `benchmarks.llama_shapes`, tokens those of another model (`--model`), cut to the
vocabulary. What it answers means nothing; what it reads, holds and multiplies is what a trained
model of that size does. The form BF16 makes a folder in Hugging Face layout; Q4_0, Q8_0, Q4_K, Q6_K
and Q4_K_M a file.
"""

import argparse
import json
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from benchmarks.engines import model_file
from benchmarks.llama_shapes import SHAPES, Shape, gguf_name
from octavo.checkpoint.gguf import FORMATS, read_gguf_header

_PIECE = 1 << 24  # bytes of noise, repeated: making it anew would take longer than writing it
_BY_NAME = {form.name: (number, form) for number, form in FORMATS.items()}
# Where a block has its factors, as float16: scales, then minima.
_FACTORS = {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}
_MORE_BITS = ("token_embd", "attn_v", "ffn_down")  # in Q4_K_M, about, and the head
_SCALES = {"Q4_0": 0.004, "Q8_0": 0.0003, "Q4_K": 0.0001, "Q6_K": 0.00002}


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--size", required=True, choices=SHAPES)
    parser.add_argument("--form", required=True, choices=[*_FACTORS, "Q4_K_M", "BF16"])
    parser.add_argument("--layers", type=int, help="of the shape's, fewer")
    parser.add_argument(
        "--model", default="qwen2.5-coder-0.5b", help="whose tokens: embedded name or .gguf file"
    )
    args = parser.parse_args()
    shape = SHAPES[args.size]
    shape = replace(shape, layers=args.layers or shape.layers)
    tokens = dict(read_gguf_header(model_file(args.model)).metadata)
    if args.form == "BF16":
        write_folder(args.target, shape, tokens)
    else:
        write_file(args.target, shape, args.form, tokens)
    return 0


def write_file(target: Path, shape: Shape, form: str, tokens: dict[str, Any]) -> None:
    """form: of all matrices; Q4_K_M: Q6_K for the head and what llama.cpp gives more bits."""
    import gguf

    writer = gguf.GGUFWriter(None, "llama")
    writer.add_block_count(shape.layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    texts, merges = _tokens(tokens, shape.vocab)
    writer.add_token_list(texts)
    writer.add_token_types([*[1] * (shape.vocab - 1), 3])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(shape.vocab - 1)
    named = {gguf_name(name): size for name, size in shape.tensors().items()}
    forms = {name: (size, _form_of(name, form, size)) for name, size in named.items()}
    for name, (size, kind) in forms.items():
        raw = _BY_NAME[kind][1]
        row = (*size[:-1], size[-1] // raw.block_values * raw.block_bytes)
        writer.add_tensor_info(
            name, size if kind == "F32" else row,
            np.dtype(np.float32 if kind == "F32" else np.uint8), raw.num_bytes(size),
            None if kind == "F32" else gguf.GGMLQuantizationType(_BY_NAME[kind][0]),
        )  # fmt: skip
    writer.write_header_to_file(target)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    noise = {kind: _noise(kind) for kind in {kind for _, kind in forms.values()}}
    with target.open("ab") as file:
        for size, kind in forms.values():
            file.write(bytes(-file.tell() % 32))
            _repeat(file, noise[kind], _BY_NAME[kind][1].num_bytes(size))


def write_folder(target: Path, shape: Shape, tokens: dict[str, Any]) -> None:
    """In bfloat16, in one file."""
    target.mkdir(parents=True)
    texts, merges = _tokens(tokens, shape.vocab)
    own = {"eos_token_id": shape.vocab - 1, "max_position_embeddings": 8192}
    config = {**shape.config(), **own}
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": texts[-1]}
    ids = {text: number for number, text in enumerate(texts)}
    for name, value in (
        ("config.json", config), ("tokenizer_config.json", settings), ("vocab.json", ids)
    ):  # fmt: skip
        (target / name).write_text(json.dumps(value))
    (target / "merges.txt").write_text("\n".join(("#version: 0.2", *merges, "")))
    header, at = {}, 0
    sizes = {name: (size, 2 * int(np.prod(size))) for name, size in shape.tensors().items()}
    for name, (size, count) in sizes.items():
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [at, at + count]}
        at += count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    matrices, norms = _noise("BF16"), np.full(2**14, 0x3F80, np.uint16)
    with (target / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for size, count in sizes.values():
            _repeat(file, (norms if len(size) == 1 else matrices).view(np.uint8), count)


def _form_of(name: str, form: str, size: tuple[int, ...]) -> str:
    if len(size) == 1:
        return "F32"
    if form != "Q4_K_M":
        return form
    more = name == "output.weight" or any(part in name for part in _MORE_BITS)
    return "Q6_K" if more else "Q4_K"


def _tokens(metadata: dict[str, Any], vocabulary: int) -> tuple[list[str], list[str]]:
    """Those of a byte-level BPE whose token 256 + i is the merge i, cut; the last is the end's."""
    texts = metadata["tokenizer.ggml.tokens"][: vocabulary - 1]
    texts += [f"<|extra_{n}|>" for n in range(len(texts), vocabulary - 1)]
    return [*texts, "<|end|>"], metadata["tokenizer.ggml.merges"][: vocabulary - 1 - 256]


def _noise(form: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Whole blocks whose values are about as large as those of trained weights."""
    random = np.random.default_rng(0)
    if form == "F32":
        return np.ones(2**14, np.float32).view(np.uint8)
    if form == "BF16":
        wide = random.normal(0, 0.02, _PIECE // 2).astype(np.float32)
        return (wide.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    size = _BY_NAME[form][1].block_bytes
    blocks = random.integers(0, 256, (_PIECE // size, size), np.uint8)
    for at in _FACTORS[form]:
        drawn = random.uniform(0.5, 1.5, len(blocks)) * _SCALES[form] * (8 if at == 2 else 1)
        blocks[:, at : at + 2] = drawn.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks.reshape(-1)


def _repeat(file: BinaryIO, noise: np.ndarray[Any, np.dtype[np.uint8]], size: int) -> None:
    while size > 0:
        file.write(noise[:size].data)
        size -= min(size, len(noise))


if __name__ == "__main__":
    sys.exit(main())
