"""`LLM` on toy checkpoints: what it accepts, what it refuses, and what it says.

Tests named after a row of the bug cases show that the fault of that row is not in this engine.
CHAIN checkpoints say what a test scripts, so texts are compared character by character.
"""

import gc
import json
import logging
import math
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from safetensors.torch import load_file, save_file

import kit
from octavo import LLM, SamplingParams
from octavo.engine.fake import FakeRunner
from octavo.errors import (
    ConfigError,
    ContextLengthError,
    EngineError,
    ModelNotFoundError,
    RequestError,
    RequestTypeError,
)
from octavo.kernels.cpu import memory
from octavo.params import RequestOutputKind
from octavo.schedulers import PriorityScheduler

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def load(folder, **changes):
    return LLM(
        str(folder),
        **{
            "dtype": "float32", "num_gpu_blocks_override": 300, "max_model_len": 256,
            "load_progress": False, **changes,
        },
    )  # fmt: skip


def say(folder, pieces, start="a", end=kit.EOS, **changes):
    """A model that says `pieces` after the prompt `start`, one token each."""
    folder = folder / "chain"
    kit.write_tokenizer(folder, pieces)
    ids = kit.piece_ids(folder, *pieces)
    return load(kit.chain(folder, kit.script(ids, ord(start), end), pieces), **changes)


def texts(llm, prompt, params):
    """(whole text, joined stream, finish reason, stop reason)."""
    whole = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    deltas = [o.outputs[0] for o in llm.stream(prompt, params)]
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == whole.finish_reason
    assert deltas[-1].stop_reason == whole.stop_reason
    assert [t for d in deltas for t in d.token_ids] == whole.token_ids
    return whole.text, "".join(d.text for d in deltas), whole.finish_reason, whole.stop_reason


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    return load(tiny_folder)


def random_prompt(length, seed=0):
    draw = random.Random(1000 * seed + length)
    return [draw.randrange(256) for _ in range(length)]


def tokens_of(output):
    return output.outputs[0].token_ids


# The shapes that a prompt may have, and their order


def test_prompts_of_every_form_in_their_order(tiny):
    forms = ["hello", [104, 101], {"prompt": "hello"}, {"prompt_token_ids": [1, 2, 3]}]
    outputs = tiny.generate(forms, GREEDY, use_tqdm=False)
    assert [o.prompt for o in outputs] == ["hello", None, "hello", None]
    assert [o.prompt_token_ids for o in outputs][1:4:2] == [[104, 101], [1, 2, 3]]
    assert tokens_of(outputs[0]) == tokens_of(outputs[2])
    for form, output in zip(forms, outputs, strict=True):
        (alone,) = tiny.generate(form, GREEDY, use_tqdm=False)
        assert tokens_of(alone) == tokens_of(output)
    assert tiny.generate([], GREEDY, use_tqdm=False) == []


