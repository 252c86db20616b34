"""Outputs over a real tokenizer and made-up updates: no engine, no model."""

import codecs
import math

import pytest

import kit
from octavo.core.plan import TokenLogprobs
from octavo.core.scheduler import Update
from octavo.core.submission import Continuation, Submission
from octavo.engine.output import OutputProcessor
from octavo.errors import RequestError
from octavo.outputs import RequestMetrics
from octavo.params import RequestOutputKind, SamplingParams
from octavo.text.tokenizer import load_tokenizer

PIECES = ("ABC", "DE", "FG", "HI", "A", "X", "DEF", "G", "Hello", " world")
KINDS = list(RequestOutputKind)
CUMULATIVE, DELTA, FINAL_ONLY = KINDS
EOS = kit.EOS


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    kit.write_tokenizer(folder, PIECES)
    return load_tokenizer(folder)


@pytest.fixture
def processor(tokenizer):
    return OutputProcessor(tokenizer)


@pytest.fixture(scope="module")
def ids(tokenizer):
    """Text -> id; a single byte is its own id."""
    return {tokenizer.token_text(i): i for i in reversed(range(tokenizer.vocab_size))}


def updates(tokens, request_id="r", index=0, reason=None, stop_reason=None, **more):
    """One update for each token; `reason` comes with the last one."""
    last = len(tokens) - 1
    return [
        Update(
            request_id, index, (token,), finish_reason=reason if i == last else None,
            stop_reason=stop_reason if i == last else None, **more,
        )
        for i, token in enumerate(tokens)
    ]  # fmt: skip


def feed(processor, steps, now=1.0):
    """Each update as a step of its own: (outputs, stops) of all."""
    outputs, stops = [], []
    for update in steps:
        new, ended = processor.process([update], now)
        outputs += new
        stops += ended
    return outputs, stops


def add(processor, request_id, text, prompt, params, now=0.0):
    processor.add(Submission(request_id, tuple(prompt), params), text, now)


def run(processor, tokens, reason="length", stop_reason=None, prompt=(1,), **params):
    """One request to its end: (outputs, stops)."""
    add(processor, "r", "prompt", prompt, SamplingParams(**params))
    found = feed(processor, updates(tokens, reason=reason, stop_reason=stop_reason))
    assert len(processor) == 0
    assert [o.finished for o in found[0]] == [False] * (len(found[0]) - 1) + [True]
    return found


def fold(outputs, kind):
    """The whole choice 0 as a client of each kind puts it together."""
    if kind is not DELTA:
        return outputs[-1].outputs[0]
    whole = outputs[-1].outputs[0]
    whole.text = "".join(o.outputs[0].text for o in outputs)
    whole.token_ids = [t for o in outputs for t in o.outputs[0].token_ids]
    if whole.logprobs is not None:
        whole.logprobs = [p for o in outputs for p in o.outputs[0].logprobs]
    return whole


# --- the three kinds ---------------------------------------------------------------------------


def test_cumulative_outputs_hold_all_so_far(processor, ids):
    tokens = [ids["Hello"], ids[" world"], ids["X"]]
    outputs, stops = run(processor, tokens, output_kind=CUMULATIVE)
    assert [o.outputs[0].text for o in outputs] == ["Hello", "Hello world", "Hello worldX"]
    assert [o.outputs[0].token_ids for o in outputs] == [tokens[:1], tokens[:2], tokens]
    assert [o.outputs[0].finish_reason for o in outputs] == [None, None, "length"]
    assert stops == []


def test_delta_outputs_hold_what_is_new(processor, ids):
    tokens = [ids["Hello"], ids[" world"], ids["X"]]
    outputs, _ = run(processor, tokens, output_kind=DELTA)
    assert [o.outputs[0].text for o in outputs] == ["Hello", " world", "X"]
    assert [o.outputs[0].token_ids for o in outputs] == [[t] for t in tokens]


def test_final_only_gives_one_output(processor, ids):
    tokens = [ids["Hello"], ids[" world"], ids["X"]]
    (output,), _ = run(processor, tokens, output_kind=FINAL_ONLY, prompt=(7, 8))
    assert output.outputs[0].text == "Hello worldX"
    assert output.outputs[0].token_ids == tokens
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "prompt", [7, 8])


