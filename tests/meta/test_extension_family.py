"""A family of one's own: a class in one file and one row in the table, held to plain torch.

Its block is none that Octavo has: LayerNorms with biases, attention and MLP side by side on one
norm, a plain MLP, half of each head rotated, names and a config field of its own.
"""

import functools
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tests import kit
from tests.models import toys
from tests.ranks import on_ranks

from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.dist.base import SINGLE
from octavo.errors import CheckpointError, ConfigError
from octavo.layers.attention import Attention
from octavo.layers.embedding import Embedding
from octavo.layers.norm import LayerNorm
from octavo.layers.rope import cos_sin_table
from octavo.models.loader import load_model
from octavo.models.registry import FAMILIES, Family
from octavo.models.sharding import REPLICATED, Span, column, local_attention, row
from octavo.models.spec import ModelSpec

HIDDEN, INNER, HEADS, HEAD_DIM, LAYERS = 48, 80, 4, 12, 3


class ParallelDecoder:
    """x + scale * (attention(norm(x)) + mlp(norm(x)))."""

    EMBEDDING, HEAD = "wte.weight", "out.weight"

    @classmethod
    def parameter_shapes(cls, spec):
        outer = {cls.EMBEDDING: (spec.vocab_size, HIDDEN), cls.HEAD: (spec.vocab_size, HIDDEN)}
        inner = {
            "norm.weight": (HIDDEN,), "norm.bias": (HIDDEN,), "qkv.weight": (3 * HIDDEN, HIDDEN),
            "dense.weight": (HIDDEN, HIDDEN), "up.weight": (INNER, HIDDEN), "up.bias": (INNER,),
            "down.weight": (HIDDEN, INNER),
        }  # fmt: skip
        blocks = {f"h.{n}.{name}": s for n in range(spec.num_layers) for name, s in inner.items()}
        return {**outer, **blocks, "last.weight": (HIDDEN,), "last.bias": (HIDDEN,)}

    @classmethod
    def parameter_cuts(cls, spec):
        heads, inner = Span(HIDDEN, HEADS, "num_attention_heads"), Span(INNER, INNER, "inner")
        divided = {
            "qkv.weight": column(heads, heads, heads), "dense.weight": row(heads),
            "up.weight": column(inner), "up.bias": column(inner), "down.weight": row(inner),
        }  # fmt: skip
        blocks = {f"h.{n}.{name}": c for n in range(spec.num_layers) for name, c in divided.items()}
        return {**dict.fromkeys(cls.parameter_shapes(spec), REPLICATED), **blocks}

    @classmethod
    def product_weights(cls, spec):
        return frozenset(n for n, s in cls.parameter_shapes(spec).items() if len(s) == 2)

    @classmethod
    def components(cls, spec):
        parts = ("qkv", "dense", "up", "down")
        return [f"h.{n}.{part}" for n in range(spec.num_layers) for part in parts]

    @classmethod
    def describe_attention(cls, spec):
        return [layer.attention for layer in spec.layers]

    @classmethod
    def parameter_name(cls, spec, stored):
        return None if stored == "h.0.mask" else stored

    @classmethod
    def gguf_tensors(cls, spec):
        return {}

    def __init__(
        self, spec, parameters, *, ops, products, backend, window, head_rows, quantization,
        group=SINGLE,
    ):  # fmt: skip
        self.spec, self.backend, self._group = spec, backend, group
        self._scale, self._ops, self._products = spec.extra["parallel_scale"], ops, products
        self.attention_specs = local_attention(self.describe_attention(spec), group.size)
        self.embed = Embedding(parameters.take(self.EMBEDDING)).forward
        rope = spec.layers[0].rope
        self._table = cos_sin_table(rope, HEAD_DIM, window)

        def product(name, has_bias=False):
            method = quantization.method(name)
            bias = parameters.take(f"{name}.bias") if has_bias else None
            return products.make(parameters.matrix(method, f"{name}.weight"), bias, method=method)

        def norm(name):
            weight, bias = (parameters.take(f"{name}.{kind}") for kind in ("weight", "bias"))
            return LayerNorm(ops, weight, bias, spec.final_norm.eps)

        self._blocks = []
        for number, attention in enumerate(self.attention_specs):
            at = f"h.{number}."
            qkv, dense = product(at + "qkv"), product(at + "dense")
            layer = Attention(ops, backend, attention, qkv, dense, self._table)
            self._blocks.append(
                (norm(at + "norm"), layer, product(at + "up", True), product(at + "down"))
            )
        self._last = norm("last")
        method = quantization.method("lm_head")
        self._head = products.make(parameters.matrix(method, self.HEAD), None, head_rows, method)

    def forward(self, token_ids, metas, caches):
        return self.layers(self.embed(token_ids), metas, caches)

    def layers(self, x, metas, caches):
        for block, meta, cache in zip(self._blocks, metas, caches, strict=True):
            norm, attention, up, down = block
            normed, _ = norm.forward(x, None)
            mlp = down(F.relu(up(normed)))
            # One sum for both: they are side by side.
            both = self._group.all_reduce(attention.forward(normed, meta, cache) + mlp)
            x = x + self._scale * both
        return self._last.forward(x, None)[0]

    def logits(self, hidden):
        return self._head(hidden)

    def explain(self):
        return {"linear": self._products.explain(), **self._ops.explain()}


