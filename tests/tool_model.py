"""A scripted model that was taught the Hermes format, and what it can be made to say."""

import json
from pathlib import Path

from tokenizers import Tokenizer

import kit
from serving import PIECES

MARKERS = ("<tool_call>", "</tool_call>")
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
