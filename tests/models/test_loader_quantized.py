"""Quantized models: made at load, or read from AWQ, GPTQ and GGUF files; strict as the others."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models import toys
from tests.quant import packers

import kit
from octavo.config import EngineConfig
from octavo.errors import CheckpointError, ConfigError
from octavo.kernels.cpu.device import CpuDevice
from octavo.models.loader import load_model

SIZES = {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture(autouse=True)
def _quiet():
    with toys.one_thread():
        yield


def logits(model, seed=0):
    paged = toys.Paged(model)
    return paged.step([("a", [i % 100 for i in toys.prompt(40, seed)])])[0]


def near(found, wanted, most):
    """Relative error of all logits together, in (most / 20, most): neither wrong nor exact."""
    error = float((found - wanted).norm() / wanted.norm())
    assert most / 20 < error < most


def same(found, wanted):
    """But for the order of sums."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))


def quantized(folder: Path, method: str, sizes: dict[str, int] | None = None, **options) -> Path:
    """A tiny AWQ or GPTQ checkpoint in `folder / method`, and the same values in plain tensors.

    sizes: of the model, where they differ from `kit.tiny`'s.
    """
    plain = kit.tiny(folder / "plain", **(sizes or {}))
    tensors, config = load_file(plain / "model.safetensors"), plain / "config.json"
    stored = {}
    for name, tensor in list(tensors.items()):
        if not name.endswith("_proj.weight"):
            continue
        parts, values = _parts(tensor, method, **options)
        tensors[name] = values.contiguous()
        stored |= {name.replace("weight", part): data for part, data in parts.items()}
    save_file(tensors, plain / "model.safetensors")
    target = kit.tiny(folder / method, **(sizes or {}))
    others = {n: t for n, t in tensors.items() if not n.endswith("_proj.weight")}
    save_file({**others, **stored}, target / "model.safetensors")
    made = {"awq": packers.awq_config, "gptq": packers.gptq_config}[method]
    changes = {"bits": options["bits"]} if "bits" in options else {}
    changes |= {"desc_act": True} if "order" in options else {}
    fields = json.loads(config.read_text()) | {"quantization_config": made(**changes)}
    (target / "config.json").write_text(json.dumps(fields))
    return target


def _parts(weight, method, bits=4, order=None):
    """Round to the nearest codes in groups of 32, then pack."""
    n, k = weight.shape
    index = torch.arange(k) // 32 if order is None else order(k)
    groups, top = k // 32, 2**bits - 1
    scales, zeros = torch.zeros(groups, n), torch.zeros(groups, n)
    for g in range(groups):
        part = weight[:, index == g]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scales[g] = ((high - low) / top).half()
        zeros[g] = (-low / scales[g]).round().clamp(1, top)
    codes = (weight.T / scales[index] + zeros[index]).round().clamp(0, top).long()
    values = ((codes - zeros[index]) * scales[index]).T
    zeros = zeros.long()
    if method == "awq":
        parts = {"qweight": packers.awq_packed(codes), "qzeros": packers.awq_packed(zeros)}
    else:
        parts = {"qweight": packers.gptq_packed(codes.T, bits).T.contiguous(),
                 "qzeros": packers.gptq_packed(zeros - 1, bits), "g_idx": index.int()}  # fmt: skip
    return {**parts, "scales": scales.half()}, values


@pytest.mark.parametrize("method", ["awq", "gptq"])
@pytest.mark.parametrize("named", [False, True])
def test_a_checkpoint_of_four_bits_is_computed_on(method, named, tmp_path, caplog, monkeypatch):
    folder = quantized(tmp_path, method)
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    with caplog.at_level("INFO"):
        model = toys.load(folder, quantization=method if named else None)
    assert f"{method}, 4 bits, computed on as int4" in caplog.text
    assert "int4 weights" in model.explain()["linear"]
    same(logits(model), logits(toys.load(tmp_path / "plain")))


