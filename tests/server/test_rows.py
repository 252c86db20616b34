"""The rows of the bug cases over HTTP: which test shows that the fault is not here.

Rows that need a model (drawn tokens, penalties, company, chunks) run here on toy checkpoints
through real engine processes; `both` asserts that streamed and whole answers are equal. ROWS is
the whole list, row -> tests over HTTP, streamed and not; a test below holds it to the files.

Not over HTTP, because nothing of the row crosses HTTP: SCH, PFX, MDL rows (beside these tests,
in tests/core, tests/models, tests/test_same_answer.py).
"""

import collections
import contextlib
import json
import math
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

import kit
from octavo.engine.client import EXECUTOR
from serving import Server, write_model

ROWS = {
    "STR-01": "test_completions test_chat", "STR-02": "test_completions test_chat",
    "STR-05": "test_rows", "STR-06": "test_completions test_chat", "STR-09": "test_chat",
    "STR-12": "test_completions test_chat test_sse",
    "STP-01": "test_rows test_completions", "STP-03": "test_rows test_completions",
    "STP-06": "test_completions",
    "LIM-01": "test_rows test_completions test_chat", "LIM-02": "test_completions",
    "LIM-04": "test_completions test_chat", "LIM-06": "test_rows test_protocol test_middleware",
    "LIM-07": "test_completions test_protocol", "LIM-13": "test_rows",
    "SMP-01": "test_rows test_protocol", "SMP-04": "test_rows test_completions",
    "SMP-08": "test_rows", "SMP-12": "test_rows", "SMP-13": "test_rows",
    "SMP-17": "test_rows test_protocol", "SMP-19": "test_completions", "SMP-21": "test_service",
    "SMP-23": "test_rows",
    "LGP-01": "test_completions test_chat", "LGP-05": "test_rows", "LGP-06": "test_completions",
    "LGP-08": "test_rows", "LGP-09": "test_rows", "LGP-10": "test_completions test_chat",
    "SRV-01": "test_sse test_soak", "SRV-05": "test_sse", "SRV-06": "test_run",
    "SRV-08": "test_run", "SRV-10": "test_run test_listener", "SRV-11": "test_middleware",
    "SRV-12": "test_middleware", "SRV-14": "test_service", "SRV-17": "test_metrics",
    "CHT-01": "test_rows test_chat", "CHT-02": "test_chat", "CHT-03": "test_chat",
    "CHT-06": "test_chat", "CHT-07": "test_chat",
    "SEC-01": "test_chat", "SEC-03": "test_models",
    "SCH-06": "test_completions", "SCH-10": "test_chat", "PFX-09": "test_completions",
    "TOL-01": "test_chat_tools test_responses_calls", "TOL-05": "test_chat_tools",
}  # fmt: skip

PROBABILITIES = {98: 0.5, 99: 0.3, 100: 0.15, 101: 0.05}
FIRST_END = 102  # a second end-of-text id of the chain's generation_config
GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


def test_every_row_has_its_tests():
    for row, files in ROWS.items():
        prefix = row.lower().replace("-", "_")
        for file in files.split():
            text = (Path(__file__).parent / f"{file}.py").read_text()
            names = re.findall(r"def (test_\w+)", text)
            # One name may stand for several rows: test_cht_01_and_02, test_srv_01_and_05.
            kind, number = prefix.split("_")
            assert any(kind in name and number in name for name in names), (row, file)


def real(folder, **engine):
    settings = {
        "dtype": "float32", "num_gpu_blocks_override": 300, "max_model_len": 256,
        "load_progress": False, **engine,
    }  # fmt: skip
    return Server(folder, {}, executor=EXECUTOR, **settings)


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    with real(tiny_folder, max_num_seqs=32) as server:
        yield server


