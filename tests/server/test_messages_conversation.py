"""Bodies of the Messages API as conversations and sampling parameters."""

import json

import pytest

from octavo.errors import ContextLengthError, RequestError
from octavo.params import RequestOutputKind
from octavo.server.messages_conversation import conversation, field_names, sampling
from octavo.server.messages_protocol import MessagesBody
from octavo.server.protocol import parse
from octavo.text.placement import Placement

ANYWHERE = Placement(system=True, user_after_tool=True)
HI = {"role": "user", "content": "hi"}


def read(*messages, **fields):
    fields = {"model": "m", "max_tokens": 16, "messages": list(messages or [HI]), **fields}
    return parse(json.dumps(fields).encode(), MessagesBody)


def test_a_final_message_of_the_assistant_is_continued():
    assert not conversation(read(HI), ANYWHERE).continue_final_message
    answer = {"role": "assistant", "content": "The "}
    assert conversation(read(HI, answer), ANYWHERE).continue_final_message


def test_sampling_parameters():
    body = read(temperature=0.5, top_k=3, stop_sequences=["x"], stream=True)
    params = sampling(body, {"top_p": 0.25, "temperature": 0.9}, False)
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.25, 3)
    assert (list(params.stop), params.max_tokens) == (["x"], 16)
    assert params.output_kind is RequestOutputKind.DELTA
    assert sampling(read(), {}, False).output_kind is RequestOutputKind.FINAL_ONLY
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        assert (
            json.loads(sampling(read(**fields), {}, False).structured_outputs.json)
            == form["schema"]
        )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"), ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"), ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}, "max_tokens": 5000},
         "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 2000},
         "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}},
          "output_format": {"type": "json_schema", "schema": {}}}, "output_format"),
    ],
)  # fmt: skip
def test_values_out_of_range(fields, param):
    body = read(**fields)
    with pytest.raises(RequestError) as found, field_names(body):
        sampling(body, {}, False)
    assert found.value.param == param
    assert param in str(found.value)


@pytest.mark.parametrize(
    ("thinking", "budget", "effort", "switch"),
    [
        (None, None, None, None),
        ({"type": "enabled", "budget_tokens": 1024}, 1024, None, True),
        ({"type": "adaptive"}, None, None, True),
        ({"type": "disabled"}, 0, "none", False),
    ],
)
def test_what_thinking_means(thinking, budget, effort, switch):
    body = read(max_tokens=2000, thinking=thinking)
    assert sampling(body, {}, True).thinking_token_budget == budget
    assert sampling(body, {}, False).thinking_token_budget is None
    asked = conversation(body, ANYWHERE)
    assert asked.reasoning_effort == effort
    assert (asked.chat_template_kwargs or {}).get("enable_thinking") is switch
    louder = read(max_tokens=2000, thinking=thinking, output_config={"effort": "high"})
    assert conversation(louder, ANYWHERE).reasoning_effort == "high"
    assert conversation(louder, ANYWHERE).chat_template_kwargs == asked.chat_template_kwargs


def test_a_window_that_is_too_small_is_said_as_clients_read_it():
    body = read(max_tokens=600)

    def said(param):
        with pytest.raises(ContextLengthError) as found, field_names(body):
            raise ContextLengthError("no", param, 137, 512)
        return str(found.value)

    assert "input length and `max_tokens` exceed context limit: 137 + 600 > 512" in said(
        "max_tokens"
    )
    assert said("prompt") == "prompt is too long: 137 tokens > 512 maximum"