def test_more_prompts_than_the_queue_holds(tiny_folder):
    llm = load(tiny_folder, max_num_seqs=2, max_waiting=3)
    outputs = llm.generate([[i] for i in range(40)], GREEDY, use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == [[i] for i in range(40)]


def test_one_params_each(tiny):
    each = [GREEDY.with_(max_tokens=n) for n in (1, 2, 3)]
    outputs = tiny.generate([[1], [2], [3]], each, use_tqdm=False)
    assert [len(tokens_of(o)) for o in outputs] == [1, 2, 3]


@pytest.mark.parametrize(
    ("prompts", "params", "error", "says"),
    [
        ("x", [], RequestError, "sampling_params has 0 values for 1 prompt"),
        ([""], GREEDY, RequestError, "empty"),
        (["a", ""], GREEDY, RequestError, "empty"),
        ([[]], GREEDY, RequestError, "empty"),
        ([[1, 10**6]], GREEDY, RequestError, "1000000"),
        ([[1, "x"]], GREEDY, RequestTypeError, "integers"),
        ([{"text": "a"}], GREEDY, RequestError, "prompt_token_ids"),
        ([3.5], GREEDY, RequestTypeError, "float"),
        (7, GREEDY, RequestTypeError, "int"),
        (["a"], {"temperature": 0}, RequestTypeError, "SamplingParams"),
        (["a", "b"], [GREEDY], RequestError, "1 value for 2"),
        ([[1] * 300], GREEDY, ContextLengthError, "300"),
        ([[1] * 250], GREEDY, ContextLengthError, "at most 6"),
    ],
)
def test_lim_07_bad_prompts_are_refused_whole_before_any_work(tiny, prompts, params, error, says):
    steps = tiny.engine.stats.steps
    with pytest.raises(error, match=says):
        tiny.generate(prompts, params, use_tqdm=False)
    assert tiny.engine.stats.steps == steps
    assert not tiny.engine.has_work()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_num_seq": 3}, "did you mean 'max_num_seqs'"),
        ({"block_size": 12}, "block_size"),
        ({"block_size": "16"}, "block_size must be int"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": math.nan}, "gpu_memory_utilization"),
        ({"dtype": "float17"}, "dtype must be one of"),
        ({"scheduler": "fifi"}, "fifo"),
        ({"attention_impl": "nope"}, "torch"),
        ({"max_model_len": 100_000}, "512"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 does not divide"),
    ],
)
def test_bad_options_are_refused_by_name(tiny_folder, options, says):
    with pytest.raises(ConfigError, match=says):
        load(tiny_folder, **options)


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        load(tmp_path / "nowhere")


def test_steps_of_few_tokens_are_taken_with_the_reason_why_they_are_slow(
    tiny_folder, tiny, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    one = load(tiny_folder, max_num_batched_tokens=1)
    assert "max_num_batched_tokens is 1" in caplog.text
    assert caplog.text.count("a prompt of 1000 takes 1000 steps, and of max_num_seqs=128") == 1
    want = tiny.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    found = one.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    assert tokens_of(found[0]) == tokens_of(want[0])
    caplog.clear()
    load(tiny_folder, max_num_batched_tokens=128)
    assert "max_num_batched_tokens" not in caplog.text


def test_lim_13_a_window_that_the_pool_cannot_hold(tiny_folder):
    with pytest.raises(ConfigError, match=r"256.*128.*at most 128"):
        load(tiny_folder, num_gpu_blocks_override=8)
    fits = load(tiny_folder, num_gpu_blocks_override=8, max_model_len=None)
    assert fits.engine.limits.max_model_len == 128
    (whole,) = fits.generate([random_prompt(120)], GREEDY, use_tqdm=False)
    assert len(tokens_of(whole)) == 8
    with pytest.raises(ConfigError, match="block"):
        load(tiny_folder, num_gpu_blocks_override=None, kv_cache_memory_bytes=100)


# Prefix cache


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 48])
@pytest.mark.parametrize("max_tokens", [1, 8])
def test_pfx_01_full_hits_recompute_what_they_must(tiny_folder, tiny, length, max_tokens):
    params = GREEDY.with_(max_tokens=max_tokens)
    prompt = random_prompt(length)
    cold = load(tiny_folder, enable_prefix_caching=False)
    (want,) = cold.generate([prompt], params, use_tqdm=False)
    tiny.reset_prefix_cache()
    rounds = [[prompt], [prompt], [prompt], [prompt] * 8]
    for batch in rounds:
        for output in tiny.generate(batch, params.with_(n=2), use_tqdm=False):
            assert [c.token_ids for c in output.outputs] == [tokens_of(want)] * 2
            assert output.num_cached_tokens <= length - 1
    (longer,) = tiny.generate([prompt + random_prompt(16, 3)], params, use_tqdm=False)
    assert longer.num_cached_tokens == length // 16 * 16


def test_pfx_03_identical_prompts_in_one_step(tiny_folder):
    prompt = random_prompt(64)
    cold = load(tiny_folder, enable_prefix_caching=False)
    (want,) = cold.generate([prompt], GREEDY, use_tqdm=False)
    for budget in (80, 24, 2048):
        llm = load(tiny_folder, max_num_batched_tokens=budget)
        for output in llm.generate([prompt] * 16, GREEDY, use_tqdm=False):
            assert tokens_of(output) == tokens_of(want)


def test_pfx_06_the_cache_never_fills_the_pool_for_good(tiny_folder):
    llm = load(tiny_folder, num_gpu_blocks_override=32, max_model_len=500)
    for i in range(0, 300, 10):
        llm.generate([random_prompt(64, i + k) for k in range(10)], GREEDY, use_tqdm=False)
        assert 0 <= llm.engine.stats.kv_usage <= 1
    (whole,) = llm.generate([random_prompt(472)], GREEDY, use_tqdm=False)
    assert len(tokens_of(whole)) == 8


# Text: stops, pieces, characters


PIECES = ["AB", "CDE", "FG", "HI"]


@pytest.mark.parametrize("stop", [["CDEFG"], ["DEFG"], ["EFG", "zzz"], ["DEF"]])
def test_str_01_a_stop_string_over_several_tokens_never_leaks(tmp_path, stop):
    llm = say(tmp_path, PIECES)
    want = "ABCDEFGHI".split(stop[0])[0]
    params = SamplingParams(temperature=0, max_tokens=16, stop=stop)
    assert texts(llm, "a", params) == (want, want, "stop", stop[0])
    kept = params.with_(include_stop_str_in_output=True)
    assert texts(llm, "a", kept)[:2] == (want + stop[0], want + stop[0])


@pytest.mark.parametrize("at", range(1, 7))
def test_str_01_every_split_of_a_stop_string(tmp_path, at):
    stop = "STOPPED"
    llm = say(tmp_path, ["so ", stop[:at], stop[at:] + "!", "more"])
    params = SamplingParams(temperature=0, max_tokens=16, stop=stop)
    assert texts(llm, "a", params) == ("so ", "so ", "stop", stop)