def test_a_gptq_checkpoint_of_eight_bits(tmp_path):
    model = toys.load(quantized(tmp_path, "gptq", bits=8))
    assert "int8 weights" in model.explain()["linear"]
    same(logits(model), logits(toys.load(tmp_path / "plain")))


def test_groups_in_any_order_are_expanded_and_the_log_says_so(tmp_path, caplog, monkeypatch):
    def order(k):
        return torch.randperm(k, generator=torch.Generator().manual_seed(k)) % (k // 32)

    folder = quantized(tmp_path, "gptq", order=order)
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    with caplog.at_level("INFO"):
        model = toys.load(folder)
    assert "expanded: no kernel computes on groups in any order" in caplog.text
    torch.testing.assert_close(
        logits(model), logits(toys.load(tmp_path / "plain")), rtol=0, atol=1e-3
    )


def test_a_device_without_integer_products_gets_dequantized_weights(tmp_path):
    class Plain(CpuDevice):
        quantization = ()

    config = EngineConfig(model=str(quantized(tmp_path, "awq")), load_progress=False)
    model = load_model(config, Plain(config), torch.float32)
    assert "int4" not in model.explain()["linear"]
    torch.testing.assert_close(
        logits(model), logits(toys.load(tmp_path / "plain")), rtol=0, atol=1e-3
    )


def test_missing_misshaped_and_unexpected_parts_are_named(tmp_path):
    folder = quantized(tmp_path, "awq")
    path, at = folder / "model.safetensors", "model.layers.1.mlp.down_proj."
    whole = load_file(path)

    def said(**changes):
        tensors = whole | changes
        save_file({k: v for k, v in tensors.items() if v is not None}, path)
        with pytest.raises(CheckpointError) as caught:
            toys.load(folder)
        return str(caught.value)

    assert f"missing: {at}qzeros" in said(**{at + "qzeros": None})
    assert f"'{at}scales' has the shape (2, 64), not (3, 64)" in said(
        **{at + "scales": torch.ones(2, 64)}
    )
    assert f"unexpected: {at}g_idx" in said(**{at + "g_idx": torch.zeros(96, dtype=torch.int32)})
    assert f"'{at}qweight' has the type F32" in said(**{at + "qweight": torch.zeros(96, 8)})


def test_an_option_that_disagrees_is_refused_before_weights_are_read(tmp_path):
    folder = quantized(tmp_path, "awq")
    with pytest.raises(ConfigError, match="quantized with 'awq' already"):
        toys.load(folder, quantization="int8")


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", pytest.param("Q4_K", marks=pytest.mark.slow)])
def test_blocks_of_four_bits_keep_their_codes_under_int4(kind, tmp_path):
    _, path = toys.blocks_of(kind, tmp_path / "m.gguf")
    exact = logits(toys.load(path))
    near(logits(toys.load(path, quantization="w4a8")), exact, 0.08)
    kept = toys.load(path, quantization="int4", quantization_override="lm_head=none")
    same(logits(kept), exact)
    assert toys.load(path, quantization="int4").explain()["linear"].startswith("int4 weights")


@pytest.mark.parametrize(
    ("method", "most"), [("int8", 0.03), ("int4", 0.35), ("w8a8", 0.05), ("w4a8", 0.35)]
)
def test_weights_rounded_at_load(method, most, tmp_path):
    folder = kit.tiny(tmp_path)
    exact = logits(toys.load(folder))
    near(logits(toys.load(folder, quantization=method)), exact, most)


def test_overrides_by_part(tmp_path):
    folder = kit.tiny(tmp_path)
    exact = logits(toys.load(folder))
    model = toys.load(folder, quantization="int8", quantization_override="layers.*=none")
    assert "int8 weights" in model.explain()["linear"]
    near(logits(model), exact, 0.03)
    model = toys.load(folder, quantization="int4", quantization_override="*=none")
    assert torch.equal(logits(model), exact)
    with pytest.raises(ConfigError, match=r"no part of the model is called 'layers\.2\.\*'"):
        toys.load(folder, quantization_override="layers.2.*=int8")


def test_a_row_does_not_depend_on_the_others_of_its_batch(tmp_path):
    model = toys.load(kit.tiny(tmp_path), quantization="int4")
    paged, prompts = toys.Paged(model), {name: toys.prompt(20, i) for i, name in enumerate("abc")}
    prompts = {name: [i % 256 for i in ids] for name, ids in prompts.items()}
    together = dict(zip(prompts, paged.step(list(prompts.items())), strict=True))
    for name, ids in prompts.items():
        assert torch.equal(toys.Paged(model).step([(name, ids)])[0], together[name])


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_a_product_stored_as_floats_stays_one(method, tmp_path):
    """`modules_to_not_convert`: the values are not rounded to codes, unless that is asked for."""
    folder = quantized(tmp_path, method)
    path, name = folder / "model.safetensors", "model.layers.0.mlp.down_proj."
    values = load_file(tmp_path / "plain" / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    fine = values[name + "weight"] + 0.01 * torch.randn(64, 96, generator=generator)
    stored = {n: t for n, t in load_file(path).items() if not n.startswith(name)}
    save_file({**stored, name + "weight": fine}, path)
    save_file({**values, name + "weight": fine}, tmp_path / "plain" / "model.safetensors")
    model = toys.load(folder, quantization_override="*=none")
    exact = logits(toys.load(tmp_path / "plain"))
    torch.testing.assert_close(logits(model), exact, rtol=0, atol=1e-3)
    rounded = toys.load(folder, quantization_override="layers.0.mlp.down_proj=int4")
    kept = toys.load(folder)
    x = torch.randn(3, 96, generator=generator)
    products = [m._layers[0].__self__._mlp.__self__ for m in (kept, rounded)]
    found = [mlp._down(x) for mlp in products]
    torch.testing.assert_close(found[0], x @ fine.T, rtol=1e-4, atol=1e-4)
    assert float((found[1] - x @ fine.T).norm() / (x @ fine.T).norm()) > 0.01


def test_biases_of_zeros_are_left_out_and_the_log_says_so(tmp_path, caplog, monkeypatch):
    """AutoGPTQ writes one for every product, whether the family has biases or not."""
    folder = quantized(tmp_path, "gptq")
    path = folder / "model.safetensors"
    whole, plain = load_file(path), logits(toys.load(folder))
    outputs = {n: t.shape[1] for n, t in whole.items() if n.endswith(".qweight")}
    biases = {n.replace("qweight", "bias"): torch.zeros(size).half() for n, size in outputs.items()}
    save_file({**whole, **biases}, path)
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    with caplog.at_level("INFO"):
        assert torch.equal(logits(toys.load(folder)), plain)
    assert "left out, all zero: model.layers.0.mlp.down_proj.bias" in caplog.text
    biases["model.layers.1.mlp.up_proj.bias"][3] = 0.5
    save_file({**whole, **biases}, path)
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.1\.mlp\.up_proj\.bias$"):
        toys.load(folder)


def test_settings_beside_the_config_are_read(tmp_path):
    for method, name, fields in (
        ("awq", "quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4,
                                      "version": "GEMM"}),
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False}),
    ):  # fmt: skip
        folder = quantized(tmp_path / method, method)
        plain = logits(toys.load(folder))
        toys.edit_config(folder, remove=["quantization_config"])
        with pytest.raises(CheckpointError, match=r"qweight.*looked for: config.json .*quantize"):
            toys.load(folder)
        (folder / name).write_text(json.dumps(fields))
        assert torch.equal(logits(toys.load(folder)), plain)


