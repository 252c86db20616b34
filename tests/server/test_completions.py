"""`/v1/completions` over HTTP: streamed and whole answers say the same."""

import codecs
import itertools
import json
import threading
import time

import pytest


def joined(events, index=0):
    return "".join(c["text"] for e in events for c in e["choices"] if c["index"] == index)


def ends(events, index=0):
    reasons = [c["finish_reason"] for e in events for c in e["choices"] if c["index"] == index]
    return [r for r in reasons if r is not None]


def chained(lists):
    return list(itertools.chain.from_iterable(lists))


def both(server, prompt, **fields):
    """(text, finish_reason, stop_reason), asserted to be equal whole and streamed."""
    whole = server.complete(prompt, **fields)["choices"][0]
    events = server.stream(prompt, **fields)
    last = events[-1]["choices"][0]
    assert joined(events) == whole["text"]
    assert ends(events) == [whole["finish_reason"]]
    assert last["stop_reason"] == whole["stop_reason"]
    return whole["text"], whole["finish_reason"], whole["stop_reason"]


def test_the_shape_of_an_answer(server):
    reply = server.complete(server.say("ABC", "DE"), model="scripted")
    assert reply["id"].startswith("cmpl-")
    assert reply["object"] == "text_completion"
    assert reply["model"] == "scripted"
    assert reply["choices"] == [
        {"index": 0, "text": "ABCDE", "finish_reason": "stop", "stop_reason": None,
         "logprobs": None}
    ]  # fmt: skip
    prompt_tokens = len(server.say("ABC", "DE"))
    assert reply["usage"] == {
        "prompt_tokens": prompt_tokens, "completion_tokens": 3, "total_tokens": prompt_tokens + 3,
        "prompt_tokens_details": {"cached_tokens": reply["usage"]["prompt_tokens_details"][
            "cached_tokens"]},
    }  # fmt: skip


@pytest.mark.parametrize("split", range(1, 7))
def test_str_01_stop_string_is_never_leaked_in_pieces(server, split):
    word = "STOPNOW"
    prompt = server.say("ABC", word[:split], word[split:], "HI")
    assert both(server, prompt, stop=[word]) == ("ABC", "stop", word)
    pieces = [c["text"] for e in server.stream(prompt, stop=[word]) for c in e["choices"]]
    assert "".join(pieces) == "ABC"


def test_str_01_pieces(server):
    prompt = server.say("ABC", "DE", "FG", "HI")
    assert both(server, prompt, stop=["DEFG"]) == ("ABC", "stop", "DEFG")


@pytest.mark.parametrize("text", ["ď", "漢字", "🌶", "👨‍👩‍👧‍👦"])
def test_str_02_characters_over_several_tokens_stay_whole(server, text):
    prompt = server.say(text)
    assert both(server, prompt)[0] == text
    raw = server.post("/v1/completions", prompt=prompt, stream=True, max_tokens=64).content
    assert b"\xef\xbf\xbd" not in raw
    assert b"\\ud" not in raw


def test_str_06_held_back_text_is_not_lost(server):
    prompt = server.say("A", "DE", "X", "DE")
    assert both(server, prompt, stop=["DEFG"]) == ("ADEXDE", "stop", None)


def test_str_06_nothing_is_held_back_without_need(server):
    events = server.stream("!slow " + server.say("abcd"), stop=["END-OF-TEXT"])
    assert [e["choices"][0]["text"] for e in events] == ["a", "b", "c", "d", ""]


@pytest.mark.parametrize("include", [False, True])
def test_stp_06_stop_inside_a_token(server, include):
    prompt = server.say("foo", "ba", "r!baz")
    options = {"stop": ["zzz", "bar"], "include_stop_str_in_output": include}
    assert both(server, prompt, **options) == ("foobar" if include else "foo", "stop", "bar")
    reply = server.complete(prompt, return_token_ids=True, **options)["choices"][0]
    assert reply["token_ids"] == server.ids("foo", "ba", "r!baz")
    whole = server.say("xxENDyy")
    assert both(server, whole, stop=["END"])[0] == "xx"


def test_stp_01_min_tokens_counts_output(server):
    prompt = server.say()  # end-of-text at once
    for least in range(6):
        reply = server.complete(prompt, min_tokens=least, max_tokens=32, return_token_ids=True)
        choice = reply["choices"][0]
        assert len(choice["token_ids"]) == least + 1
        assert choice["finish_reason"] == "stop"
    refused = server.post("/v1/completions", prompt="x", min_tokens=9, max_tokens=8)
    assert refused.json()["error"]["param"] == "min_tokens"