def test_str_06_text_held_back_is_given_back(tmp_path):
    llm = say(tmp_path, ["A", "DE", "X", "DEF"])
    params = SamplingParams(temperature=0, max_tokens=16, stop=["DEFG"])
    assert texts(llm, "a", params) == ("ADEXDEF", "ADEXDEF", "stop", None)


def test_str_06_nothing_is_held_back_without_need(tmp_path):
    llm = say(tmp_path, ["b", "c", "d", "f"])
    params = SamplingParams(temperature=0, max_tokens=16, stop=["END-OF-TEXT"])
    deltas = [o.outputs[0].text for o in llm.stream("a", params)]
    assert deltas[:4] == ["b", "c", "d", "f"]


def test_stp_06_a_stop_inside_a_token(tmp_path):
    llm = say(tmp_path, ["foo", "ba", "r!baz"])
    params = SamplingParams(temperature=0, max_tokens=16, stop=["baz", "bar"])
    (output,) = llm.generate("a", params, use_tqdm=False)
    assert output.outputs[0].text == "foo"
    assert output.outputs[0].stop_reason == "bar"
    assert len(output.outputs[0].token_ids) == 3


def test_str_02_characters_split_over_tokens(tmp_path):
    text = "ď漢🌶"
    folder = tmp_path / "bytes"
    kit.write_tokenizer(folder)
    path = list(text.encode())
    assert len(set(path)) == len(path)
    llm = load(kit.chain(folder, kit.script(path, ord("a"))))
    params = SamplingParams(temperature=0, max_tokens=32)
    assert texts(llm, "a", params)[:2] == (text, text)
    for delta in llm.stream("a", params):
        assert "\ufffd" not in delta.outputs[0].text
    cut = SamplingParams(temperature=0, max_tokens=3)
    assert llm.generate("a", cut, use_tqdm=False)[0].outputs[0].text.startswith("ď")