def test_derived_tensors_are_left_out_and_the_log_says_so(tmp_path, caplog, monkeypatch):
    folder = kit.tiny(tmp_path)
    path = folder / "model.safetensors"
    whole, plain = load_file(path), logits(toys.load(folder))
    derived = {
        f"model.layers.{i}.self_attn.rotary_emb.{name}": torch.ones(2)
        for i in range(2) for name in ("inv_freq", "cos_cached", "sin_cached")
    }  # fmt: skip
    save_file({**whole, **derived}, path)
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    with caplog.at_level("INFO"):
        assert torch.equal(logits(toys.load(folder)), plain)
    assert "left out, not needed: model.layers.0.self_attn.rotary_emb.cos_cached" in caplog.text


def test_a_tied_config_beside_a_quantized_head_is_refused(tmp_path):
    """The advice to tie was wrong for a head that is stored in parts; so is to drop that head."""
    folder = quantized(tmp_path, "gptq")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    parts, _ = _parts(tensors.pop("lm_head.weight"), "gptq")
    save_file({**tensors, **{f"lm_head.{name}": part for name, part in parts.items()}}, path)
    toys.edit_config(folder, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"stores a head of its own \(lm_head.g_idx"):
        toys.load(folder)


def fp8(
    folder: Path,
    *,
    drop: str = "",
    name: str = "weight_scale_inv",
    sizes: dict[str, int] | None = None,
) -> Path:
    """A tiny checkpoint in blocks of 32 x 32 in `folder / "fp8"`, one product in floats; the same
    values in plain tensors. sizes: as of `quantized`."""
    plain = kit.tiny(folder / "plain", **(sizes or {}))
    tensors, stored = load_file(plain / "model.safetensors"), {}
    torch.manual_seed(0)
    for weight in [n for n in tensors if n.endswith("_proj.weight")]:
        if weight.startswith("model.layers.1.mlp.down_proj"):
            continue  # modules_to_not_convert
        values = tensors[weight]
        n, k = values.shape
        scale = torch.rand(-(-n // 32), -(-k // 32)) * 0.01 + 0.002
        wide = scale.repeat_interleave(32, 0)[:n].repeat_interleave(32, 1)[:, :k]
        codes = (values / wide).to(torch.float8_e4m3fn)
        tensors[weight] = (codes.float() * wide).contiguous()
        stored |= {weight: codes, weight.replace("weight", name): scale}
        stored |= {weight.replace("weight", "input_scale"): torch.tensor(0.5)}
    save_file(tensors, plain / "model.safetensors")
    target = kit.tiny(folder / "fp8", **(sizes or {}))
    save_file({n: t for n, t in (tensors | stored).items() if n != drop},
              target / "model.safetensors")  # fmt: skip
    toys.edit_config(target, quantization_config={
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "static",
        "weight_block_size": [32, 32],
    })  # fmt: skip
    return target


def test_an_fp8_checkpoint_is_expanded_where_there_are_no_such_products(tmp_path):
    model = toys.load(fp8(tmp_path))
    expected = logits(toys.load(tmp_path / "plain"))
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-4)
    folder = fp8(tmp_path / "other", name="weight_scale")
    assert torch.equal(logits(toys.load(folder, quantization="fp8")), logits(model))


def test_float8_without_a_scale_is_refused(tmp_path):
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    folder = fp8(tmp_path, drop=name)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors[name.replace("weight_scale_inv", "input_scale")]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.o_proj.*neither is there"):
        toys.load(folder)
    toys.edit_config(folder, remove=["quantization_config"])
    with pytest.raises(CheckpointError, match="has the type F8_E4M3"):
        toys.load(folder)


def test_fp8_at_load_is_for_devices_that_have_it(tmp_path):
    with pytest.raises(
        ConfigError, match=r"device 'cpu' has no fp8 products .it has: int8, int4, w8a8, w4a8"
    ):
        toys.load(kit.tiny(tmp_path), quantization="fp8")