def test_outputs_that_were_delivered_do_not_change(processor, ids):
    outputs, _ = run(processor, [ids["A"]] * 5, output_kind=CUMULATIVE)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_without_detokenize(processor, ids, kind):
    outputs, _ = run(processor, [ids["A"]] * 4, output_kind=kind, detokenize=False)
    whole = fold(outputs, kind)
    assert (whole.text, whole.token_ids) == ("", [ids["A"]] * 4)


@pytest.mark.parametrize("kind", KINDS)
def test_several_requests_in_one_step_are_told_apart(processor, kind):
    for name in "ab":
        add(processor, name, name, [1], SamplingParams(output_kind=kind))
    processor.process([Update("a", 0, (65,)), Update("b", 0, (66,))], 1.0)
    outputs, _ = processor.process(
        [Update("b", 0, (67,), finish_reason="length"), Update("a", 0, (68,))], 2.0
    )
    done = [o for o in outputs if o.finished]
    assert [o.request_id for o in done] == ["b"]
    assert done[0].outputs[0].text == ("C" if kind is DELTA else "BC")
    assert len(processor) == 1
    last = processor.abort("a")
    assert last.outputs[0].text == ("" if kind is DELTA else "AD")


# --- choices -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_ends_with_its_last_choice(processor, kind):
    add(processor, "r", None, [1], SamplingParams(n=3, output_kind=kind))
    steps = [
        [Update("r", i, (65 + i,)) for i in range(3)],
        [Update("r", 1, (66,), finish_reason="length"), Update("r", 0, (65,))],
        [Update("r", 2, (67,), finish_reason="length")],
        [Update("r", 0, (65,), finish_reason="length")],
    ]
    outputs = [o for step in steps for o in processor.process(step, 1.0)[0]]
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    if kind is DELTA:
        assert [[c.index for c in o.outputs] for o in outputs] == [[0, 1, 2], [0, 1], [2], [0]]
        texts = [
            "".join(c.text for o in outputs for c in o.outputs if c.index == i) for i in (0, 1, 2)
        ]
    else:
        assert all([c.index for c in o.outputs] == [0, 1, 2] for o in outputs)
        texts = [c.text for c in outputs[-1].outputs]
    assert texts == ["AAA", "BB", "CC"]
    assert len(processor) == 0


# --- ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("end", [EOS, kit.EOT])
def test_stp_03_end_of_text_stays_in_the_ids_only(processor, kind, skip, end):
    """Any id that the engine ended with is hidden, also one that the tokenizer does not name."""
    outputs, stops = run(
        processor, [65, 66, end], "stop", output_kind=kind, skip_special_tokens=skip
    )
    whole = fold(outputs, kind)
    assert (whole.text, whole.token_ids) == ("AB", [65, 66, end])
    assert (whole.finish_reason, whole.stop_reason) == ("stop", None)
    assert stops == []


@pytest.mark.parametrize("kind", KINDS)
def test_stp_03_ignored_ends_are_ordinary_tokens(processor, kind):
    tokens = [65, EOS, 66]
    shown, _ = run(processor, tokens, ignore_eos=True, skip_special_tokens=False, output_kind=kind)
    assert fold(shown, kind).text == "A</s>B"
    hidden, _ = run(processor, tokens, ignore_eos=True, output_kind=kind)
    assert fold(hidden, kind).text == "AB"
    assert fold(hidden, kind).finish_reason == "length"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("include", "text"), [(False, "A"), (True, "AX")])
def test_a_stop_id_is_the_stop_reason(processor, ids, kind, include, text):
    outputs, stops = run(
        processor, [65, ids["X"]], "stop", ids["X"],
        stop_token_ids=[ids["X"]], include_stop_str_in_output=include, output_kind=kind,
    )  # fmt: skip
    whole = fold(outputs, kind)
    assert (whole.text, whole.token_ids) == (text, [65, ids["X"]])
    assert (whole.finish_reason, whole.stop_reason) == ("stop", ids["X"])
    assert stops == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("include", "expected"), [(False, "ABC"), (True, "ABCDEFG")], ids=["cut", "kept"]
)
def test_str_01_a_stop_string_over_tokens_is_never_leaked(processor, ids, kind, include, expected):
    tokens = [ids[piece] for piece in ("ABC", "DE", "FG", "HI")]
    add(
        processor, "r", "p", [1],
        SamplingParams(stop=["DEFG"], include_stop_str_in_output=include, output_kind=kind),
    )  # fmt: skip
    outputs, stops = feed(processor, updates(tokens))
    whole = fold(outputs, kind)
    assert whole.text == expected
    assert whole.token_ids == tokens[:3]  # up to the one that completed it
    assert (whole.finish_reason, whole.stop_reason) == ("stop", "DEFG")
    assert stops == [("r", 0)]  # told once, though a token came after
    assert len(processor) == 0


