"""Toy models of every family, made by transformers, and a way to run ours over a paged cache.

Weights are random and large, biases and norms included, so that a fault in any of them moves
the logits far beyond the tolerance.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from tests.kit import cpu_device

from octavo.attention.base import AttentionMetadata
from octavo.config import EngineConfig
from octavo.models.decoder import Decoder
from octavo.models.loader import load_model

VOCAB = 101

# Family -> the names of its classes in transformers.
_CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM"),
    "granite": ("GraniteConfig", "GraniteForCausalLM"),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM"),
    "ministral3": ("Ministral3Config", "Ministral3ForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
}
# Families with experts: few and small ones.
_EXPERTS: Mapping[str, Mapping[str, int]] = {
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
}
# The token ids of special tokens must lie in the vocabulary.
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def classes(family: str) -> tuple[Any, Any]:
    """The config and the model class of a family in transformers, whose import takes seconds."""
    import transformers

    config, model = _CLASSES[family]
    return getattr(transformers, config), getattr(transformers, model)


def make(family: str, **changes: Any) -> Any:
    """A random transformers model of a family, eager attention, fp32."""
    config_class, model_class = classes(family)
    config = config_class(**{
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 512, "attn_implementation": "eager", "rms_norm_eps": 1e-5,
        **_IDS, **_EXPERTS.get(family, {}), **changes,
    })  # fmt: skip
    torch.manual_seed(7)
    return randomize(model_class(config).eval())


@torch.no_grad()
def randomize(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(0, 0.5)
        elif "norm" in name:  # Gemma adds 1 to what is stored
            parameter.normal_("gemma" not in model.config.model_type, 0.4)
        else:
            parameter.normal_(0, 1.3 / parameter.shape[-1] ** 0.5)
    return model


def save(model: Any, folder: Path, **kwargs: Any) -> Path:
    model.save_pretrained(folder, **kwargs)
    return folder


def edit_config(folder: Path, remove: Sequence[str] = (), **changes: Any) -> None:
    """Change fields of a saved config.json."""
    path = folder / "config.json"
    config = {k: v for k, v in json.loads(path.read_text()).items() if k not in remove}
    path.write_text(json.dumps({**config, **changes}))


def load(model: str | Path, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    options = {"attention_impl": "auto", "load_progress": False, **options}
    return load_model(EngineConfig(model=str(model), **options), cpu_device(), dtype)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed + 1000 * length)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


@contextmanager
def one_thread() -> Iterator[None]:
    """Toy products are too small for two threads to help."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Paged:
    """Sequences over a paged cache. Blocks are given out in a scrambled order."""

    def __init__(
        self, model: Decoder, block_size: int = 16, num_blocks: int = 128,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.model = model
        self.block_size = block_size
        layouts = [
            model.backend.kv_layout(spec, num_blocks, block_size, dtype)
            for spec in model.attention_specs
        ]
        self.caches = [torch.full(shape, 50.0, dtype=kind) for shape, kind in layouts]
        self.free = [1 + (7 * i) % (num_blocks - 1) for i in range(num_blocks - 1)]
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def metadata(self, rows: Sequence[tuple[str, int]]) -> AttentionMetadata:
        """The step of (sequence, new tokens) rows; sequences grow by it."""
        starts, slots, positions, lengths, tables = [0], [], [], [], []
        for name, count in rows:
            start = self.lengths.get(name, 0)
            table = self.tables.setdefault(name, [])
            while len(table) * self.block_size < start + count:
                table.append(self.free.pop())
            places = range(start, start + count)
            slots += [table[p // self.block_size] * self.block_size + p % self.block_size
                      for p in places]  # fmt: skip
            positions += places
            starts.append(starts[-1] + count)
            lengths.append(start + count)
            tables.append(table)
            self.lengths[name] = start + count
        width = max(len(table) for table in tables)
        return AttentionMetadata(
            query_starts=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=torch.tensor(
                [t + [0] * (width - len(t)) for t in tables], dtype=torch.int32
            ),
            slots=torch.tensor(slots),
            positions=torch.tensor(positions),
            num_tokens=starts[-1],
            num_rows=len(rows),
            max_query_len=max(count for _, count in rows),
            max_seq_len=max(lengths),
            block_size=self.block_size,
        )

    @torch.inference_mode()
    def step(self, rows: Sequence[tuple[str, Sequence[int]]]) -> list[torch.Tensor]:
        """Logits of every new token, per row."""
        meta = self.metadata([(name, len(ids)) for name, ids in rows])
        flat = torch.tensor([i for _, ids in rows for i in ids])
        hidden = self.model.forward(flat, [meta] * len(self.caches), self.caches)
        return list(self.model.logits(hidden).split([len(ids) for _, ids in rows]))


@torch.inference_mode()
def reference_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    return model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()


@torch.inference_mode()
def greedy(model: Any, ids: Sequence[int], count: int) -> list[int]:
    """transformers' greedy continuation, by recomputing the whole sequence each time."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(reference_logits(model, ids)[-1].argmax()))
    return ids[-count:]


# What llama.cpp calls an architecture, where it is not transformers' `model_type`.
GGUF_ARCHITECTURES = {
    "mistral": "llama", "gemma3_text": "gemma3", "olmo3": "olmo2", "ministral3": "mistral3",
}  # fmt: skip
PERMUTED = ("llama", "granite", "smollm3", "mistral3")  # those whose converter reorders q and k


def gguf_name(name: str, arch: str, layers: int) -> str:
    """The name that llama.cpp's converters give a tensor, by the table of their own package."""
    number = next(n for n, a in gguf.MODEL_ARCH_NAMES.items() if a == arch)
    found = gguf.get_tensor_name_map(number, layers).get_name(name, (".weight", ".bias"))
    assert found is not None, name
    return found


def _family_facts(config: Any) -> dict[str, Any]:
    """The metadata that the converter of one family writes beside those of all."""
    kind = config.model_type
    full = config.rope_parameters.get("full_attention", config.rope_parameters)
    facts: dict[str, Any] = {"rope.freq_base": full["rope_theta"]}
    if kind in ("gemma2", "gemma3_text", "olmo3", "phi3"):
        facts["attention.sliding_window"] = config.sliding_window or 0
    if kind == "olmo3":
        types = config.layer_types
        facts["attention.sliding_window_pattern"] = [t == "sliding_attention" for t in types]
    if kind == "gemma2":
        facts["attn_logit_softcapping"] = config.attn_logit_softcapping
        facts["final_logit_softcapping"] = config.final_logit_softcapping
    if kind == "granite":
        facts |= {
            "attention.scale": config.attention_multiplier, "logit_scale": config.logits_scaling,
            "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier,
        }  # fmt: skip
    if full["rope_type"] in ("yarn", "linear") and kind in ("olmo3", "ministral3", "gemma3_text"):
        facts["rope.scaling.type"] = full["rope_type"]
        facts["rope.scaling.factor"] = full["factor"]
    if kind == "olmo3" and full["rope_type"] == "yarn":
        facts["rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
        facts["rope.scaling.attn_factor"] = full["attention_factor"]
    if kind == "ministral3":
        facts |= {
            "rope.scaling.original_context_length": full["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": full["beta_fast"],
            "rope.scaling.yarn_beta_slow": full["beta_slow"],
            "rope.scaling.yarn_log_multiplier": full["mscale_all_dim"],
            "attention.temperature_scale": full["llama_4_scaling_beta"],
        }  # fmt: skip
    if kind == "phi3":
        head_dim = head_size(config)
        facts["rope.dimension_count"] = int(head_dim * full["partial_rotary_factor"])
        facts["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    return facts


def head_size(config: Any) -> int:
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """The row order of q and k in a llama GGUF: rotary pairs side by side."""
    rows = values.shape[0]
    split = values.reshape(heads, 2, rows // heads // 2, -1)
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)


# Where blocks have their float16 factors, how many, and how large; others: two at the start.
_FACTORS = {
    "Q6_K": (208, 1, 1e-4), "Q2_K": (80, 2, 5e-3), "Q3_K": (108, 1, 1e-3), "IQ4_NL": (0, 1, 2e-3),
    "IQ4_XS": (0, 1, 1e-4),
}  # fmt: skip


def _block_bytes(kind: gguf.GGMLQuantizationType, shape: tuple[int, ...]) -> np.ndarray:
    """Random blocks with scales that give values of about 0.1, of types that numpy has no encoder
    for."""
    size, width = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(sum(shape))
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // size, width), dtype=np.uint8)
    at, count, scale = _FACTORS.get(kind.name, (0, 2, 2e-4))
    halves = (rng.normal(0, scale, (*raw.shape[:-1], count))).astype(np.float16)
    raw[..., at : at + 2 * count] = halves.view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def blocks_of(kind: str, path: Path) -> tuple[Any, Path]:
    """A toy Llama with the values of its GGUF of block type `kind`, and the file.

    Rows of K blocks and of IQ4_XS are multiples of 256 values.
    """
    size = 256 if kind.endswith("_K") or kind == "IQ4_XS" else 64
    model = make(
        "llama", hidden_size=size, intermediate_size=size, num_attention_heads=4,
        num_key_value_heads=2, head_dim=size // 4, num_hidden_layers=2,
    )  # fmt: skip
    return model, write_gguf(model, path, kind)


def write_gguf(
    model: Any,
    path: Path,
    kind: str = "F32",
    drop: Sequence[str] = (),
    extra: Mapping[str, np.ndarray] = MappingProxyType({}),
    omit: Sequence[str] = (),
    others: Mapping[str, str] = MappingProxyType({}),
    **metadata: Any,
) -> Path:
    """Store a toy model as a GGUF of block type `kind`, and give the model the stored values.

    drop: parameters that are left out; omit: metadata keys that are; others: block types of some
    modules.
    """
    config = model.config
    arch = GGUF_ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    head_dim = head_size(config)
    facts = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim, "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "vocab_size": config.vocab_size, **_family_facts(config), **metadata,
    }  # fmt: skip
    for name, value in facts.items():
        if name in omit:
            continue
        add = {str: writer.add_string, float: writer.add_float32, list: writer.add_array}.get(
            type(value), writer.add_uint32
        )
        add(f"{arch}.{name}", value)
    writer.add_eos_token_id(2)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        if name in drop:
            continue
        values = parameter.detach().numpy()
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        order = heads.get(name.split(".")[-2], 0) if arch in PERMUTED else 0
        if order:
            values = interleaved(values, order)
        stored, stored_kind = values, gguf.GGMLQuantizationType.F32
        if values.ndim == 2 and kind != "F32":
            own = others.get(name.split(".")[-2], kind)
            stored_kind = quant = gguf.GGMLQuantizationType[own]
            if own.endswith("_K") or own.startswith("IQ"):
                stored = _block_bytes(quant, values.shape)
            else:
                stored = gguf.quantize(values, quant)
            exact = torch.from_numpy(gguf.dequantize(stored, quant).reshape(values.shape))
            with torch.no_grad():
                parameter.copy_(_plain_order(exact, order) if order else exact)
        writer.add_tensor(
            gguf_name(name, arch, config.num_hidden_layers), stored, raw_dtype=stored_kind
        )
    for name, values in extra.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def split_gguf(whole: Path, count: int) -> list[Path]:
    """The parts that llama.cpp's `gguf-split` makes of a file: all metadata in the first."""
    reader = gguf.GGUFReader(whole)
    names = [whole.with_name(f"{whole.stem}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    each = -(-len(reader.tensors) // count)
    for number, path in enumerate(names):
        arch = str(reader.fields["general.architecture"].contents())
        writer = gguf.GGUFWriter(path, arch)
        if number == 0:
            for key, field in reader.fields.items():
                if not key.startswith("GGUF.") and key != "general.architecture":
                    kind = field.types[0]
                    sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
                    writer.add_key_value(key, field.contents(), kind, sub)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number * each : (number + 1) * each]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    whole.unlink()
    return names


def _plain_order(values: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of `interleaved`, found by moving row numbers through it."""
    numbers = interleaved(np.arange(values.shape[0])[:, None], heads)[:, 0]
    out = torch.empty_like(values)
    out[torch.from_numpy(numbers)] = values
    return out