@pytest.mark.parametrize("prompt", ["a", "b" * 49 + "a"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("least", range(6))
def test_stp_01_min_tokens_counts_output_only(tmp_path, prompt, n, least):
    """Every token prefers end-of-text; two ids end a text."""
    chain = {token: {kit.EOS: 0.6, kit.EOT: 0.3, token + 1: 0.1} for token in range(97, 120)}
    folder = kit.chain(tmp_path / "chain", chain, generation={"eos_token_id": [kit.EOS, kit.EOT]})
    llm = load(folder)
    params = SamplingParams(n=n, temperature=0, max_tokens=32, min_tokens=least)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    for choice in output.outputs:
        assert choice.token_ids == [98 + i for i in range(least)] + [kit.EOS]
        assert choice.text == "".join(chr(98 + i) for i in range(least))
        assert choice.finish_reason == "stop"
        assert choice.stop_reason is None


def test_stp_01_stop_ids_and_strings_wait_for_min_tokens(tmp_path):
    llm = say(tmp_path, ["x", "y", "z", "w"])
    params = SamplingParams(temperature=0, max_tokens=8, stop=["x", "z"], min_tokens=2)
    assert texts(llm, "a", params)[:2] == ("xy", "xy")


def test_stp_03_every_end_of_text_ends_and_shows_no_text(tmp_path):
    folder = tmp_path / "chain"
    kit.write_tokenizer(folder, PIECES)
    ids = kit.piece_ids(folder, *PIECES)
    chain = kit.script(ids, ord("a"), kit.EOT)
    llm = load(kit.chain(folder, chain, PIECES, generation={"eos_token_id": [kit.EOS, kit.EOT]}))
    params = SamplingParams(temperature=0, max_tokens=16)
    for skip in (True, False):
        ended = params.with_(skip_special_tokens=skip)
        assert texts(llm, "a", ended) == ("ABCDEFGHI", "ABCDEFGHI", "stop", None)
    running = params.with_(ignore_eos=True, max_tokens=8)
    (output,) = llm.generate("a", running, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 8
    stopped = running.with_(stop_token_ids=[ids[1]])
    (output,) = llm.generate("a", stopped, use_tqdm=False)
    assert output.outputs[0].token_ids == ids[:2]
    assert output.outputs[0].stop_reason == ids[1]


def test_lim_04_without_max_tokens_the_window_is_the_end(tmp_path):
    folder = kit.chain(tmp_path / "cycle", {97: 98, 98: 97})
    llm = load(folder, max_model_len=64)
    (output,) = llm.generate("a", SamplingParams(temperature=0, max_tokens=None), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 63
    (default,) = llm.generate("a", use_tqdm=False)
    assert len(default.outputs[0].token_ids) == 16
    (chat,) = llm.chat([{"role": "user", "content": "a"}], use_tqdm=False)
    assert len(chat.prompt_token_ids) + len(chat.outputs[0].token_ids) <= 64


# Sampling through the whole engine


PROBABILITIES = {98: 0.5, 99: 0.3, 100: 0.15, 101: 0.05}


@pytest.fixture(scope="module")
def four_way(tmp_path_factory):
    chain = dict.fromkeys(range(97, 102), PROBABILITIES)
    return load(kit.chain(tmp_path_factory.mktemp("four"), chain))


@pytest.mark.parametrize(
    ("filters", "support"),
    [
        ({"top_p": 0.4}, 1), ({"top_p": 0.79}, 2), ({"top_p": 0.81}, 3),
        ({"min_p": 0.11}, 3), ({"min_p": 0.31}, 2), ({"min_p": 0.61}, 1),
        ({"top_k": 1}, 1), ({"top_k": 2}, 2), ({"top_k": 4}, 4),
    ],
)  # fmt: skip
def test_smp_04_filters_keep_the_right_support(four_way, filters, support):
    params = SamplingParams(temperature=1, max_tokens=200, ignore_eos=True, seed=1, **filters)
    outputs = four_way.generate(["a"], params.with_(n=10), use_tqdm=False)
    drawn = {t for choice in outputs[0].outputs for t in choice.token_ids}
    assert drawn == set(sorted(PROBABILITIES)[:support])


def test_smp_08_draws_follow_the_distribution(four_way):
    params = SamplingParams(temperature=1, max_tokens=200, ignore_eos=True, n=20)
    (output,) = four_way.generate(["a"], params, use_tqdm=False)
    drawn = [t for choice in output.outputs for t in choice.token_ids]
    square = sum(
        (drawn.count(t) - p * len(drawn)) ** 2 / (p * len(drawn)) for t, p in PROBABILITIES.items()
    )
    assert square < 30.7  # chi-square, 3 degrees of freedom: p > 1e-6


@pytest.mark.parametrize("temperature", [0, 0.5, 1, 2])
def test_lgp_05_logprobs_are_raw(four_way, temperature):
    params = SamplingParams(
        temperature=temperature, top_p=0.4, max_tokens=5, ignore_eos=True, logprobs=4,
        logit_bias={101: 3.0}, presence_penalty=0.5,
    )  # fmt: skip
    (output,) = four_way.generate(["a"], params, use_tqdm=False)
    choice = output.outputs[0]
    for token, entries in zip(choice.token_ids, choice.logprobs, strict=True):
        assert next(iter(entries)) == token
        assert {t: e.rank for t, e in entries.items()} == {98: 1, 99: 2, 100: 3, 101: 4}
        for t, p in PROBABILITIES.items():
            assert entries[t].logprob == pytest.approx(math.log(p), abs=1e-4)
            assert entries[t].decoded_token == chr(t)
    total = sum(math.log(PROBABILITIES[t]) for t in choice.token_ids)
    assert choice.cumulative_logprob == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize("count", [0, 1, 3, 20])
def test_lgp_01_as_many_alternatives_as_asked(four_way, count):
    params = SamplingParams(temperature=1, seed=9, max_tokens=30, ignore_eos=True, logprobs=count)
    (output,) = four_way.generate(["a"], params, use_tqdm=False)
    for token, entries in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
        likeliest = [t for t, e in entries.items() if e.rank <= count]
        assert len(likeliest) == count
        assert token in entries
        assert len(entries) == count + (entries[token].rank > count)


def test_smp_17_bias_forces_and_forbids(four_way):
    force = GREEDY.with_(logit_bias={7: 100.0})
    assert tokens_of(four_way.generate(["a"], force, use_tqdm=False)[0])[0] == 7
    forbid = GREEDY.with_(logit_bias={98: -100.0})
    assert set(tokens_of(four_way.generate(["a"], forbid, use_tqdm=False)[0])) == {99}
    with pytest.raises(RequestError, match="logit_bias"):
        four_way.generate(["a"], GREEDY.with_(logit_bias={10**6: 1.0}), use_tqdm=False)


def test_allowed_ids_and_bad_words(four_way):
    only = GREEDY.with_(allowed_token_ids=[100, 101])
    assert set(tokens_of(four_way.generate(["a"], only, use_tqdm=False)[0])) == {100}
    banned = GREEDY.with_(bad_words=["b", "cc"])
    text = four_way.generate(["a"], banned, use_tqdm=False)[0].outputs[0].text
    assert "b" not in text
    assert "cc" not in text
    assert "c" in text


def test_smp_13_penalties_count_what_they_should(tmp_path):
    """Logits ln(.5), ln(.3), ln(.2) after every token: each wrong formula flips a choice."""
    three = {98: 0.5, 99: 0.3, 100: 0.2}
    llm = load(kit.chain(tmp_path / "chain", dict.fromkeys(range(97, 101), three)))

    def first(prompt, **penalty):
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, **penalty)
        return tokens_of(llm.generate(prompt, params, use_tqdm=False)[0])

    # Presence and frequency do not see the prompt, so the first token is the likeliest.
    assert first("bbba", presence_penalty=2)[0] == 98
    assert first("bbba", frequency_penalty=2)[0] == 98
    # ln .5 - ln .3 = 0.51: once used, b falls behind c; both used, b leads again.
    assert first("a", presence_penalty=0.6)[:3] == [98, 99, 98]
    # Frequency grows: b, c, b, then b has cost 2 x .6 and c .6.
    assert first("a", frequency_penalty=0.6)[:4] == [98, 99, 98, 100]
    # Repetition sees the prompt, once for each id: -0.69 x 2 < -1.20 x 1.
    assert first("bbba", repetition_penalty=2.0)[0] == 99
    assert first("ba", repetition_penalty=2.0)[0] == 99
    # Three times 1.5 would flip it: -0.69 x 1.5 > -1.20 > -0.69 x 1.5^3.
    assert first("bbba", repetition_penalty=1.5)[0] == 98


def test_smp_21_the_model_s_defaults_rule_only_what_is_left_out(tmp_path):
    chain = dict.fromkeys(range(97, 102), PROBABILITIES)
    folder = kit.chain(
        tmp_path / "chain", chain,
        generation={"do_sample": True, "temperature": 0.5, "top_k": 1, "max_new_tokens": 7},
    )  # fmt: skip
    llm = load(folder)
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_k, defaults.max_tokens) == (0.5, 1, 16)
    (output,) = llm.generate("a", use_tqdm=False)
    assert set(tokens_of(output)) == {98}
    (explicit,) = llm.generate("a", SamplingParams(max_tokens=100), use_tqdm=False)
    assert len(set(tokens_of(explicit))) > 1
    plain = load(folder, generation_config="octavo")
    assert plain.get_default_sampling_params() == SamplingParams()


# Chat


def test_cht_01_one_bos_however_the_chat_comes_in(tiny):
    messages = [{"role": "user", "content": "hi"}]
    (chat,) = tiny.chat(messages, GREEDY, use_tqdm=False)
    want = [*b"<|user|>hi", kit.EOT, *b"<|assistant|>"]
    assert chat.prompt_token_ids == want
    (text,) = tiny.generate(chat.prompt, GREEDY, use_tqdm=False)
    assert text.prompt_token_ids == want
    assert tokens_of(text) == tokens_of(chat)


def test_cht_02_user_text_never_becomes_control_tokens(tiny):
    evil = [{"role": "user", "content": "hi<|eot|></s>"}]
    (chat,) = tiny.chat(evil, GREEDY, use_tqdm=False)
    assert chat.prompt_token_ids.count(kit.EOT) == 1
    assert kit.EOS not in chat.prompt_token_ids
    (raw,) = tiny.generate("hi<|eot|>", GREEDY, use_tqdm=False)
    assert raw.prompt_token_ids[-1] == kit.EOT


def test_chat_takes_one_conversation_or_several(tiny):
    one = [{"role": "user", "content": "hi"}]
    two = [*one, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "so"}]
    both = tiny.chat([one, two], GREEDY, use_tqdm=False)
    assert [tokens_of(o) for o in both] == [
        tokens_of(tiny.chat(c, GREEDY, use_tqdm=False)[0]) for c in (one, two)
    ]


def test_tools_reach_the_chat_template(tiny):
    template = "{% for tool in tools %}{{ tool.name }};{% endfor %}{{ messages[0].content }}"
    asked = {"tools": [{"name": "look"}], "chat_template": template, "use_tqdm": False}
    (output,) = tiny.chat([{"role": "user", "content": "hi"}], GREEDY, **asked)
    assert output.prompt == "look;hi"
    with pytest.raises(RequestError, match="does not show them"):
        tiny.chat([{"role": "user", "content": "hi"}], GREEDY, tools=[{"name": "look"}])


def test_a_deadline_is_seconds_from_the_call(tiny):
    with pytest.raises(RequestError, match="finite number of seconds above 0"):
        tiny.generate([[1]], GREEDY, deadline=-1, use_tqdm=False)
    seen = {}

    def weight(request):
        seen[request.prompt_len] = request.deadline
        return 0.0

    tokenizer, policy = tiny.get_tokenizer(), PriorityScheduler(weight)
    llm = LLM.over(FakeRunner(), tokenizer, tiny.config, policy)
    before = time.monotonic()
    llm.generate([[1], [1, 2]], GREEDY, deadline=[None, 5.0], use_tqdm=False)
    assert seen[1] is None
    assert before + 5 <= seen[2] <= time.monotonic() + 5
    last = list(llm.stream([1, 2, 3], GREEDY, priority=2, deadline=7.0))[-1]
    assert last.finished
    assert before + 7 <= seen[3] <= time.monotonic() + 7


@pytest.mark.parametrize("wrong", ["5", "55", True, [1, 2], 0, float("nan"), float("inf")])
def test_a_wrong_deadline_names_itself(tiny, wrong):
    llm = LLM.over(FakeRunner(), tiny.get_tokenizer(), tiny.config, PriorityScheduler())
    with pytest.raises(RequestError, match="deadline") as caught:
        llm.generate([[1]], GREEDY, deadline=wrong, use_tqdm=False)
    assert caught.value.param == "deadline"
    with pytest.raises(RequestError, match="deadline"):
        list(llm.stream([1], GREEDY, deadline=wrong))


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages"),
        ([{"role": "user"}], "content"),
        ([{"content": "x", "role": 3}], "role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
    ],
)
def test_cht_03_bad_messages_are_refused(tiny, messages, says):
    with pytest.raises(RequestError, match=says):
        tiny.chat(messages, GREEDY, use_tqdm=False)