@pytest.mark.parametrize("cut", range(1, 7))
def test_str_01_every_split_of_a_stop_string(processor, cut):
    stop = "STOPNOW"
    add(processor, "r", "p", [1], SamplingParams(stop=stop, output_kind=DELTA))
    text = b"ab" + stop.encode()
    parts = [text[: 2 + cut], text[2 + cut :]]
    steps = [Update("r", 0, tuple(part)) for part in parts]
    outputs, stops = feed(processor, steps)
    assert [o.outputs[0].text for o in outputs] == ["ab", ""]
    assert fold(outputs, DELTA).token_ids == list(text)
    assert stops == [("r", 0)]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_after_a_stop_string_are_dropped_also_within_a_step(processor, ids, kind):
    """Several tokens of one update, with the engine's own end after the stop string."""
    add(processor, "r", "p", [1], SamplingParams(stop="DE", output_kind=kind, logprobs=0))
    tokens = (ids["A"], ids["DE"], ids["X"], ids["X"])
    entries = tuple(TokenLogprobs((t,), (-1.0,), (1,)) for t in tokens)
    outputs, stops = processor.process([Update("r", 0, tokens, entries, "length")], 1.0)
    whole = outputs[-1].outputs[0]
    assert (whole.text, whole.token_ids, whole.stop_reason) == ("A", list(tokens[:2]), "DE")
    assert (len(whole.logprobs), whole.cumulative_logprob) == (2, -2.0)
    assert stops == []  # the engine has ended it already
    assert len(processor) == 0


def test_one_choice_stops_and_the_others_go_on(processor, ids):
    add(processor, "r", "p", [1], SamplingParams(n=2, stop="DE", output_kind=DELTA))
    _, stops = processor.process([Update("r", 0, (ids["DE"],)), Update("r", 1, (65,))], 1.0)
    assert stops == [("r", 0)]
    outputs, stops = processor.process([Update("r", 0, (66,)), Update("r", 1, (67,))], 1.0)
    assert [[(c.index, c.text) for c in o.outputs] for o in outputs] == [[(1, "C")]]
    assert stops == []
    assert len(processor) == 1
    processor.abort("r")


@pytest.mark.parametrize("kind", KINDS)
def test_stp_01_stop_strings_wait_for_min_tokens(processor, ids, kind):
    add(processor, "r", "p", [1], SamplingParams(stop="DE", min_tokens=2, output_kind=kind))
    outputs, stops = feed(processor, updates([ids["DE"], ids["A"], ids["DE"]]))
    assert fold(outputs, kind).text == "DEA"
    assert stops == [("r", 0)]


@pytest.mark.parametrize("kind", KINDS)
def test_str_06_held_back_text_is_released_at_the_end(processor, ids, kind):
    tokens = [ids["A"], ids["DE"], ids["X"], ids["DE"], EOS]
    outputs, stops = run(processor, tokens, "stop", stop=["DEFG"], output_kind=kind)
    whole = fold(outputs, kind)
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("ADEXDE", "stop", None)
    assert stops == []


def test_str_06_text_that_begins_no_stop_string_is_not_held_back(processor):
    outputs, _ = run(processor, list(b"abcd"), stop=["END-OF-TEXT"], output_kind=DELTA)
    assert [o.outputs[0].text for o in outputs] == ["a", "b", "c", "d"]


@pytest.mark.parametrize("stop", [None, "never"])
@pytest.mark.parametrize("kind", KINDS)
def test_str_02_characters_over_several_tokens(processor, kind, stop):
    """Eight choices at once, each token a single byte."""
    text = "ď漢字🌶👩‍👩‍👧‍👦."
    data = text.encode()
    add(processor, "r", "p", [1], SamplingParams(n=8, output_kind=kind, stop=stop))
    texts = [""] * 8
    for at, byte in enumerate(data):
        reason = "length" if at == len(data) - 1 else None
        step = [Update("r", i, (byte,), finish_reason=reason) for i in range(8)]
        for output in processor.process(step, 1.0)[0]:
            for choice in output.outputs:
                assert "\ufffd" not in choice.text
                previous = texts[choice.index] if kind is DELTA else ""
                texts[choice.index] = previous + choice.text
    assert texts == [text] * 8