# This row is what a family adds to the table in models/registry.py.
FAMILY = Family(
    "parallel", "ParallelForCausalLM", norm="layer", norm_bias=True, norm_eps="layer_norm_eps",
    partial_rotary=True, extra_fields=("parallel_scale",), decoder=f"{__name__}:ParallelDecoder",
)  # fmt: skip


def plain(tensors, ids):
    """The whole model in plain torch, without a cache: logits of every token."""
    norm = functools.partial(F.layer_norm, normalized_shape=(HIDDEN,), eps=1e-5)
    x = tensors["wte.weight"][ids]
    angle = torch.arange(len(ids))[:, None] * 100.0 ** (-torch.arange(0, 6, 2) / 6)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    causal = torch.ones(len(ids), len(ids)).tril().bool()

    def rotate(heads):
        a, b, rest = heads[..., :3], heads[..., 3:6], heads[..., 6:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

    for n in range(LAYERS):
        w = {k.removeprefix(f"h.{n}."): v for k, v in tensors.items() if k.startswith(f"h.{n}.")}
        h = norm(x, weight=w["norm.weight"], bias=w["norm.bias"])
        q, k, v = (h @ w["qkv.weight"].T).view(len(ids), 3, HEADS, HEAD_DIM).unbind(1)
        scores = torch.einsum("qhd,khd->hqk", rotate(q), rotate(k)) * HEAD_DIM**-0.5
        weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        mlp = torch.relu(h @ w["up.weight"].T + w["up.bias"]) @ w["down.weight"].T
        x = x + 0.5 * (mixed @ w["dense.weight"].T + mlp)
    x = norm(x, weight=tensors["last.weight"], bias=tensors["last.bias"])
    return x @ tensors["out.weight"].T


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A folder with a checkpoint of the toy family, its tensors, and the row in the table."""
    monkeypatch.setattr("octavo.models.registry.FAMILIES", (*FAMILIES, FAMILY))
    vocab = kit.write_tokenizer(tmp_path)
    config = {
        "architectures": ["ParallelForCausalLM"], "vocab_size": vocab, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "max_position_embeddings": 256, "layer_norm_eps": 1e-5, "rope_theta": 100.0,
        "partial_rotary_factor": 0.5, "parallel_scale": 0.5, "eos_token_id": kit.EOS,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    size = {"vocab_size": vocab, "num_layers": LAYERS}
    shapes = ParallelDecoder.parameter_shapes(type("Sizes", (), size))
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) == 2 else 1)
        for name, shape in shapes.items()
    }
    save_file({**tensors, "h.0.mask": torch.ones(4)}, tmp_path / "model.safetensors")
    return tmp_path, tensors


def test_it_is_held_to_its_reference(model):
    folder, tensors = model
    loaded = toys.load(folder)
    assert isinstance(loaded.spec, ModelSpec)
    ids = toys.prompt(40)
    paged = toys.Paged(loaded)
    parts = [paged.step([("a", ids[:33])])[0], *(paged.step([("a", [i])])[0] for i in ids[33:])]
    torch.testing.assert_close(torch.cat(parts), plain(tensors, ids), rtol=0, atol=2e-4)


def test_it_answers(model):
    folder, tensors = model
    prompts = [list(b"one"), list(b"and another, longer")]
    llm = LLM(str(folder), dtype="float32", load_progress=False, num_gpu_blocks_override=32)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    llm.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = list(prompt)
        for _ in range(10):
            ids.append(int(plain(tensors, ids)[-1].argmax()))
        assert list(answer.outputs[0].token_ids) == ids[len(prompt) :]


def test_it_is_divided_among_ranks(model):
    """`parameter_cuts` and one argument are all that tensor parallelism asks for."""
    folder, tensors = model
    ids = toys.prompt(40)

    def logits(group):
        config = EngineConfig(model=str(folder), load_progress=False)
        loaded = load_model(config, kit.cpu_device(), torch.float32, group)
        assert loaded.attention_specs[0].num_heads == HEADS // group.size
        return toys.Paged(loaded).step([("a", ids)])[0]

    for size in (2, 4):
        for found in on_ranks(size, logits):
            torch.testing.assert_close(found, plain(tensors, ids), rtol=0, atol=2e-4)
    with pytest.raises(ConfigError, match=r"size=3 does not divide .*=4 of .*; possible: 1, 2, 4"):
        on_ranks(3, logits)


def test_the_loader_is_as_strict_as_with_any_other(model):
    folder, tensors = model
    with pytest.raises(ConfigError, match=r"there are h\.\*\.dense"):
        toys.load(folder, quantization_override="layers.*=int8")
    save_file(
        {n: t for n, t in tensors.items() if n != "h.1.up.bias"}, folder / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"missing: h\.1\.up\.bias"):
        toys.load(folder)