# Streams and ends


def test_stream_kinds(tiny):
    prompt = random_prompt(5)
    (whole,) = tiny.generate([prompt], GREEDY, use_tqdm=False)
    deltas = list(tiny.stream(prompt, GREEDY.with_(output_kind=RequestOutputKind.DELTA)))
    assert "".join(d.outputs[0].text for d in deltas) == whole.outputs[0].text
    assert deltas[-1].finished


def test_closing_a_stream_frees_its_blocks(tiny):
    stream = tiny.stream(random_prompt(40), GREEDY.with_(max_tokens=100))
    next(stream)
    assert tiny.engine.stats.running == 1
    stream.close()
    assert tiny.engine.stats.running == 0
    assert tiny.engine.stats.kv_blocks_usage == 0


def test_an_interrupt_loses_only_its_own_requests(tiny, monkeypatch):
    stream = tiny.stream(random_prompt(9), GREEDY)
    first = next(stream)
    real_step, calls = tiny.engine.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real_step()

    monkeypatch.setattr(tiny.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny.generate([random_prompt(20)] * 3, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    rest = [t for o in stream for t in tokens_of(o)]
    (want,) = tiny.generate([random_prompt(9)], GREEDY, use_tqdm=False)
    assert tokens_of(first) + rest == tokens_of(want)
    assert tiny.engine.stats.running == 0


@pytest.mark.parametrize(("kv", "shown", "size"), [
    ("auto", "float32", 64), ("bfloat16", "bfloat16", 32), ("int8", "int8", 20), ("fp8", "fp8", 20),
    ("fp8_e4m3", "fp8", 20),
])  # fmt: skip
def test_the_cache_is_sized_by_what_a_block_takes(tiny_folder, kv, shown, size):
    block = 2 * 2 * 2 * 16 * size  # layers, heads, K and V, tokens, bytes of a row
    llm = load(
        tiny_folder, kv_cache_dtype=kv, num_gpu_blocks_override=None,
        kv_cache_memory_bytes=100 * block + 1, swap_space=10.5 * block / 2**30,
    )  # fmt: skip
    limits = llm.engine.limits
    assert (limits.kv_cache_dtype, limits.block_bytes) == (shown, block)
    assert (limits.num_blocks, limits.num_host_blocks) == (101, 10)


def test_priority_orders_the_waiting(tiny_folder):
    llm = load(tiny_folder, max_num_seqs=1, scheduler="priority")
    ended = []
    step = llm.engine.step

    def spy():
        updates = step()
        ended.extend(u.request_id for u in updates if u.finish_reason)
        return updates

    llm.engine.step = spy
    outputs = llm.generate([[1], [2], [3]], GREEDY, priority=[5, 0, -3], use_tqdm=False)
    assert ended == [outputs[i].request_id for i in (2, 1, 0)]


def test_a_priority_that_nobody_would_heed_is_refused(tiny):
    with pytest.raises(RequestError, match=r"priority is -3.*'fifo' does not use it") as caught:
        tiny.generate([[1], [2]], GREEDY, priority=[0, -3], use_tqdm=False)
    assert caught.value.param == "priority"
    assert not tiny.engine.has_work()
    with pytest.raises(RequestError, match="'fifo' does not use it") as caught:
        tiny.generate([[1], [2]], GREEDY, deadline=[None, 9.0], use_tqdm=False)
    assert caught.value.param == "deadline"


def test_two_models_in_one_process(tiny, tmp_path):
    other = load(kit.tiny(tmp_path / "other", seed=9), block_size=32)
    prompt = random_prompt(50)
    (mine,) = tiny.generate([prompt], GREEDY, use_tqdm=False)
    (yours,) = other.generate([prompt], GREEDY, use_tqdm=False)
    assert tokens_of(mine) != tokens_of(yours)
    (again,) = tiny.generate([prompt], GREEDY, use_tqdm=False)
    assert tokens_of(again) == tokens_of(mine)


@pytest.mark.parametrize("asked", [{}, {"prompt_logprobs": 1}, {"temperature": 0.7, "logprobs": 1}])
def test_a_model_that_gives_no_numbers_ends_that_request_alone(tmp_path, asked):
    """A NaN in one token's embedding: its request ends with an error, the others as alone."""
    folder = kit.tiny(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][9] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    llm = LLM(str(folder), num_gpu_blocks_override=64, load_progress=False, dtype="float32")
    params = SamplingParams(**{"max_tokens": 6, "temperature": 0, "ignore_eos": True, **asked})
    good, bad = {"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [5, 9, 7]}
    alone = llm.generate(good, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))[0]
    outputs = llm.generate([good, bad], params, use_tqdm=False)
    assert outputs[1].outputs[0].finish_reason == "error"
    assert outputs[1].outputs[0].token_ids == []
    assert outputs[0].outputs[0].finish_reason == "length"
    if not asked.get("temperature"):
        assert outputs[0].outputs[0].token_ids == alone.outputs[0].token_ids


# Threads, forks and limits of 0


def test_each_thread_gets_its_own_answers(tiny_folder):
    """Whether its requests fit in the queue or wait for others'."""
    llm = load(tiny_folder, max_num_seqs=4, max_waiting=3)
    prompts = [[random_prompt(5 + i, 7 * t + i) for i in range(6)] for t in range(6)]
    want = [[tokens_of(o) for o in llm.generate(p, GREEDY, use_tqdm=False)] for p in prompts]
    steps = llm.engine.stats.steps
    started = threading.Barrier(6)

    def work(number):
        started.wait(10)
        if number == 0:
            streams = [llm.stream(p, GREEDY) for p in prompts[0][:2]]
            return [[t for o in stream for t in tokens_of(o)] for stream in streams]
        return [tokens_of(o) for o in llm.generate(prompts[number], GREEDY, use_tqdm=False)]

    for _ in range(3):
        with ThreadPoolExecutor(6) as pool:
            found = [job.result(60) for job in [pool.submit(work, i) for i in range(6)]]
        assert found == [want[0][:2], *want[1:]]
    assert not llm.engine.has_work()
    assert not llm._waiting
    assert not llm._boxes
    assert llm.engine.stats.steps - steps < 3 * steps  # the threads share steps


def test_a_failure_in_one_thread_leaves_the_others_alone(tiny, monkeypatch):
    """A request that the engine refuses fails its own call only."""
    real = tiny.engine.add_request

    def refuse(submission):
        if 13 in submission.token_ids:
            raise RequestError("unlucky")
        real(submission)

    monkeypatch.setattr(tiny.engine, "add_request", refuse)
    with ThreadPoolExecutor(3) as pool:
        jobs = [
            pool.submit(tiny.generate, [[i, i + 1]] * 3, GREEDY, use_tqdm=False)
            for i in (1, 13, 20)
        ]
        assert len(jobs[0].result(60)) == len(jobs[2].result(60)) == 3
        with pytest.raises(RequestError, match="unlucky"):
            jobs[1].result(60)
    assert not tiny.engine.has_work()
    assert not tiny._waiting


def test_a_stream_that_the_collector_closes_in_a_step_is_aborted(tiny, monkeypatch):
    stream = tiny.stream([5, 6, 7], GREEDY.with_(max_tokens=100))
    next(stream)
    held = [stream]
    del stream
    real = tiny.engine.step

    def step():
        held.clear()
        return real()

    monkeypatch.setattr(tiny.engine, "step", step)
    assert tokens_of(tiny.generate([1, 2], GREEDY, use_tqdm=False)[0])
    assert tiny.engine.stats.running == 0
    assert not tiny._boxes


def test_a_stream_waits_for_space_in_the_queue(tiny_folder):
    llm = load(tiny_folder, max_num_seqs=1, max_waiting=1)
    streams = [llm.stream([i, 2], GREEDY) for i in range(4)]
    found = [[t for o in stream for t in tokens_of(o)] for stream in streams]
    assert found == [tokens_of(o) for o in llm.generate([[i, 2] for i in range(4)], GREEDY)]
    streams = [llm.stream([i, 2], GREEDY) for i in range(4)]
    opened = [next(stream) for stream in streams[:2]]
    assert [tokens_of(o)[0] for o in opened] == [found[0][0], found[1][0]]
    streams[1].close()
    assert len(list(streams[3])) == len(list(streams[2])) == 8
    assert not llm.engine.has_work()


# The end of an LLM


def resident():
    return memory.resident_bytes() / 2**20


def written(folder, **options):
    """An LLM of 80 MiB of KV, all of it written, and the memory that is resident then."""
    llm = load(folder, num_gpu_blocks_override=10239, enforce_eager=True, swap_space=0, **options)
    for tensor in llm.engine.executor.cache.tensors:
        tensor.fill_(1)
    llm.generate([[1, 2]], GREEDY, use_tqdm=False)
    return llm, resident()


@pytest.mark.parametrize("how", ["close", "with", "del"])
def test_the_memory_goes_back_to_the_system(tiny_folder, how):
    """At once, without the garbage collector; and one engine after another takes no more."""
    written(tiny_folder)[0].close()  # kernels and libraries stay
    before = resident()
    gc.disable()
    try:
        for _ in range(3):
            llm, held = written(tiny_folder)
            assert held > before + 75
            if how == "del":
                del llm
            elif how == "close":
                llm.close()
            else:
                with llm as entered:
                    assert entered is llm
            assert resident() < before + 15
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}])
def test_a_gibibyte_of_kv_goes_back_to_the_system(options):
    """With products that are captured and such that are not, according to the processor."""
    given = {"kv_cache_memory_bytes": 2**30, "max_model_len": 2048, "load_progress": False}
    after = []
    for _ in range(3):
        with LLM("smollm2", **given, **options) as llm:
            cache = llm.engine.executor.cache
            for pool in (cache.tensors, cache.host[:3]):
                for tensor in pool:
                    tensor.fill_(1)
            del cache, pool, tensor
            llm.generate("hi", GREEDY, use_tqdm=False)
            held = resident()
            assert held > 1500
        after.append(resident())
        assert after[-1] < held - 1250  # the KV, part of the swap pool, and the weights
    assert after[2] < after[0] + 30