@pytest.mark.parametrize("kind", KINDS)
def test_str_02_an_unfinished_character_is_shown_as_such_at_the_end(processor, kind):
    outputs, _ = run(processor, list("aď".encode())[:-1], output_kind=kind)
    assert fold(outputs, kind).text == "a\ufffd"


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_ends_the_choice_and_keeps_its_text(processor, kind):
    add(processor, "r", "p", [1], SamplingParams(output_kind=kind))
    steps = [Update("r", 0, (65,)), Update("r", 0, finish_reason="error", error="NaN logits")]
    outputs, stops = feed(processor, steps)
    assert outputs[-1].error == "NaN logits"
    assert outputs[-1].finished
    assert fold(outputs, kind).text == "A"
    assert fold(outputs, kind).finish_reason == "error"
    assert stops == []
    assert len(processor) == 0


# --- aborts and bookkeeping --------------------------------------------------------------------


@pytest.mark.parametrize("stop", [None, "DEFG"])
@pytest.mark.parametrize("kind", KINDS)
def test_abort_keeps_the_text_so_far(processor, ids, kind, stop):
    params = SamplingParams(n=2, output_kind=kind, stop=stop)
    add(processor, "r", "p", [1], params)
    outputs, _ = processor.process([Update("r", 0, (ids["A"],))], 1.0)
    more, _ = processor.process([Update("r", 0, (ids["DE"],))], 1.0)
    outputs += more
    last = processor.abort("r", now=3.0)
    assert last.finished
    assert [c.finish_reason for c in last.outputs] == ["abort", "abort"]
    assert last.metrics.finished_time == 3.0
    first = fold([*outputs, last], kind)
    assert (first.text, first.token_ids) == ("ADE", [ids["A"], ids["DE"]])
    assert last.outputs[1].text == ""
    assert processor.abort("r") is None


def test_abort_leaves_choices_that_had_ended(processor):
    add(processor, "r", "p", [1], SamplingParams(n=2))
    processor.process([Update("r", 0, (65,), finish_reason="length"), Update("r", 1, (66,))], 1.0)
    last = processor.abort("r")
    assert [c.finish_reason for c in last.outputs] == ["length", "abort"]
    assert [c.text for c in last.outputs] == ["A", "B"]


def test_nothing_is_kept_after_a_thousand_aborts(processor):
    for i in range(1000):
        params = SamplingParams(n=1 + i % 2, output_kind=KINDS[i % 3], stop="x" if i % 2 else None)
        add(processor, str(i), None, [1], params)
        processor.process([Update(str(i), 0, (65,)), Update(str(i - 3), 0, (66,))], 1.0)
        if i >= 5:
            processor.abort(str(i - 5))
    assert len(processor) == 5
    for i in range(995, 1000):
        processor.abort(str(i))
    assert len(processor) == 0
    assert all(not kept for kept in vars(processor).values() if isinstance(kept, dict))


def test_updates_of_unknown_requests_are_ignored(processor):
    assert processor.process([Update("gone", 0, (65,))], 1.0) == ([], [])


def test_an_id_in_flight_is_refused(processor):
    add(processor, "r", None, [1], SamplingParams())
    with pytest.raises(RequestError, match="'r' is in flight"):
        add(processor, "r", None, [1], SamplingParams())


def test_times_and_cached_tokens(processor):
    add(processor, "r", None, [1] * 40, SamplingParams(), 10.0)
    first, _ = processor.process([Update("r", 0, (65,), num_cached_tokens=32)], 11.0)
    last, _ = processor.process([Update("r", 0, (66,), finish_reason="length")], 12.0)
    assert first[0].metrics.finished_time is None
    times = last[0].metrics
    assert (times.arrival_time, times.first_token_time, times.finished_time) == (10.0, 11.0, 12.0)
    assert [first[0].num_cached_tokens, last[0].num_cached_tokens] == [32, 32]


def test_times_are_those_of_the_wall(tokenizer):
    processor = OutputProcessor(tokenizer, epoch=1000.0)
    add(processor, "r", None, [1], SamplingParams(n=2), 10.0)
    processor.process([Update("r", 0, (65,), scheduled_time=10.5, num_preemptions=2)], 11.0)
    ends = [Update("r", i, (66,), finish_reason="length", num_preemptions=i + 2) for i in (0, 1)]
    (last,), _ = processor.process(ends, 12.0)
    assert last.metrics == RequestMetrics(1010.0, 1010.5, 1011.0, 1012.0, preemptions=5)


