"""Bodies: strict JSON, exact names, and errors that name the field."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo import vllm_names
from octavo.errors import RequestError
from octavo.params import RequestOutputKind
from octavo.server import protocol
from octavo.server.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse,
    prompts,
    sampling_params,
)
from octavo.server.responses_protocol import ResponsesBody
from octavo.vllm_names import Kind, Status

HI = [{"role": "user", "content": "hi"}]


def completion(**fields):
    return parse(json.dumps({"prompt": "x", **fields}).encode(), CompletionBody)


def chat(**fields):
    return parse(json.dumps({"messages": HI, **fields}).encode(), ChatBody)


def refused(raw, kind=CompletionBody):
    if not isinstance(raw, bytes):
        raw = json.dumps(raw).encode()
    with pytest.raises(RequestError) as caught:
        sampling_params(parse(raw, kind), {})
    assert len(str(caught.value)) < 1000
    return caught.value


def outcome(fields, kind=CompletionBody):
    """The RequestError of a body; None if it is good. Any other exception is a fault."""
    try:
        sampling_params(parse(json.dumps(fields).encode(), kind), {})
    except RequestError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not valid JSON"),
        (b"[]", "must be a JSON object, not list"),
        (b"5", "must be a JSON object, not int"),
        (b'{"prompt": "x"', "not valid JSON"),
        (b'{"prompt": "x"} y', "not valid JSON"),
        (b'\xff{"prompt": "x"}', "not UTF-8"),
        (b'{"prompt": "x", "n": 1, "n": 2}', "'n' is given twice"),
        (b'{"prompt": "x", "metadata": {"a": 1, "a": 2}}', "'a' is given twice"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "x", "metadata": {"a": NaN}}', "holds NaN"),
        (b'{"prompt": "x", "metadata": {"a": 1e999}}', "holds 1e999"),
        (b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"prompt": ' + b"[" * 100_000, "nested too deeply"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_lim_06_what_is_not_strict_json_is_refused(raw, words):
    assert words in str(refused(raw))


def test_an_escaped_pair_of_surrogates_is_a_character():
    assert parse(b'{"prompt": "\\ud83c\\udf36"}', CompletionBody).prompt == "\N{HOT PEPPER}"


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", '"nan"'])
@pytest.mark.parametrize(
    "field",
    ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
     "repetition_penalty"],
)  # fmt: skip
def test_smp_01_numbers_that_are_none_name_their_field(field, literal):
    error = refused(f'{{"prompt": "x", "{field}": {literal}}}'.encode())
    assert error.param == field
    assert field in str(error)


@pytest.mark.parametrize("literal", ["NaN", "1e999", "101", "-101", '"5"', "null", "true"])
def test_smp_17_values_of_logit_bias(literal):
    error = refused(f'{{"prompt": "x", "logit_bias": {{"7": {literal}}}}}'.encode())
    assert error.param == "logit_bias"


@pytest.mark.parametrize("key", ["-1", "abc", "1.5", " 5", "", "٣", "9" * 30])
def test_smp_17_keys_of_logit_bias(key):
    assert refused({"prompt": "x", "logit_bias": {key: 1}}).param == "logit_bias"
    bias = sampling_params(completion(logit_bias={"7": 100, "8": -100}), {}).logit_bias
    assert bias == {7: 100.0, 8: -100.0}


NUMBERS = ["n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
           "repetition_penalty", "seed", "min_tokens", "max_tokens", "prompt_logprobs",
           "logprobs"]  # fmt: skip


@pytest.mark.parametrize("field", NUMBERS)
def test_lim_06_null_is_absent(field):
    assert sampling_params(completion(**{field: None}), {}) == sampling_params(completion(), {})


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", ["5", True, [], {}])
def test_lim_06_wrong_types_name_the_field(field, value):
    error = refused({"prompt": "x", field: value})
    assert error.param == field
    assert field in str(error)


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [1.5, 0, -1, 2**31, 2**63, -(2**63) - 1, 10**400])
def test_lim_06_ranges_are_kept_or_refused_by_name(field, value):
    error = outcome({"prompt": "x", field: value})
    assert error is None or (error.param == field and len(str(error)) < 300)


@pytest.mark.parametrize(
    ("field", "value"),
    [("seed", -(2**63)), ("seed", 2**63 - 1), ("seed", 0), ("max_tokens", 2**31),
     ("top_k", -1), ("top_k", 9_999_999), ("temperature", 1e-9), ("temperature", 2)],
)  # fmt: skip
def test_lim_06_legal_edges(field, value):
    assert getattr(sampling_params(completion(**{field: value}), {}), field) == value


@pytest.mark.parametrize(
    ("name", "hint"),
    [("temprature", "did you mean 'temperature'?"), ("maxtokens", "'max_tokens'"), ("zzz", "")],
)
def test_an_unknown_field_is_refused_with_the_nearest_known_one(name, hint):
    error = refused({"prompt": "x", name: 1})
    assert error.param == name
    assert hint in str(error)


def test_a_huge_unknown_name_is_not_echoed():
    assert len(str(refused({"prompt": "x", "y" * 100_000: 1}))) < 200


@pytest.mark.parametrize(
    ("kind", "good"),
    [
        (CompletionBody, {"prompt": "x"}),
        (ChatBody, {"messages": HI}),
        (ResponsesBody, {"input": ""}),
    ],
)
def test_every_refused_field_is_refused_by_name_and_may_be_null(kind, good):
    for name, neutral in kind.refused.items():
        error = refused({**good, name: {"some": "value"}}, kind)
        assert error.param == name
        assert "not supported" in str(error)
        parse(json.dumps({**good, name: None}).encode(), kind)
        for value in neutral:
            parse(json.dumps({**good, name: value}).encode(), kind)


def test_every_field_of_vllm_that_is_not_served_is_in_its_table_and_is_refused_with_the_reason():
    for entry in vllm_names.entries(Kind.REQUEST):
        for kind, good in ((CompletionBody, {"prompt": "x"}), (ChatBody, {"messages": HI})):
            if entry.status is Status.REFUSED:
                error = refused({**good, entry.name: {"some": "value"}}, kind)
                assert entry.reason in str(error)
                assert entry.use in str(error)
            if entry.status is not Status.SUPPORTED and not entry.any_value:
                for value in entry.neutral:
                    parse(json.dumps({**good, entry.name: value}).encode(), kind)
    kinds = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, ResponsesBody)
    served = {n for kind in kinds for n in kind.__struct_fields__} | protocol.NO_OPS
    ours = {"deadline"}
    listed = {e.name for e in vllm_names.entries(Kind.REQUEST) if e.status is Status.SUPPORTED}
    assert served - listed - ours - protocol.NO_OPS == set()
    assert listed <= served


def test_a_neutral_value_is_of_its_own_type():
    refused({"prompt": "x", "use_beam_search": 0})


NEUTRAL = [
    {"best_of": 1}, {"best_of": 3, "n": 3}, {"n": 1.0}, {"max_tokens": 5.0}, {"seed": -0.0},
    {"stream_options": {}}, {"stream_options": {"include_usage": False}}, {"logit_bias": {}},
    {"user": ""}, {"store": False}, {"service_tier": "auto"}, {"service_tier": "default"},
    {"metadata": {}}, {"response_format": {"type": "text"}}, {"length_penalty": 1},
    {"stream_interval": 1.0}, {"use_beam_search": False}, {"stop": []}, {"bad_words": []},
    {"vllm_xargs": {}}, {"prompt_cache_retention": "in_memory"}, {"top_k": 0}, {"priority": 0},
    {"return_hidden_states": False}, {"no_stop_trim": False}, {"lora_path": None},
    {"spaces_between_special_tokens": True}, {"spaces_between_special_tokens": False},
    {"suffix": None}, {"truncate_prompt_tokens": None}, {"reasoning_effort": None},
    {"stream_options": None}, {"tools": []}, {"logprob_token_ids": []}, {"watermarking": False},
]  # fmt: skip
NEUTRAL_CHAT = [
    {"tool_choice": "auto"}, {"tool_choice": "none"}, {"tools": [], "tool_choice": "auto"},
    {"tools": None}, {"functions": []}, {"function_call": "auto"}, {"documents": []},
    {"parallel_tool_calls": True}, {"parallel_tool_calls": False}, {"reasoning_effort": "none"},
    {"top_logprobs": 0}, {"logprobs": False, "top_logprobs": 0}, {"verbosity": "medium"},
    {"modalities": ["text"]}, {"include_reasoning": True}, {"web_search_options": None},
    {"mm_processor_kwargs": {}}, {"max_completion_tokens": 5.0},
]  # fmt: skip


@pytest.mark.parametrize("fields", [*NEUTRAL, {"suffix": ""}, {"prompt_embeds": []}])
def test_a_completion_takes_neutral_values(fields):
    assert sampling_params(completion(**fields), {}).n == fields.get("n", 1)


@pytest.mark.parametrize("fields", [*NEUTRAL, *NEUTRAL_CHAT])
def test_a_chat_takes_neutral_values(fields):
    assert sampling_params(chat(**fields), {}).logprobs is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"), ({"best_of": 3, "n": 2}, "best_of"),
        ({"best_of": True}, "best_of"), ({"n": 1.5}, "n"), ({"suffix": "x"}, "suffix"),
        ({"use_beam_search": True}, "use_beam_search"), ({"length_penalty": 1.5}, "length_penalty"),
        ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        ({"verbosity": "low"}, "verbosity"), ({"top_logprobs": -1}, "top_logprobs"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)  # fmt: skip
def test_other_values_of_the_same_fields_are_refused_by_name(fields, param):
    if param == "suffix":
        assert refused({"prompt": "x", **fields}).param == param
    else:
        assert refused({"messages": HI, **fields}, ChatBody).param == param


@pytest.mark.parametrize(
    "field",
    [{"reasoning_content": ""}, {"reasoning": ""}, {"refusal": ""}, {"tool_calls": []},
     {"provider_specific_fields": {}}, {"thinking_blocks": []}, {"reasoning_details": []},
     {"images": []}, {"tool_call_id": ""}, {"prefix": False}, {"function_call": None}],
)  # fmt: skip
def test_a_message_that_clients_send_back_may_have_empty_fields(field):
    message = {"role": "assistant", "content": "hi"}
    assert chat(messages=[*HI, {**message, **field}]).messages[1] == message
    name = next(iter(field))
    if name in ("reasoning", "reasoning_content", "tool_calls"):
        name, message = "tool_call_id", {**message, "role": "user"}
    with pytest.raises(RequestError, match="not supported"):
        chat(messages=[*HI, {**message, name: "something"}])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"), ({"tools": [{}]}, "tools"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"include_reasoning": False}, "include_reasoning"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)  # fmt: skip
def test_a_completion_has_no_part_of_a_conversation(fields, param):
    error = refused({"prompt": "x", **fields})
    assert error.param == param
    assert "/v1/chat/completions" in str(error)


def test_bookkeeping_fields_are_accepted():
    for name in protocol.NO_OPS:
        assert completion(**{name: "anything"}).prompt == "x"


def test_sto_a_form_becomes_structured_outputs():
    def form(**fields):
        return sampling_params(chat(**fields), {}).structured_outputs

    assert refused({"messages": HI, "response_format": "x"}, ChatBody).param == "response_format"
    assert form() is form(response_format={"type": "text"}) is None
    assert form(response_format={"type": "json_object"}).json_object
    described = {"name": "n", "schema": {"type": "null"}}
    by_schema = form(response_format={"type": "json_schema", "json_schema": described})
    assert by_schema.json == '{"type": "null"}'
    tag = form(response_format={"type": "structural_tag", "format": {"type": "any_text"}})
    assert tag.structural_tag == '{"format": {"type": "any_text"}}'
    assert form(structured_outputs={"regex": "a", "json": None}).regex == "a"


def test_lgp_01_top_logprobs_needs_logprobs():
    for fields in ({"top_logprobs": 5}, {"logprobs": False, "top_logprobs": 5}):
        assert refused({"messages": HI, **fields}, ChatBody).param == "top_logprobs"
    for bad in (-1, 21):
        fields = {"logprobs": True, "top_logprobs": bad}
        assert refused({"messages": HI, **fields}, ChatBody).param == "top_logprobs"
    for fields, wanted in [
        ({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ]:  # fmt: skip
        assert sampling_params(chat(**fields), {}).logprobs == wanted


def test_lgp_01_zero_logprobs_of_a_completion_are_on():
    assert sampling_params(completion(logprobs=0), {}).logprobs == 0
    assert refused({"prompt": "x", "logprobs": True}).param == "logprobs"


def test_lim_04_limits_left_out():
    assert sampling_params(completion(), {}).max_tokens == 16
    assert sampling_params(chat(), {}).max_tokens is None
    assert sampling_params(chat(max_completion_tokens=5), {}).max_tokens == 5
    assert sampling_params(chat(max_tokens=5, max_completion_tokens=5), {}).max_tokens == 5
    both = {"messages": HI, "max_tokens": 4, "max_completion_tokens": 5}
    assert refused(both, ChatBody).param == "max_completion_tokens"
    assert refused({"messages": HI, "max_completion_tokens": 0}, ChatBody).param == (
        "max_completion_tokens"
    )


def test_min_tokens_is_not_held_against_a_limit_that_nobody_sent():
    assert sampling_params(completion(min_tokens=20), {}).max_tokens == 20
    assert sampling_params(completion(min_tokens=5), {}).max_tokens == 16
    assert refused({"prompt": "x", "min_tokens": 20, "max_tokens": 16}).param == "min_tokens"


def test_smp_21_the_model_s_defaults_hold_field_by_field():
    defaults = {"temperature": 0.5, "top_k": 1, "top_p": 0.9, "repetition_penalty": 1.5}
    none = sampling_params(completion(), defaults)
    assert (none.temperature, none.top_k, none.repetition_penalty) == (0.5, 1, 1.5)
    some = sampling_params(completion(top_k=-1, temperature=None), defaults)
    assert (some.temperature, some.top_k, some.top_p) == (0.5, -1, 0.9)
    assert sampling_params(completion(), {}).temperature == 1.0


def test_stream_decides_the_kind_of_outputs():
    assert sampling_params(completion(stream=True), {}).output_kind is RequestOutputKind.DELTA
    assert sampling_params(completion(), {}).output_kind is RequestOutputKind.FINAL_ONLY


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}},
         "stream_options.continuous_usage_stats"),
        ({"stream": True, "stream_options": {"includ_usage": True}}, "stream_options.includ_usage"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": []}, "stream_options"),
    ],
)  # fmt: skip
def test_stream_options(options, param):
    assert refused({"prompt": "x", **options}).param == param


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "messages[1].tool_calls"),
        ({"role": "user", "contnt": "x"}, "messages[1].contnt"),
        ("text", "messages[1]"),
        (None, "messages[1]"),
    ],
)
def test_cht_03_messages_that_are_none(message, param):
    assert refused({"messages": [*HI, message]}, ChatBody).param == param


def test_a_message_that_came_from_us_can_be_sent_back():
    dumped = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None,
              "annotations": [], "audio": None, "function_call": None}  # fmt: skip
    assert chat(messages=[*HI, dumped]).messages[1] == {"role": "assistant", "content": "hi"}


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ("a", ["a"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]), ("", [""]), ([""], [""]), ([[]], [[]]),
    ],
)  # fmt: skip
def test_a_prompt_is_text_or_ids_or_a_list_of_either(prompt, found):
    assert prompts(completion(prompt=prompt)) == found


@pytest.mark.parametrize(
    "prompt", [None, [], 5, {}, [1.5], [True], ["a", 1], [1, "a"], [[1.5]], [["a"]], [None]]
)
def test_lim_07_other_prompts_are_refused(prompt):
    with pytest.raises(RequestError) as caught:
        prompts(completion(prompt=prompt))
    assert str(caught.value.param).startswith("prompt")


def test_lgp_06_scoring_needs_echo():
    assert refused({"prompt": "x", "max_tokens": 0}).param == "max_tokens"
    params = sampling_params(completion(max_tokens=0, echo=True, logprobs=3), {})
    assert (params.max_tokens, params.prompt_logprobs) == (1, 3)
    refused({"prompt": "x", "max_tokens": 0, "echo": True, "min_tokens": 1})


def test_other_bodies():
    assert parse(b'{"prompt": "x"}', TokenizeBody).prompt == "x"
    assert parse(b'{"tokens": [1]}', DetokenizeBody).tokens == [1]
    for raw in (b'{"tokens": ["1"]}', b'{"tokens": null}', b"{}"):
        with pytest.raises(RequestError, match="tokens"):
            parse(raw, DetokenizeBody)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
FIELDS = sorted({*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__})


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6), st.sampled_from([0, 1]))
def test_lim_06_any_body_parses_or_is_refused(fields, which):
    kind = (CompletionBody, ChatBody)[which]
    error = outcome(fields, kind)
    assert error is None or str(error)