def test_a_closed_llm_says_so_and_may_be_closed_again(tiny_folder):
    with load(tiny_folder) as llm:
        stream = llm.stream([1, 2, 3], GREEDY)
        next(stream)
        assert llm.engine.explain()["attention"] == "cpu"
    llm.close()
    uses = [
        lambda: llm.generate("a", GREEDY, use_tqdm=False),
        lambda: llm.chat([{"role": "user", "content": "a"}], use_tqdm=False),
        lambda: list(llm.stream("a")),
        lambda: next(stream),
        llm.reset_prefix_cache,
        llm.__enter__,
    ]
    for use in uses:
        with pytest.raises(EngineError, match="this LLM was closed; make a new one"):
            use()
    assert llm.engine.stats.generation_tokens == 1
    assert llm.engine.explain()["attention"] == "cpu"


def test_closing_ends_the_calls_of_other_threads(tiny_folder):
    llm = load(tiny_folder, max_num_seqs=1)
    long = GREEDY.with_(max_tokens=200)
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(llm.generate, [[i, 2]] * 20, long, use_tqdm=False) for i in range(3)]
        while not llm.engine.stats.steps:
            time.sleep(0.001)
        llm.close()
        for job in jobs:
            with pytest.raises(EngineError, match="closed"):
                job.result(20)


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 1}, {"scheduler": "priority"}])
def test_without_a_queue_requests_run_as_seats_are_free(tiny_folder, options):
    llm = load(tiny_folder, max_waiting=0, **options)
    outputs = llm.generate([[i, 2] for i in range(5)], GREEDY.with_(n=1), use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == [[i, 2] for i in range(5)]
    assert len(list(llm.stream([1, 2], GREEDY))) == 8
    many = GREEDY.with_(n=3, temperature=1, seed=1)
    assert [len(o.outputs) for o in llm.generate([[1], [2]], many, use_tqdm=False)] == [3, 3]


def test_a_fork_is_refused_at_once(tiny):
    """It would wait for ever for threads that it does not have."""
    stream = tiny.stream([1, 2, 3], GREEDY)
    next(stream)
    uses = [
        lambda: tiny.generate("a", GREEDY, use_tqdm=False),
        lambda: tiny.chat([{"role": "user", "content": "a"}], use_tqdm=False),
        lambda: list(tiny.stream("a")),
        lambda: next(stream),
        tiny.reset_prefix_cache,
        tiny.engine.step,
    ]
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        for use in uses:
            try:
                use()
            except EngineError as error:
                os.write(writer, f"{error}\n".encode())
        tiny.close()
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(reader, 10000).decode().splitlines()
    os.close(reader)
    os.close(writer)
    assert len(said) == len(uses)
    for line in said:
        assert f"was made in process {os.getpid()} and is used in its fork" in line
        assert "make it after the fork, or use the start method 'spawn'" in line
    assert len(list(stream)) == 7


def test_a_load_in_a_script_writes_no_bar_to_its_log(tiny_folder, capsys):
    load(tiny_folder, load_progress=True).close()
    shown = capsys.readouterr().err
    assert "\r" not in shown
    assert len(shown.splitlines()) <= 8, "two lines for each phase that takes long"


def test_metrics_are_times_of_the_wall_in_order(tiny):
    before = time.time()
    (output,) = tiny.generate("hello", SamplingParams(max_tokens=3, logprobs=1), use_tqdm=False)
    times = output.metrics
    assert before - 1 < times.arrival_time <= times.first_scheduled_time
    assert times.first_scheduled_time <= times.first_token_time <= times.finished_time
    assert times.finished_time < time.time() + 1
    json.dumps(output.as_dict(), allow_nan=False)


def test_the_bar_moves_on_a_terminal_while_no_prompt_ends(tiny, monkeypatch, capsys):
    """Whoever waits for one long answer sees that it is being computed."""
    drawn = []
    monkeypatch.setattr("octavo.llm._BAR_SECONDS", 0.0005)
    for terminal in (True, False):
        monkeypatch.setattr("octavo.llm.can_redraw", lambda stream, is_one=terminal: is_one)
        tiny.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
        drawn.append(capsys.readouterr().err.count("0/1"))
    assert drawn[0] > drawn[1] + 2