@pytest.fixture(scope="module")
def narrow(tiny_folder):
    """One request at a time, 16 tokens a step, a pool smaller than the model's window."""
    small = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 8}
    with real(tiny_folder, max_model_len=None, **small) as server:
        yield server


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """After a..e and after a chat's last character: PROBABILITIES. p q r END s V-1."""
    after = dict.fromkeys((*range(97, 102), ord(">")), PROBABILITIES)
    said = [ord("p"), ord("q"), ord("r"), FIRST_END, ord("s"), 259]
    folder = kit.chain(
        tmp_path_factory.mktemp("chain") / "chain", {**after, **kit.script(said[1:], said[0])},
        ["zz"], {"eos_token_id": [kit.EOS, FIRST_END]},
    )  # fmt: skip
    small = {"num_gpu_blocks_override": 12, "max_model_len": 160}
    with real(folder, preemption_mode="recompute", **small) as server:
        yield server


def both(server, prompt, **fields):
    """The choices of an answer, by index, asserted to be equal whole and streamed."""
    whole = server.complete(prompt, **fields)["choices"]
    streamed = collections.defaultdict(lambda: {"text": "", "token_ids": [], "logprobs": []})
    for event in server.stream(prompt, **fields):
        for choice in event["choices"]:
            so_far = streamed[choice["index"]]
            so_far["text"] += choice["text"]
            so_far["token_ids"] += choice["token_ids"]
            so_far["logprobs"] += (choice["logprobs"] or {}).get("token_logprobs", [])
            so_far["finish_reason"] = choice["finish_reason"]
    for choice in whole:
        also = streamed[choice["index"]]
        for name in ("text", "token_ids", "finish_reason"):
            assert also[name] == choice[name], name
        if choice["logprobs"]:
            assert also["logprobs"] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
    return whole


def prompts(lengths):
    draw = random.Random(7)
    return [[draw.randrange(256) for _ in range(length)] for length in lengths]


def at_once(server, bodies, path="/v1/completions"):
    with ThreadPoolExecutor(len(bodies)) as pool:
        replies = list(pool.map(lambda body: server.post(path, **body), bodies))
    assert [r.status_code for r in replies] == [200] * len(bodies), replies[0].text
    return [r.json()["choices"][0] for r in replies]


def same(have, want):
    assert have["token_ids"] == want["token_ids"]
    values = [c["logprobs"]["token_logprobs"] for c in (have, want)]
    assert values[0] == pytest.approx(values[1], abs=1e-4)


# --- what a stream says


