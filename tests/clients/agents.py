"""A tool's round trip and typed answers in a library's own way: python agents.py NAME URL KEY.

The server is over the tests' scripted engine, as a model that writes tool calls
(`tests/tool_model.py`). Run in an environment that has the library; nothing of Octavo is imported.
"""

import json
import sys
import urllib.request
from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel

MODEL = "scripted"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SUNNY = "It is sunny in Rome."


def says(url: str, key: str, answer: str) -> str:
    """What makes the engine give this answer, when it is the last thing that the prompt has."""
    body = json.dumps({"prompt": answer, "add_special_tokens": False}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/tokenize", body, headers)
    with urllib.request.urlopen(request) as reply:
        return f"say [{json.load(reply)['tokens']}]"


class City(BaseModel):
    """The scripted model draws among what the schema allows."""

    kind: Literal["town", "village"]
    size: Literal[1, 2, 3]


def tool(url: str, key: str) -> Callable[[str], str]:
    final = says(url, key, SUNNY)

    def weather(city: str) -> str:
        """The weather in a city."""
        assert city == "Rome", city
        return final

    return weather


def langchain(url: str, key: str) -> None:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    weather, asked = tool(url, key), says(url, key, CALL)
    question = {"messages": [{"role": "user", "content": asked}]}
    for responses in (False, True):
        chat = ChatOpenAI(base_url=f"{url}/v1", api_key=key, model=MODEL,
                          use_responses_api=responses)  # fmt: skip
        agent = create_agent(chat, [weather])
        told = agent.invoke(question)["messages"]
        assert told[1].tool_calls[0]["args"] == {"city": "Rome"}, told
        assert told[-1].text == SUNNY, told
        # Streamed: the call's pieces are joined by LangChain.
        joined = None
        for chunk in chat.bind_tools([weather]).stream(asked):
            joined = chunk if joined is None else joined + chunk
        assert joined.tool_calls[0]["args"] == {"city": "Rome"}, joined
        forced = chat.bind_tools([weather], tool_choice="weather").invoke(asked)
        assert forced.tool_calls[0]["args"] == {"city": "Rome"}, forced
        for method in ("json_schema", "function_calling"):
            found = chat.with_structured_output(City, method=method).invoke("hi")
            assert isinstance(found, City), found
        print("agent, streamed call, forced call, typed answers; Responses API:", responses)


def llama_index(url: str, key: str) -> None:
    import asyncio

    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    weather, asked = tool(url, key), says(url, key, CALL)
    llm = OpenAILike(model=MODEL, api_base=f"{url}/v1", api_key=key, is_chat_model=True,
                     is_function_calling_model=True, context_window=4096)  # fmt: skip

    async def ask() -> str:
        agent = FunctionAgent(tools=[weather], llm=llm, system_prompt="Answer.")
        return str(await agent.run(asked))

    answer = asyncio.run(ask())
    assert answer == SUNNY, answer
    print("function agent:", answer)


def instructor(url: str, key: str) -> None:
    import instructor as library
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key=key)
    for mode in (library.Mode.TOOLS, library.Mode.TOOLS_STRICT, library.Mode.JSON_SCHEMA):
        patched = library.from_openai(client, mode=mode)
        found = patched.chat.completions.create(
            model=MODEL, response_model=City, max_retries=0,
            messages=[{"role": "user", "content": "hi"}],
        )  # fmt: skip
        assert isinstance(found, City), found
        print("typed answer:", mode.name, found)


if __name__ == "__main__":
    {"langchain": langchain, "llama_index": llama_index, "instructor": instructor}[sys.argv[1]](
        *sys.argv[2:]
    )
