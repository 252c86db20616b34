"""Captured steps: the bits of ordinary ones, and none where something cannot be recorded."""

import dataclasses
import logging

import pytest
import torch
from tests import kit
from tests.models import toys
from tests.models.test_decoder import VARIANTS

from octavo import LLM, SamplingParams
from octavo.attention import registry
from octavo.attention.cpu import CpuAttention
from octavo.attention.torch_ref import TorchAttention
from octavo.core.plan import PlanRow, StepPlan
from octavo.kernels.cpu import target
from octavo.runner import steps as runner_steps
from octavo.runner.batch import BatchBuilder
from octavo.runner.kv_cache import KVCache

CPU = kit.cpu_device()
# Without AMX, torch multiplies bfloat16, and only integers are multiplied by kernels.
WEIGHTS = {} if target.has_tiles() else {"quantization": "int8"}


def make(folder, eager=False, **options):
    given = {"dtype": "bfloat16", "num_gpu_blocks_override": 64, "swap_space": 0, **WEIGHTS,
             **options}  # fmt: skip
    return LLM(str(folder), enforce_eager=eager, load_progress=False, **given)


def steps(llm):
    return llm.engine.executor.explain()["steps"]


def answers(llm, seed=0):
    """Prompts longer and shorter than a step, greedy and drawn, so that rows mix."""
    prompts = [[(7 * i + 3 * n) % 90 + 3 for i in range(n)] for n in (1, 5, 17, 40, 90)]
    params = [
        SamplingParams(temperature=t, seed=seed, max_tokens=12, ignore_eos=True, logprobs=2)
        for t in (0.0, 1.0, 0.0, 0.7, 0.0)
    ]
    made = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = [out.outputs[0] for out in llm.generate(made, params, use_tqdm=False)]
    return [(out.token_ids, list(out.logprobs)) for out in outputs]


@pytest.mark.parametrize(("budget", "kv"), [(16, "auto"), (33, "int8"), (33, "fp8"), (300, "auto")])
def test_a_captured_step_gives_the_bits_of_an_ordinary_one(tmp_path, budget, kv):
    folder = kit.tiny(tmp_path)
    captured = make(folder, max_num_batched_tokens=budget, kv_cache_dtype=kv)
    assert steps(captured) == f"captured up to {min(budget, 256)} tokens"
    ordinary = make(folder, eager=True, max_num_batched_tokens=budget, kv_cache_dtype=kv)
    assert answers(captured) == answers(ordinary)


@pytest.mark.parametrize(
    "variant",
    ["gemma2", "gemma3", "phi3", "olmo2", "olmo3-yarn", "granite", "smollm3", "ministral3"],
)
def test_steps_of_every_family_are_captured(tmp_path, variant):
    family, changes = VARIANTS[variant]
    vocab = kit.write_tokenizer(tmp_path)
    sizes = {"hidden_size": 96, "intermediate_size": 96, "head_dim": 16, "vocab_size": vocab}
    toys.save(toys.make(family, **{**changes, **sizes}), tmp_path)
    captured = make(tmp_path, max_num_batched_tokens=33)
    assert steps(captured) == "captured up to 33 tokens"
    assert answers(captured) == answers(make(tmp_path, eager=True, max_num_batched_tokens=33))


def rows(*given):
    """A plan of rows (first position, tokens), each over four blocks of its own."""
    made = [
        PlanRow(str(n), tuple(range(n, n + count)), start, (tuple(range(4 * n + 1, 4 * n + 5)),))
        for n, (start, count) in enumerate(given)
    ]
    return StepPlan(0, tuple(made))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@torch.inference_mode()
def test_every_family(tmp_path, family):
    """Windows (mistral), biases (qwen2), head norms (qwen3): replayed over a shared cache."""
    size = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
    window = {"sliding_window": 20} if family == "mistral" else {}
    model = toys.load(
        toys.save(toys.make(family, **size, **window), tmp_path), torch.bfloat16, **WEIGHTS
    )
    cache = KVCache(model.backend, model.attention_specs, 30, 16, torch.bfloat16, CPU)
    builder = BatchBuilder(16, 20, CPU)
    for layer in cache.layers:
        layer.zero_()
    captured = runner_steps.capture_steps(CPU, model, cache, builder, 100)
    assert captured is not None
    for plan in (rows((0, 1)), rows((0, 60)), rows((0, 30), (0, 1), (0, 50)),
                 rows((30, 1), (1, 8), (50, 1)), rows(*[(40, 1)] * 6)):  # fmt: skip
        step = builder.build(plan)
        found = captured.forward(step.token_ids, step.metas).clone()
        metas = cache.per_layer(step.metas)
        assert torch.equal(found, model.forward(step.token_ids, metas, cache.layers))


