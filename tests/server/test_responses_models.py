"""`/v1/responses` with a real model, through OpenAI's own client: an agent's loop, and a form."""

import json

import pytest

from octavo.engine.client import EXECUTOR
from serving import Server

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(1200)]
MODEL = "qwen2.5-coder-0.5b"
BLOCK = 16
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city now.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 30}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client():
    import openai

    room = {"max_model_len": 2048, "num_gpu_blocks_override": 300, "load_progress": False}
    with (
        Server(MODEL, {}, executor=EXECUTOR, start_seconds=200, **room) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as found,
    ):
        yield found


def test_an_agent_s_loop(client):
    """Each turn calls the tool, and computes little more than what is new."""
    items = [{"role": "user", "content": "Compare the weather in European capitals."}]
    asked = {"model": MODEL, "temperature": 0, "max_output_tokens": 80, "tools": [TOOL]}
    held = 0
    for _ in range(10):
        found = client.responses.create(
            input=items, tool_choice="required", parallel_tool_calls=False, **asked
        )
        assert found.usage.input_tokens_details.cached_tokens >= held - 2 * BLOCK
        held = found.usage.input_tokens
        made = found.output[-1]
        assert (made.type, made.name) == ("function_call", "get_weather")
        assert set(json.loads(made.arguments)) == {"city"}
        items += found.output
        items.append({"type": "function_call_output", "call_id": made.call_id, "output": "sunny"})
    with client.responses.stream(input=items, tool_choice="none", **asked) as events:
        last = events.get_final_response()
    assert last.output_text
    assert [item.type for item in last.output] == ["message"]


def test_a_model_of_pydantic(client):
    from typing import Literal

    from pydantic import BaseModel

    class Capital(BaseModel):
        country: Literal["Italy", "France"]
        letters: int

    found = client.responses.parse(
        model=MODEL,
        input="In which country is Rome, and how many letters has it? Answer in JSON.",
        text_format=Capital,
        max_output_tokens=200,
        temperature=0,
    )
    assert found.status == "completed"
    assert isinstance(found.output_parsed, Capital)
