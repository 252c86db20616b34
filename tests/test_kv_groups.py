"""A model with windows on most layers: the answers of full KV, in a part of its memory.

Six layers, five with a window of 20 tokens, so each is a KV group of its own. Every run is
compared with the same model whose layers all cache all keys, each request alone.
"""

import random

import pytest
import torch
from tests import kit

from octavo import LLM, SamplingParams
from octavo.attention.base import AttentionSpec
from octavo.core.plan import FULL, CacheSpec, blocks_needed

WINDOW = 20
LENGTHS = [1, 15, 16, 19, 20, 21, 36, 47, 64, 90]


def mixed(folder, layers=6):
    """Qwen3's block, whose config can give each layer a window; every sixth has none."""
    kinds = ["full_attention" if n % 6 == 5 else "sliding_attention" for n in range(layers)]
    config = kit.llama_config(
        kit.write_tokenizer(folder), architectures=["Qwen3ForCausalLM"], model_type="qwen3",
        num_hidden_layers=layers, use_sliding_window=True, sliding_window=WINDOW,
        max_window_layers=0, layer_types=kinds,
    )  # fmt: skip
    tensors = kit.llama_tensors(config)
    draw = torch.Generator().manual_seed(3)
    for layer in range(layers):
        for name in ("q_norm", "k_norm"):
            weight = 1 + 0.2 * torch.randn(16, generator=draw)
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = weight
    return kit.write_checkpoint(folder, config, tensors)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return mixed(tmp_path_factory.mktemp("mixed"))


@pytest.fixture(scope="module", params=["float32", "int8"])
def make(folder, request):
    def engine(**changes):
        options = {
            "dtype": "float32", "kv_cache_dtype": request.param, "num_gpu_blocks_override": 300,
            "max_model_len": 256, "load_progress": False, **changes,
        }  # fmt: skip
        return LLM(str(folder), **options)

    return engine


def prompts():
    draw = random.Random(5)
    return [[draw.randrange(256) for _ in range(n)] for n in LENGTHS]


def params(index):
    kinds = [{"temperature": 0}, {"temperature": 0.9, "seed": 11}]
    return SamplingParams(max_tokens=30, ignore_eos=True, logprobs=1, **kinds[index % 2])


EVERY = range(len(LENGTHS))


def ask(llm, order=EVERY):
    made = [{"prompt_token_ids": prompts()[i]} for i in order]
    outputs = llm.generate(made, [params(i) for i in order], use_tqdm=False)
    found = {}
    for i, output in zip(order, outputs, strict=True):
        one = output.outputs[0]
        steps = zip(one.token_ids, one.logprobs, strict=True)
        found[i] = (one.token_ids, [step[token].logprob for token, step in steps])
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.kv.pool.num_used == 0
    return found


@pytest.fixture(scope="module")
def full(make):
    """Each request alone, on layers that all cache all keys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttentionSpec, "cache", FULL)
        llm = make(enable_prefix_caching=False)
        assert llm.engine.limits.kv_groups == (FULL,)
        return {i: ask(llm, [i])[i] for i in range(len(LENGTHS))}


def check_same(found, full):
    for i, (tokens, logprobs) in found.items():
        assert tokens == full[i][0], i
        assert logprobs == pytest.approx(full[i][1], abs=1e-4)


def test_alone_together_and_cached(make, full):
    llm = make()
    assert llm.engine.limits.kv_groups == (*[CacheSpec("window", WINDOW)] * 5, FULL)
    check_same({i: ask(llm, [i])[i] for i in (3, 7)}, full)
    check_same(ask(llm), full)
    check_same(ask(llm, list(reversed(range(len(LENGTHS))))), full)
    assert llm.engine.stats.cached_tokens > 0


@pytest.mark.parametrize("budget", [16, 33])
def test_chunks_change_nothing(make, full, budget):
    check_same(ask(make(max_num_batched_tokens=budget)), full)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("cache", [False, True])
def test_preemption_changes_nothing(make, full, mode, cache):
    llm = make(
        num_gpu_blocks_override=36, max_model_len=140, enable_prefix_caching=cache,
        preemption_mode=mode,
    )  # fmt: skip
    check_same(ask(llm), full)
    assert llm.engine.stats.preemptions > 0
    assert (llm.engine.scheduler.num_swap_outs > 0) == (mode == "swap")


def test_choices_of_one_prompt(make):
    """Forks share blocks of every group, and copy the last one of each."""
    ask_four = SamplingParams(n=4, temperature=1, seed=5, max_tokens=40, ignore_eos=True)
    prompt = {"prompt_token_ids": prompts()[7]}
    grouped = make().generate(prompt, ask_four, use_tqdm=False)[0].outputs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttentionSpec, "cache", FULL)
        whole = make().generate(prompt, ask_four, use_tqdm=False)[0].outputs
    assert [one.token_ids for one in grouped] == [one.token_ids for one in whole]


def test_memory_per_token(folder):
    """Window layers hold their window, whatever the length; the full layer holds every token."""

    def most_bytes(length):
        llm = LLM(
            str(folder), dtype="float32", num_gpu_blocks_override=200, max_model_len=500,
            max_num_batched_tokens=16, load_progress=False,
        )  # fmt: skip
        prompt = {"prompt_token_ids": [n % 256 for n in range(length - 8)]}
        llm.generate(prompt, SamplingParams(max_tokens=9, ignore_eos=True), use_tqdm=False)
        limits = llm.engine.limits
        blocks = llm.engine.stats.most_held_slots // 16
        assert blocks <= blocks_needed(limits.kv_groups, length, 16, chunk=16)
        return blocks * limits.block_bytes

    grouped = [most_bytes(length) for length in (160, 480)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttentionSpec, "cache", FULL)
        whole = [most_bytes(length) for length in (160, 480)]
    token = 2 * 2 * 16 * 4  # keys and values of two heads of 16, of one layer
    assert whole == [6 * token * 160, 6 * token * 480]
    assert grouped[1] - grouped[0] == token * 320  # one layer of six grows
    assert grouped[1] < 0.35 * whole[1]