def test_stp_03_ignore_eos_and_stop_token_ids(server):
    prompt = server.say("ab") + " [[97,257,98,259,99]]"
    reply = server.complete(prompt, max_tokens=4, ignore_eos=True)["choices"][0]
    assert (reply["text"], reply["finish_reason"]) == ("abABC", "length")
    stopped = server.complete(prompt, ignore_eos=True, stop_token_ids=[259])["choices"][0]
    assert (stopped["text"], stopped["finish_reason"], stopped["stop_reason"]) == (
        "ab", "stop", 259,
    )  # fmt: skip
    shown = server.complete(prompt, skip_special_tokens=False)["choices"][0]
    assert (shown["text"], shown["finish_reason"]) == ("a", "stop")


def test_lim_04_completions_stop_after_sixteen_tokens(server):
    reply = server.post("/v1/completions", prompt="x").json()
    assert reply["choices"][0]["text"] == "abcdefghijklmnop"
    assert reply["choices"][0]["finish_reason"] == "length"


def test_n_choices_and_usage(server):
    events = server.stream(server.say("AB"), n=3, stream_options={"include_usage": True})
    for index in range(3):
        assert joined(events, index) == "AB"
        assert ends(events, index) == ["stop"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 9
    assert all(e["usage"] is None for e in events[:-1])
    whole = server.complete(server.say("AB"), n=3)
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 9
    assert whole["usage"]["prompt_tokens"] == len(server.say("AB"))


def test_usage_is_sent_only_if_asked_for(server):
    assert all("usage" not in e for e in server.stream(server.say("AB")))
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.stream("!slow " + server.say("AB"), stream_options=options)
    assert [e["usage"]["completion_tokens"] for e in events] == [1, 2, 3, 3]


def test_cached_tokens_are_reported(server):
    prompt = server.say("AB") + "c" * 64
    server.complete(prompt)
    again = server.complete(prompt)["usage"]
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert 48 <= cached < again["prompt_tokens"]


def test_pfx_09_a_salt_shares_with_itself_only(server):
    prompt = server.say("AB") + "d" * 64

    def cached(**salt):
        usage = server.complete(prompt, **salt)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached(), cached(cache_salt="a"), cached(cache_salt="b")] == [0, 0, 0]
    assert cached() > 0
    assert cached(cache_salt="a") > 0
    for bad in ("", 5, "s" * 2**20):
        refused = server.post("/v1/completions", prompt="x", cache_salt=bad)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")


def test_several_prompts_of_either_kind(server):
    prompts = [server.say("AB"), server.say("DE"), server.ids(server.say("FG"))]
    whole = server.complete(prompts, n=2)
    assert [c["text"] for c in whole["choices"]] == ["AB", "AB", "DE", "DE", "FG", "FG"]
    events = server.stream(prompts, n=2)
    assert [joined(events, i) for i in range(6)] == ["AB", "AB", "DE", "DE", "FG", "FG"]


@pytest.mark.parametrize("bad", ["", [""], [[]], [], ["a", ""], [[1], []]])
def test_lim_07_an_empty_prompt_is_refused_whole(server, bad):
    before = server.metric("octavo:requests_received_total")
    reply = server.post("/v1/completions", prompt=bad)
    assert reply.status_code == 400
    assert "empty" in reply.json()["error"]["message"]
    assert server.metric("octavo:requests_received_total") == before


