"""A scripted model that was taught the Hermes format, what it can be made to say, and how a client
reads that."""

import json
from pathlib import Path

from tokenizers import Tokenizer

import kit
from serving import PIECES

MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
# The layout of Hermes and Qwen 2.5, small.
TEMPLATE = """\
{%- if tools %}<|system|>Tools:
{%- for tool in tools %}
{{ tool | tojson }}{% endfor %}<|eot|>{% endif %}
{%- for m in messages %}<|{{ m.role }}|>
{%- if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}
{%- if m.content %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\\n' }}{% endif -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|eot|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
# It thinks before it answers, as Qwen 3 does; a turn's thoughts are shown while it lasts.
THINKING = TEMPLATE.replace(
    "{%- if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}",
    "{%- if m.reasoning_content and m.tool_calls %}<think>\n{{ m.reasoning_content }}\n</think>"
    "\n\n{% endif %}",
) + (
    "{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


def write(folder: Path, template: str = TEMPLATE, **settings: object) -> Path:
    vocab = kit.write_tokenizer(folder, PIECES, added=MARKERS)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    (folder / "fake.json").write_text(json.dumps({"vocab_size": vocab, **settings}))
    return folder


def ids(folder: Path, text: str) -> list[int]:
    """The text as this model writes it: markers as tokens, all else byte by byte."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found: list[int] = []
    while text:
        marker = next((m for m in MARKERS if text.startswith(m)), None)
        if marker is None:
            found += text[0].encode()
            text = text[1:]
        else:
            found.append(tokenizer.token_to_id(marker))
            text = text.removeprefix(marker)
    return found


def call(name: str = "weather", arguments: str = '{"city": "Rome"}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def script(server, text):
    """A prompt that makes the model write this text, then end."""
    return f"say [{ids(server.folder, text)}]"


def say(server, text):
    return [{"role": "user", "content": script(server, text)}]


def ask(server, text, **fields):
    body = {"messages": say(server, text), "tools": TOOLS, "max_tokens": 400, **fields}
    reply = server.post(PATH, **body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def fold(events, index=0):
    """A streamed choice as a client puts it together, with what the stream must be like."""
    message, reason, begun = {}, None, False
    for choice in (c for e in events for c in e["choices"] if c["index"] == index):
        delta = choice["delta"]
        assert reason is None, "nothing follows the end"
        assert ("role" in delta) is not begun
        begun = True
        for name in ("content", "reasoning", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for piece in delta.get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if "id" in piece:
                assert piece["index"] == len(calls)
                assert piece["type"] == "function"
                calls.append({"id": piece["id"], "type": "function",
                              "function": dict(piece["function"])})  # fmt: skip
            else:
                assert set(piece) == {"index", "function"}
                assert set(piece["function"]) == {"arguments"}
                assert piece["index"] == len(calls) - 1
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
        reason = choice["finish_reason"]
    return message, reason


def without_ids(message):
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [c["function"] for c in calls]}


def both(server, text, **fields):
    """(message without ids, finish_reason), asserted to be equal whole and streamed."""
    reply = ask(server, text, **fields)
    whole = reply["choices"][0]
    body = {"messages": say(server, text), "tools": TOOLS, "max_tokens": 400, **fields}
    events = server.events(PATH, **body, stream_options={"include_usage": True})
    streamed, reason = fold(events)
    message = {k: v for k, v in whole["message"].items() if k not in ("role", "refusal")}
    streamed = {"content": None, **streamed}
    if not message.get("content") and "tool_calls" not in message:
        streamed["content"] = streamed["content"] or message["content"]
    assert without_ids(streamed) == without_ids(message)
    assert reason == whole["finish_reason"]
    assert events[-1]["usage"]["completion_tokens"] == reply["usage"]["completion_tokens"]
    names = [c["id"] for m in (streamed, message) for c in m.get("tool_calls", [])]
    assert len(set(names)) == len(names)
    assert all(i.startswith("chatcmpl-tool-") for i in names)
    return without_ids(message), reason


ROME = {"name": "weather", "arguments": '{"city": "Rome"}'}
NOW = {"name": "clock", "arguments": "{}"}
