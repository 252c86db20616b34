"""Tool calls of a real model: Qwen2.5-Coder 0.5B, which knows the format and seldom keeps to it."""

import json

import jsonschema
import pytest

from octavo import LLM, SamplingParams
from tool_model import CLOCK, WEATHER

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(600)]

MODEL = "qwen2.5-coder-0.5b"
TOOLS = [WEATHER, CLOCK]
ASKED = [{"role": "user", "content": "What is the weather in Rome?"}]
SCHEMAS = {"weather": WEATHER["function"]["parameters"], "clock": {"type": "object"}}


def load(**options):
    return LLM(MODEL, max_model_len=2048, load_progress=False, **options)


def ask(llm, **fields):
    params = fields.pop("params", SamplingParams(temperature=0, max_tokens=120))
    messages = fields.pop("messages", ASKED)
    return llm.chat(messages, params, tools=TOOLS, use_tqdm=False, **fields)[0]


def check(choice):
    for call in choice.message.tool_calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    return [call.name for call in choice.message.tool_calls]


def test_calls_that_must_be_made_are_valid():
    with load() as llm:
        first = ask(llm, tool_choice="required", parallel_tool_calls=False)
        (call,) = first.outputs[0].message.tool_calls
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})
        named = {"type": "function", "function": {"name": "clock"}}
        assert check(ask(llm, tool_choice=named).outputs[0]) == ["clock"]
        hot = SamplingParams(temperature=1.5, seed=3, n=3, max_tokens=400)
        for choice in ask(llm, tool_choice="required", params=hot).outputs:
            if choice.finish_reason == "stop":
                assert check(choice)
        # Its own words, which the parser leaves as they are.
        free = ask(llm).outputs[0].message
        assert free.tool_calls or "weather" in free.content
        message = first.outputs[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
        again = ask(llm, messages=[*ASKED, message.as_message(), result])
        size = len(first.prompt_token_ids) + len(first.outputs[0].token_ids)
        assert again.num_cached_tokens >= (size - 1) // 16 * 16


def test_bare_calls_are_calls_where_the_format_is_named():
    with load(tool_call_parser="llama3_json") as llm:
        message = ask(llm).outputs[0].message
        assert message.content is None
        assert [call.name for call in message.tool_calls] == ["weather"]
        assert json.loads(message.tool_calls[0].arguments) == {"city": "Rome"}
