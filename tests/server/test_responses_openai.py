"""`/v1/responses` through OpenAI's own client."""

import pytest

import tool_model
from tool_model import call
from tool_model import script as say

WEATHER = {"type": "function", **tool_model.WEATHER["function"]}
ROME = '{"city": "Rome"}'
BLOCK = 16


@pytest.fixture(scope="module")
def server(tool_server):
    return tool_server


@pytest.fixture(scope="module")
def client(server):
    import openai  # its import takes a second

    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as found:
        yield found


def test_the_official_client_whole_and_streamed(client, server):
    asked = {"model": "hermes", "input": say(server, "ABCDE"), "max_output_tokens": 16}
    whole = client.responses.create(**asked)
    assert (whole.output_text, whole.status) == ("ABCDE", "completed")
    told = list(client.responses.create(**asked, stream=True))
    assert "".join(e.delta for e in told if e.type == "response.output_text.delta") == "ABCDE"
    with client.responses.stream(**asked) as events:
        folded = events.get_final_response()
    assert folded.output_text == "ABCDE"
    assert folded.usage.total_tokens == whole.usage.total_tokens


def test_the_official_client_parses_a_model_of_pydantic(client):
    from typing import Literal

    from pydantic import BaseModel

    class Inner(BaseModel):
        kind: Literal["x", "yy"]

    class Outer(BaseModel):
        inner: Inner

    asked = {"model": "hermes", "input": "hi", "text_format": Outer}
    parsed = client.responses.parse(**asked)
    assert parsed.output_parsed.inner.kind in ("x", "yy")
    with client.responses.stream(**asked) as events:
        assert events.get_final_response().output_parsed == parsed.output_parsed


def test_the_official_client_s_typed_errors(client):
    import openai

    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(model="hermes", input="hi", previous_response_id="resp_1")
    assert bad.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError, match="not kept"):
        client.responses.retrieve("resp_1")
    told = list(client.responses.create(model="hermes", input="!fail", stream=True))
    assert told[-1].type == "response.failed"


def test_the_official_client_s_loop_of_calls(client, server):
    items = [{"role": "user", "content": say(server, "I look.\n" + call())}]
    with client.responses.stream(
        model="hermes", input=items, tools=[WEATHER], max_output_tokens=400
    ) as events:
        told = [event.type for event in events]
        first = events.get_final_response()
    assert "response.function_call_arguments.delta" in told
    message, made = first.output
    assert (message.content[0].text, made.name, made.arguments) == ("I look.", "weather", ROME)
    items += first.output
    items.append({"type": "function_call_output", "call_id": made.call_id,
                  "output": "sunny " + say(server, "It is sunny.")})  # fmt: skip
    last = client.responses.create(model="hermes", input=items, tools=[WEATHER])
    assert last.output_text == "It is sunny."
    assert last.usage.input_tokens_details.cached_tokens > first.usage.input_tokens - BLOCK


def test_the_official_client_parses_arguments_of_a_model_of_pydantic(client, server):
    import openai
    from pydantic import BaseModel

    class weather(BaseModel):  # noqa: N801 - the tool's name
        city: str

    tool = openai.pydantic_function_tool(weather)["function"]
    parsed = client.responses.parse(
        model="hermes",
        input=say(server, call()),
        tools=[{"type": "function", **tool}],
        max_output_tokens=400,
    )
    assert parsed.output[0].parsed_arguments == {"city": "Rome"}