# --- log-probabilities -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_come_with_their_tokens(processor, ids, kind):
    add(processor, "r", "p", [1], SamplingParams(logprobs=2, output_kind=kind))
    entries = [
        TokenLogprobs((65, 66, 67), (-1.5, -0.5, -1.0), (3, 1, 2)),
        TokenLogprobs((66, 66, 68), (-0.25, -0.25, -2.0), (1, 1, 2)),
    ]
    steps = [
        Update("r", 0, (entry.token_ids[0],), (entry,), "length" if i else None)
        for i, entry in enumerate(entries)
    ]
    outputs, _ = feed(processor, steps)
    whole = fold(outputs, kind)
    assert [list(position) for position in whole.logprobs] == [[65, 66, 67], [66, 68]]
    first = whole.logprobs[0][65]
    assert (first.logprob, first.rank, first.decoded_token) == (-1.5, 3, "A")
    assert math.isclose(outputs[-1].outputs[0].cumulative_logprob, -1.75)


def test_lgp_01_no_logprobs_unless_asked(processor):
    outputs, _ = run(processor, [65, 66])
    assert outputs[-1].outputs[0].logprobs is None
    assert outputs[-1].outputs[0].cumulative_logprob is None
    assert outputs[-1].prompt_logprobs is None


@pytest.mark.parametrize("kind", KINDS)
def test_lgp_08_prompt_logprobs_begin_with_none(processor, kind):
    add(processor, "r", "p", [65, 66, 67], SamplingParams(prompt_logprobs=1, output_kind=kind))
    prompt = (
        TokenLogprobs((66, 70), (-2.0, -0.5), (4, 1)),
        TokenLogprobs((67, 67), (-0.1, -0.1), (1, 1)),
    )
    steps = [
        Update("r", 0, (65,), prompt_logprobs=prompt),
        Update("r", 0, (66,), finish_reason="length"),
    ]
    outputs, _ = feed(processor, steps)
    found = outputs[0].prompt_logprobs
    assert [p and list(p) for p in found] == [None, [66, 70], [67]]
    assert found[1][66].decoded_token == "B"
    if kind is CUMULATIVE:
        assert outputs[1].prompt_logprobs == found
    if kind is DELTA:
        assert outputs[1].prompt_logprobs is None  # delivered before


def test_lgp_10_bytes_of_the_tokens_are_the_bytes_of_the_text(processor, tokenizer):
    data = "🌶 ď".encode()
    add(processor, "r", "p", [1], SamplingParams(logprobs=0))
    steps = [
        Update("r", 0, (b,), (TokenLogprobs((b,), (-1.0,), (1,)),), "length" if last else None)
        for b, last in zip(data, [False] * (len(data) - 1) + [True], strict=True)
    ]
    choice = feed(processor, steps)[0][-1].outputs[0]
    joined = b"".join(tokenizer.token_bytes(next(iter(p))) for p in choice.logprobs)
    assert joined == data
    assert codecs.decode(joined, "utf-8") == choice.text
    pairs = {(p[t].decoded_token, tokenizer.token_bytes(t)) for p in choice.logprobs for t in p}
    assert len(pairs) == len(set(data))


def test_an_interrupted_request_is_as_far_as_its_updates_were_read(processor, ids):
    params = SamplingParams(n=3, stop=["DE"], temperature=1, output_kind=DELTA)
    add(processor, "r", "prompt", [1], params)
    assert processor.interrupted("r") == Continuation()
    a, d, e, x = 97, ids["A"], ids["DE"], ids["X"]
    feed(processor, [Update("r", index, (token,), num_preemptions=2)
                     for index, token in enumerate((a, d, e))])  # fmt: skip
    assert processor.interrupted("r").outputs == ((a,), (d,), None), "a stop string ended one"
    outputs, _ = feed(processor, [Update("r", 0, (x,), finish_reason="length", num_preemptions=1)])
    assert processor.interrupted("r").outputs == (None, (d,), None)
    outputs, _ = feed(processor, [Update("r", 1, (x, a), finish_reason="length")])
    (last,) = [output for output in outputs if output.finished]
    assert last.outputs[0].token_ids == [x, a]
    assert last.metrics.preemptions == 2 + 2 + 2 + 1