@pytest.mark.parametrize("length", [512, 1000, 200_000])
@pytest.mark.parametrize("as_ids", [False, True])
def test_lim_01_an_over_long_prompt_names_both_numbers(server, length, as_ids):
    prompt = [97] * length if as_ids else "a" * length
    reply = server.post("/v1/completions", prompt=prompt, stream=True)
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert "512" in error["message"]
    assert any(
        str(n) in error["message"] for n in (length, length // server.service.prompts._longest)
    ), error


@pytest.mark.parametrize("most", [503, 10**6, 2**31 - 1, 2**31])
def test_lim_02_max_tokens_that_cannot_fit(server, most):
    reply = server.post("/v1/completions", prompt="a" * 10, max_tokens=most)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
    assert all(str(n) in error["message"] for n in (10, most, 512, 502))


def test_ids_outside_the_vocabulary(server):
    vocab = server.service.limits.vocab_size
    for fields in (
        {"prompt": [vocab]},
        {"prompt": [-1]},
        {"prompt": "x", "logit_bias": {str(vocab): 1}},
        {"prompt": "x", "allowed_token_ids": [vocab]},
        {"prompt": "x", "stop_token_ids": [vocab]},
        {"prompt": [2**70]},
    ):
        reply = server.post("/v1/completions", **fields)
        assert reply.status_code == 400, fields
        assert reply.json()["error"]["param"] in fields
    server.assert_alive()


@pytest.mark.parametrize("logprobs", [0, 1, 5])
def test_lgp_01_arrays_of_equal_length(server, logprobs):
    prompt = server.say("AB", "DE")
    found = server.complete(prompt, logprobs=logprobs)["choices"][0]["logprobs"]
    assert found["tokens"] == ["A", "B", "DE", "</s>"]
    assert found["text_offset"] == [0, 1, 2, 4]
    assert {len(v) for v in found.values()} == {4}
    assert all(len(top) == max(1, logprobs) for top in found["top_logprobs"])
    streamed = {name: [] for name in found}
    for event in server.stream(prompt, logprobs=logprobs):
        for name in found:
            streamed[name] += event["choices"][0]["logprobs"][name]
    assert streamed == found


def test_lgp_06_echo_with_every_logprobs_and_max_tokens(server):
    prompt = server.say("AB")
    length = len(prompt)
    for as_ids, stream, logprobs, most in itertools.product(
        (False, True), (False, True), (None, 0, 5), (0, 1, 5)
    ):
        given = server.ids(prompt) if as_ids else prompt
        fields = {"echo": True, "logprobs": logprobs, "max_tokens": most}
        if stream:
            events = server.stream(given, **fields)
            text, (reason,) = joined(events), ends(events)
            parts = [c["logprobs"] for e in events for c in e["choices"]]
            arrays = parts[0] and {name: chained(p[name] for p in parts) for name in parts[0]}
        else:
            reply = server.complete(given, **fields)
            choice = reply["choices"][0]
            text, reason, arrays = choice["text"], choice["finish_reason"], choice["logprobs"]
            made = {0: 0, 1: 1, 5: 3}[most]
            assert reply["usage"]["completion_tokens"] == made
        assert text == prompt + {0: "", 1: "A", 5: "AB"}[most]
        assert reason == ("stop" if most == 5 else "length")
        if logprobs is None:
            assert arrays is None
            continue
        assert {len(v) for v in arrays.values()} == {length + {0: 0, 1: 1, 5: 3}[most]}
        assert arrays["token_logprobs"][0] is None
        assert arrays["top_logprobs"][0] is None
        assert None not in arrays["token_logprobs"][1:]
        assert arrays["text_offset"][:length] == list(range(length))


def test_lgp_10_parts_of_characters_have_keys_of_their_own(server):
    found = server.complete(server.say("🌶"), logprobs=1)["choices"][0]["logprobs"]
    assert found["tokens"][:4] == [rf"bytes:\x{byte:02x}" for byte in "🌶".encode()]
    assert found["text_offset"] == [0, 0, 0, 0, 1]


def test_prompt_logprobs_and_token_ids(server):
    prompt = server.say("AB")
    fields = {"prompt_logprobs": 1, "return_token_ids": True}
    whole = server.complete(prompt, **fields)["choices"][0]
    assert whole["prompt_token_ids"] == server.ids(prompt)
    assert whole["token_ids"] == [*b"AB", 257]
    assert len(whole["prompt_logprobs"]) == len(prompt)
    assert whole["prompt_logprobs"][0] is None
    assert whole["prompt_logprobs"][1][str(prompt.encode()[1])]["rank"] == 1
    events = server.stream(prompt, **fields)
    first = events[0]["choices"][0]
    assert first["prompt_logprobs"] == whole["prompt_logprobs"]
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert chained(e["choices"][0]["token_ids"] for e in events) == whole["token_ids"]


def test_tokens_as_token_ids(server):
    fields = {"logprobs": 0, "return_tokens_as_token_ids": True}
    found = server.complete(server.say("AB"), **fields)["choices"][0]["logprobs"]
    assert found["tokens"] == ["token_id:65", "token_id:66", "token_id:257"]


def test_str_12_text_that_looks_like_the_stream_s_own_lines(server):
    text = "a\u2028b\u2029c\u0085d\re\n\nf data: x [DONE] \x00 g"
    prompt = server.say(text)
    raw = server.post("/v1/completions", prompt=prompt, stream=True, max_tokens=64).content
    for mark in ("\u2028", "\u2029", "\u0085"):
        assert mark.encode() not in raw

    def texts(lines):
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert data.pop() == "[DONE]"
        return "".join(json.loads(item)["choices"][0]["text"] for item in data)

    strict = codecs.decode(raw, "utf-8").replace("\r\n", "\n").split("\n")
    assert texts(strict) == text
    assert texts(raw.decode().splitlines()) == text
    assert server.complete(prompt)["choices"][0]["text"] == text
    for piece in ("data: x", "[DONE]"):
        assert both(server, server.say(piece))[0] == piece


def test_smp_04_range_edges_over_http(server):
    vocab = server.service.limits.vocab_size
    good = [{"top_k": k} for k in (-1, 0, 1, vocab - 1, vocab, vocab + 1, 9_999_999)]
    good += [{"top_p": 1e-9}, {"min_p": 1}, {"repetition_penalty": 1e-9}, {"temperature": 2}]
    bad = [{"top_k": -2}, {"top_p": 0}, {"top_p": 1.0001}, {"min_p": -0.1}, {"min_p": 1.1},
           {"repetition_penalty": 0}, {"presence_penalty": 2.01}, {"temperature": 2.01},
           {"temperature": -1}]  # fmt: skip
    for fields in good:
        assert server.post("/v1/completions", prompt="x", **fields).status_code == 200, fields
    for fields in bad:
        reply = server.post("/v1/completions", prompt="x", **fields)
        assert reply.status_code == 400, fields
        assert reply.json()["error"]["param"] == next(iter(fields))


def test_smp_19_bad_words_that_cannot_be_words(server):
    for words in ([""], [" "], "x" * 2, 5, ["a"] * 2000):
        reply = server.post("/v1/completions", prompt="x", bad_words=words)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "bad_words")
    assert server.post("/v1/completions", prompt="x", bad_words=["New York"]).status_code == 200