def write_spm(folder):
    """Llama's pieces: words begin with a mark, bytes stand for what is not in the vocabulary."""
    pieces = ["▁Hello", "▁world", "▁▁▁▁", ".", "\n", "▁", "▁x", "d"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {"<s>": kit.BOS, "</s>": kit.EOS, "<unk>": 258}
    vocab |= {piece: 259 + i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "fake.json").write_text(json.dumps({"vocab_size": len(vocab)}))


@pytest.mark.parametrize("kind", ["spm", "bpe"])
def test_str_05_spaces_are_neither_lost_nor_made(tmp_path, engine_path, kind):
    folder = write_model(tmp_path / kind)
    if kind == "spm":
        write_spm(folder)
        ours = list(range(259, 267))
    else:
        kit.write_tokenizer(folder, (" Hello", " world", "    ", " x"))
        ours = [259, 260, 261, ord("."), ord("\n"), ord(" "), 262, ord("d")]
        (folder / "fake.json").write_text('{"vocab_size": 263}')
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    draw = random.Random(3)
    scripts = [ours, ours[3:] + ours[:3]] + [draw.choices(ours, k=9) for _ in range(20)]
    with Server(folder, {}) as server:
        for said in scripts:
            prompt = f"say [{said}]"
            (choice,) = both(server, prompt, return_token_ids=True)
            asked = server.post("/tokenize", prompt=prompt).json()["tokens"]
            before = reference.decode(asked, skip_special_tokens=True)
            after = reference.decode([*asked, *said], skip_special_tokens=True)
            assert choice["token_ids"] == [*said, kit.EOS]
            assert choice["text"] == after.removeprefix(before)
            assert after.startswith(before)


# --- where an answer stops


def test_stp_03_every_end_of_text_ends_and_ignore_eos_covers_all(chain):
    for skip in (True, False):
        (choice,) = both(chain, "p", return_token_ids=True, skip_special_tokens=skip)
        assert (choice["text"], choice["finish_reason"]) == ("qr", "stop")
        assert choice["token_ids"] == [*b"qr", FIRST_END]
    (choice,) = both(chain, "p", **GREEDY, max_tokens=5)
    assert choice["token_ids"] == [*b"qr", FIRST_END, ord("s"), 259]  # the vocabulary's last id
    assert (choice["text"], choice["finish_reason"]) == ("qrfszz", "length")
    (choice,) = both(chain, "p", **GREEDY, stop_token_ids=[ord("s")])
    assert (choice["token_ids"], choice["finish_reason"]) == ([*b"qrfs"], "stop")
    (choice,) = both(chain, "p", return_token_ids=True, include_stop_str_in_output=True)
    assert choice["text"] == "qrf"


@pytest.mark.parametrize("end", [kit.EOS, FIRST_END])
@pytest.mark.parametrize("least", [0, 1, 4])
def test_stp_01_min_tokens_counts_output_only(chain, end, least):
    for prompt, n in (("a", 1), ("a" * 50, 2)):
        choices = both(
            chain, prompt, min_tokens=least, max_tokens=32, logit_bias={str(end): 100}, n=n,
            temperature=0, return_token_ids=True,
        )  # fmt: skip
        for choice in choices:
            assert len(choice["token_ids"]) == least + 1
            assert choice["token_ids"][-1] == end
            assert {kit.EOS, FIRST_END}.isdisjoint(choice["token_ids"][:-1])
            assert choice["finish_reason"] == "stop"
    reply = chain.post("/v1/completions", prompt="a", min_tokens=5, max_tokens=4)
    assert reply.status_code == 400


# --- limits


def test_lim_01_over_long_prompts_cost_nothing(server):
    message = [{"role": "user", "content": "x" * 1000}]
    for i in range(50):
        for path, fields in (
            ("/v1/completions", {"prompt": "x" * (513 + i)}),
            ("/v1/chat/completions", {"messages": message, "stream": i % 2 == 0}),
        ):
            reply = server.post(path, **fields)
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
    server.assert_idle()
    server.assert_alive()


BAD_VALUES = [
    "null", '"5"', "true", "[]", "{}", "1.5", "0", "-1", "2147483648", "9223372036854775808",
    "-9223372036854775809", "1" + "0" * 400, "NaN", "1e999",
]  # fmt: skip
NUMBERS = [
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs",
    "priority",
]  # fmt: skip


def test_lim_06_and_smp_01_any_value_of_any_number_is_answered_or_refused(server):
    asks = {
        "/v1/completions": '"prompt": "x"',
        "/v1/chat/completions": '"messages": [{"role": "user", "content": "x"}]',
    }
    for path, ask in asks.items():
        chat_only = ["top_logprobs", "max_completion_tokens"] if "chat" in path else []
        for field in NUMBERS + chat_only:
            for i, value in enumerate(BAD_VALUES):
                limit = "" if field.startswith("max_") else ', "max_tokens": 2'
                stream = ', "stream": true' if i % 2 else ""
                raw = "{" + ask + limit + stream + f', "{field}": {value}' + "}"
                headers = {"Content-Type": "application/json"}
                reply = server.http.post(path, content=raw.encode(), headers=headers)
                if reply.status_code != 200:
                    error = json.loads(reply.content, parse_constant=pytest.fail)["error"]
                    assert reply.status_code == 400, (field, value)
                    assert field in error["message"], (field, value)
                    assert len(reply.content) < 16_000
                assert value != "null" or reply.status_code == 200, (path, field)
    server.assert_alive()


def test_lim_13_a_prompt_larger_than_the_pool_is_refused_and_blocks_nobody(narrow):
    assert narrow.http.get("/v1/models").json()["data"][0]["max_model_len"] == 128
    for stream in (False, True):
        reply = narrow.post("/v1/completions", prompt=[5] * 200, stream=stream)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "200" in error["message"]
        assert "128" in error["message"]
    assert narrow.complete([5] * 120, **GREEDY, max_tokens=8)["usage"]["completion_tokens"] == 8
    narrow.assert_idle()


def test_lim_13_a_window_that_the_pool_cannot_hold_ends_the_start(tiny_folder):
    program = "import sys; from octavo.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "serve", str(tiny_folder), "--port", "0"]
    flags = ["--num-gpu-blocks-override", "8", "--max-model-len", "256", "--dtype", "float32"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.search(r"256.*128.*at most 128", done.stderr), done.stderr
    assert "Traceback" not in done.stderr


# --- sampling


def test_smp_04_filters_keep_the_right_support(chain):
    for filters, support in (
        ({"top_p": 0.4}, 1), ({"top_p": 0.79}, 2), ({"top_p": 0.81}, 3), ({"min_p": 0.11}, 3),
        ({"min_p": 0.31}, 2), ({"min_p": 0.61}, 1), ({"top_k": 1}, 1), ({"top_k": -1}, 4),
    ):  # fmt: skip
        fields = {"temperature": 1, "seed": 1, "n": 8, "max_tokens": 60, "ignore_eos": True}
        choices = chain.complete("a", **fields, **filters, return_token_ids=True)["choices"]
        drawn = {token for choice in choices for token in choice["token_ids"]}
        assert drawn == set(sorted(PROBABILITIES)[:support]), filters


def test_smp_08_a_seed_is_its_own_in_any_company(chain):
    seeded = {"prompt": "a", "temperature": 1, "seed": 42, "max_tokens": 60, "ignore_eos": True,
              "return_token_ids": True}  # fmt: skip
    (alone,) = both(chain, **seeded)
    free = {**seeded, "seed": None}
    before = chain.metric("vllm:num_preemptions_total")
    crowd = at_once(chain, [free] * 6 + [seeded, {**seeded, "seed": 7}, {**seeded, "seed": 0}] * 2)
    assert chain.metric("vllm:num_preemptions_total") > before  # the pool holds two of them
    assert crowd[6]["token_ids"] == crowd[9]["token_ids"] == alone["token_ids"]
    for other in (7, 8):
        assert crowd[other]["token_ids"] == crowd[other + 3]["token_ids"] != alone["token_ids"]
    one = chain.complete(**{**free, "prompt": [[97]] * 20})["choices"]
    unseeded = [tuple(c["token_ids"]) for c in [*crowd[:6], *one]]
    assert len(set(unseeded)) == len(unseeded)
    firsts = chain.complete(**{**free, "prompt": ["a"] * 400, "max_tokens": 1})
    counts = collections.Counter(c["token_ids"][0] for c in firsts["choices"])
    square = sum((counts[t] - p * 400) ** 2 / (p * 400) for t, p in PROBABILITIES.items())
    assert square < 30.7  # chi-square, 3 degrees of freedom: p > 1e-6


def test_smp_12_company_changes_nothing(tiny):
    kinds = [
        {"temperature": 0}, {"temperature": 0.9, "seed": 11},
        {"temperature": 1.3, "seed": 12, "top_k": 40, "top_p": 0.9},
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    ]  # fmt: skip
    bodies = [
        {**GREEDY, **kinds[i % 4], "prompt": prompt, "max_tokens": 20, "logprobs": 1}
        for i, prompt in enumerate(prompts([1, 2, 7, 15, 16, 17, 31, 32, 33, 47, 64, 70]))
    ]
    alone = [both(tiny, **body, cache_salt=f"alone {i}")[0] for i, body in enumerate(bodies)]
    for order in (list(range(12)), list(range(11, -1, -1)), [0, 5, 11] * 8):
        crowd = at_once(tiny, [{**bodies[i], "cache_salt": f"{order}"} for i in order])
        for i, choice in zip(order, crowd, strict=True):
            same(choice, alone[i])
    greedy = [i for i in range(12) if i % 4 == 0]
    fields = {k: v for k, v in bodies[0].items() if k != "prompt"}
    as_list = tiny.complete([bodies[i]["prompt"] for i in greedy], **fields)["choices"]
    for i, choice in zip(greedy, as_list, strict=True):
        same(choice, alone[i])


def test_smp_13_penalties_count_what_they_should(chain):
    """Logits ln .5, ln .3, ln .15, ln .05 after every token: each wrong formula flips a choice."""

    def first(prompt, **penalty):
        return both(chain, prompt, **GREEDY, max_tokens=4, **penalty)[0]["token_ids"]

    # Presence and frequency do not see the prompt, so the first token is the likeliest.
    assert first("bbba", presence_penalty=2)[0] == 98
    assert first("bbba", frequency_penalty=2)[0] == 98
    # ln .5 - ln .3 = 0.51: once used, b falls behind c; both used, b leads again.
    assert first("a", presence_penalty=0.6)[:3] == [98, 99, 98]
    # b, c, b, then b has cost 2 x .6 and c .6: -1.89 against -1.80.
    assert first("a", frequency_penalty=0.6) == [98, 99, 98, 99]
    # Repetition sees the prompt, once for each id: -0.69 x 2 < -1.20, but -0.69 x 1.5 > -1.20.
    assert first("bbba", repetition_penalty=2.0)[0] == 99
    assert first("bbba", repetition_penalty=1.5)[0] == 98
    # A positive logit is divided: b is (-0.69 + 2) / 2 = 0.65, c is 0.9.
    bias = {"98": 2.0, "99": 2.104}
    assert first("ba", repetition_penalty=2.0, logit_bias=bias)[0] == 99
    # The bias comes first: the other way round b would be -1.39 + 2 = 0.61, below c's 0.63.
    bias = {"98": 2.0, "99": 1.834}
    assert first("ba", repetition_penalty=2.0, logit_bias=bias)[0] == 98


def test_smp_17_bias_forces_and_forbids(chain):
    forced = both(chain, "a", **GREEDY, max_tokens=4, logit_bias={"7": 100})[0]
    assert forced["token_ids"][0] == 7
    forbidden = both(chain, "a", **GREEDY, max_tokens=8, logit_bias={"98": -100})[0]
    assert set(forbidden["token_ids"]) == {99}


def test_smp_23_nothing_of_a_request_is_left_for_the_next(narrow):
    (prompt,) = prompts([33])
    plain = {**GREEDY, "max_tokens": 8, "logprobs": 2}
    (fresh,) = both(narrow, prompt, **plain)
    loaded = {
        "prompt": prompt, "temperature": 1.5, "seed": 1, "max_tokens": 8, "min_tokens": 8,
        "logit_bias": {"3": 100}, "presence_penalty": 2, "frequency_penalty": 2,
        "repetition_penalty": 2, "bad_words": ["a"],
    }  # fmt: skip
    narrow.complete(**loaded)
    same(narrow.complete(prompt, **plain)["choices"][0], fresh)
    body = {**loaded, "stream": True, "max_tokens": 90, "ignore_eos": True}
    with narrow.http.stream("POST", "/v1/completions", json=body) as reply:
        next(reply.iter_bytes())
    same(narrow.complete(prompt, **plain)["choices"][0], fresh)
    narrow.assert_idle()


def test_smp_23_after_a_request_that_failed_or_was_given_up(make_server):
    server = make_server(max_num_seqs=1)
    for prompt, seconds in (("!fail", 10), ("!slow", 0.1)):
        with contextlib.suppress(httpx.ReadTimeout):
            body = {"prompt": prompt, "max_tokens": 300, "min_tokens": 300, "logprobs": 3}
            server.http.post("/v1/completions", json=body, timeout=seconds)
        server.assert_alive()


# --- log-probabilities


def test_lgp_05_logprobs_are_those_of_the_model(chain):
    raw = {chr(token): math.log(p) for token, p in PROBABILITIES.items()}
    changes = {"top_p": 0.4, "logit_bias": {"101": 3.0}, "presence_penalty": 0.5}
    messages = [{"role": "user", "content": "x"}]
    for temperature in (0, 0.5, 1, 2):
        fields = {**GREEDY, **changes, "temperature": temperature, "max_tokens": 5, "seed": 3}
        (choice,) = both(chain, "a", **fields, logprobs=4)
        for token, value, top in zip(
            choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"],
            choice["logprobs"]["top_logprobs"], strict=True,
        ):  # fmt: skip
            assert value == pytest.approx(raw[token], abs=1e-4)
            assert top == pytest.approx(raw, abs=1e-4)
        reply = chain.post(
            "/v1/chat/completions", messages=messages, **fields, logprobs=True, top_logprobs=4
        ).json()
        for entry in reply["choices"][0]["logprobs"]["content"]:
            assert entry["logprob"] == pytest.approx(raw[entry["token"]], abs=1e-4)
            ranked = {top["token"]: top["logprob"] for top in entry["top_logprobs"]}
            assert list(ranked) == sorted(raw)
            assert ranked == pytest.approx(raw, abs=1e-4)


def scores(server, prompt, **fields):
    """A prompt's own log-probabilities, in both shapes, which must agree."""
    fields = {"echo": True, "logprobs": 2, "max_tokens": 0, **fields}
    arrays = server.complete(prompt, **fields, return_tokens_as_token_ids=True)["choices"][0]
    found = arrays["logprobs"]["token_logprobs"]
    assert found[0] is None
    also = server.complete(prompt, prompt_logprobs=2, max_tokens=1, cache_salt="other")
    also = also["choices"][0]["prompt_logprobs"]
    assert also[0] is None
    assert len(found) == len(also) == len(prompt)
    for token, value, entry in zip(prompt[1:], found[1:], also[1:], strict=True):
        assert entry[str(token)]["logprob"] == pytest.approx(value, abs=1e-4)
    return found[1:]


def test_lgp_08_a_cached_prefix_changes_no_score(tiny):
    (long,) = prompts([49])
    for lengths in ((15, 16, 17, 31, 32, 33, 49), (49, 33, 32, 31, 17, 16, 15)):
        for length in lengths:
            clean = scores(tiny, long[:length], cache_salt=f"clean {lengths[0]} {length}")
            shared = f"shared {lengths[0]}"
            for _ in range(2):
                again = scores(tiny, long[:length], cache_salt=shared)
                assert again == pytest.approx(clean, abs=1e-4)
    tiny.assert_idle()


def test_lgp_08_scores_of_a_prompt_are_those_that_generation_gave(tiny):
    (prompt,) = prompts([20])
    (made,) = both(tiny, prompt, **GREEDY, logprobs=0, max_tokens=30)
    scored = scores(tiny, prompt + made["token_ids"])[-30:]
    assert scored == pytest.approx(made["logprobs"]["token_logprobs"], abs=1e-4)


def test_lgp_09_chunks_change_no_score(tiny, narrow):
    asked = [p for p in prompts([1, 15, 16, 17, 33, 64]) if len(p) > 1]
    noise = {**GREEDY, "prompt": [9] * 20, "max_tokens": 30}
    with ThreadPoolExecutor(2) as pool:  # beside requests that decode
        beside = pool.submit(at_once, narrow, [noise, noise])
        for prompt in asked:
            wanted = scores(tiny, prompt, cache_salt="whole")
            assert scores(narrow, prompt, cache_salt=str(len(prompt))) == pytest.approx(
                wanted, abs=1e-4
            )
        beside.result()
    (one,) = prompts([1])
    reply = narrow.complete(one, echo=True, logprobs=2, max_tokens=0)["choices"][0]
    assert reply["logprobs"]["token_logprobs"] == [None]


# --- chat


def test_cht_01_one_bos_with_a_tokenizer_that_adds_one(tmp_path, engine_path):
    """A template that prints BOS, a tokenizer that adds it: chat and raw text have one each."""
    folder = write_model(tmp_path / "bos")
    path = folder / "tokenizer.json"
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", kit.BOS)]
    )
    tokenizer.save(str(path))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ bos_token }}" + settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    user = [{"role": "user", "content": "hi"}]
    with Server(folder, {}) as server:
        for body in ({"prompt": "hi"}, {"prompt": "<s>hi"}, {"messages": user}):
            found = server.post("/tokenize", **body).json()["tokens"]
            assert found.count(kit.BOS) == 1, body
            assert found[0] == kit.BOS
        assert server.complete("hi", max_tokens=1)["usage"]["prompt_tokens"] == 3
        chat = server.chat("hi", max_tokens=1)["usage"]["prompt_tokens"]
        assert chat == len(server.post("/tokenize", messages=user).json()["tokens"])