def test_not_asked_for_or_not_possible(tmp_path):
    folder = kit.tiny(tmp_path)
    assert steps(make(folder, eager=True)) == "not captured"
    assert steps(make(folder, attention_impl="torch")) == "not captured"


def test_products_of_floats_are_captured(tmp_path):
    if "avx2" not in target.cpu()[1]:
        pytest.skip("without AVX2 they are calls of a library")
    model = make(kit.tiny(tmp_path), dtype="float32", quantization=None)
    assert steps(model) == "captured up to 256 tokens"


class Doubtful(CpuAttention):
    """Looks like the backend of ours, but computes with torch in between."""

    name = "doubtful"

    def attend(self, query, cache, meta, spec):
        return TorchAttention().attend(query, cache, meta, spec)

    kv_layout = TorchAttention.kv_layout
    write = TorchAttention.write
    rope_write = None


class Forgetful(CpuAttention):
    """Prepares the first step only; all replays see that one."""

    name = "forgetful"

    def prepare_replay(self, meta, spec, dtype, captured_tokens):
        if not self._work:
            super().prepare_replay(meta, spec, dtype, captured_tokens)
            self.kept = dict(self._work)
        return True


@pytest.mark.parametrize(
    ("backend", "said"), [(Doubtful, "has no capturable kernel"), (Forgetful, "differs")]
)
def test_what_cannot_be_recorded_or_replayed_is_not_used(
    tmp_path, backend, said, monkeypatch, caplog
):
    monkeypatch.setattr(registry, "_registered", {backend.name: backend})
    with caplog.at_level(logging.INFO, logger=runner_steps.__name__):
        llm = make(kit.tiny(tmp_path), attention_impl=backend.name, max_num_batched_tokens=64)
    assert steps(llm) == "not captured"
    assert said in caplog.text
    assert answers(llm) == answers(llm)


class PaddedAttention(TorchAttention):
    """Replayed as a GPU would: on as many tokens as captured, of which the last may be padding."""

    name = "padded"
    capabilities = dataclasses.replace(TorchAttention.capabilities, graph_safe=True)

    def __init__(self):
        self.prepared, self.replaying = {}, False

    def prepare_replay(self, meta, spec, dtype, captured_tokens):
        self.prepared[captured_tokens] = meta
        return True

    def attend(self, query, cache, meta, spec):
        meta = self.prepared[len(query)] if self.replaying else meta
        return super().attend(query, cache, meta, spec)


class Ladder:
    """Captures of several sizes; each replay runs all that was captured."""

    pads_steps = True

    def __init__(self, backend):
        self.backend, self.sizes = backend, []

    def capture_sizes(self, max_tokens):
        return [size for size in (1, 4, 16, 64) if size <= max_tokens]

    def capture(self, run):
        device, result = self, run()

        class Run:
            def replay(self, num_tokens):
                device.sizes.append(len(result))
                device.backend.replaying = True
                result[:] = run()
                device.backend.replaying = False
                return result[:num_tokens]

        return Run()


@torch.inference_mode()
def test_a_ladder_of_captures_fits_the_contract(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_registered", {"padded": PaddedAttention})
    size = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
    folder = toys.save(toys.make("llama", **size), tmp_path)
    model = toys.load(folder, torch.float32, attention_impl="padded")
    cache = KVCache(model.backend, model.attention_specs, 30, 16, torch.float32, CPU)
    for layer in cache.layers:
        layer.zero_()
    builder, device = BatchBuilder(16, 20, CPU), Ladder(model.backend)
    captured = runner_steps.capture_steps(device, model, cache, builder, 50)
    assert captured is not None
    assert captured.max_tokens == 16
    device.sizes.clear()
    for plan in (rows((0, 1)), rows((0, 3)), rows((0, 10), (0, 2)), rows(*[(3, 1)] * 4)):
        step = builder.build(plan)
        found = captured.forward(step.token_ids, step.metas).clone()
        metas = cache.per_layer(step.metas)
        assert torch.equal(found, model.forward(step.token_ids, metas, cache.layers))
    assert device.sizes == [1, 4, 16, 4]