def test_sch_06_priorities_in_range(server):
    for priority in (2**63, -(2**63) - 1):
        reply = server.post("/v1/completions", prompt="x", priority=priority)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "priority")
    reply = server.post("/v1/completions", prompt="x", priority=-5)
    assert "--scheduler priority" in reply.json()["error"]["message"]
    assert server.post("/v1/completions", prompt="x", priority=0).status_code == 200


def test_sch_06_an_urgent_request_displaces_one_that_can_wait(make_server):
    server = make_server(scheduler="priority", max_num_seqs=1)
    ended = []

    def ask(priority):
        server.complete("!slow", priority=priority, max_tokens=60)
        ended.append(priority)

    threads = [threading.Thread(target=ask, args=(p,)) for p in (5, -5)]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    for thread in threads:
        thread.join()
    assert ended == [-5, 5]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["x"] * 5000}, "n"),
        ({"prompt": ["x"] * 5, "n": 1000}, "n"),
        ({"prompt": "x", "n": 1025}, "n"),
        ({"prompt": "x", "stop": ["s" * 1025]}, "stop"),
        ({"prompt": "x", "stop": ["s"] * 65}, "stop"),
        ({"prompt": "x", "bad_words": ["s" * 10**6]}, "bad_words"),
        ({"prompt": [1] * 10**6}, "prompt"),
    ],
)
def test_lim_06_what_would_take_much_memory_is_refused(server, fields, param):
    reply = server.post("/v1/completions", **fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert len(reply.content) < 1000


def test_one_request_that_fails_fails_alone(server):
    with pytest.MonkeyPatch.context():
        reply = server.post("/v1/completions", prompt="!fail")
    assert reply.status_code == 500
    assert reply.json()["error"]["message"] == "this request was told to fail"
    events = server.stream("!fail")
    assert [e["error"]["type"] for e in events] == ["server_error"]
    mixed = server.post("/v1/completions", prompt=[server.say("AB"), "!fail"])
    assert mixed.status_code == 500
    server.assert_alive()
    server.assert_idle()


def test_what_turns_out_to_be_impossible_is_the_requests_own_fault(server):
    reply = server.post("/v1/completions", prompt="!empty")
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["message"], error["param"]) == ("no token is left to draw", "bad_words")
    assert error["type"] == "invalid_request_error"
    events = server.stream("!empty")
    assert [e["error"]["param"] for e in events] == ["bad_words"]
    server.assert_alive()


def test_a_completion_without_max_tokens_gets_at_most_what_fits(server):
    for left in (1, 4, 15):
        reply = server.post("/v1/completions", prompt=[65] * (512 - left), ignore_eos=True)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == left
    reply = server.post("/v1/completions", prompt=[65] * 480, ignore_eos=True)
    assert reply.json()["usage"]["completion_tokens"] == 16
    for asked, param in ({"max_tokens": 5}, "max_tokens"), ({"min_tokens": 20}, "min_tokens"):
        reply = server.post("/v1/completions", prompt=[65] * 508, **asked)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_neutral_values_are_taken_beside_ids(server):
    reply = server.post("/v1/completions", prompt=[65], add_special_tokens=False, best_of=1)
    assert reply.status_code == 200
    for body in {"continue_final_message": False}, {"chat_template_kwargs": {}}:
        assert server.post("/tokenize", prompt="x", **body).status_code == 200
