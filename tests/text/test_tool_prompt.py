"""Tools told in words: what a chat template that knows none is given."""

import pytest

import kit
from octavo.errors import RequestError
from octavo.text.chat import encode_chat
from octavo.text.tokenizer import load_tokenizer
from octavo.text.tool_prompt import told
from octavo.text.tools import registry

HERMES = registry.find("hermes")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "hi"}
CALLED = {"role": "assistant", "tool_calls": [
    {"id": str(i), "type": "function", "function": {"name": "look", "arguments": {"at": i}}}
    for i in range(2)
]}  # fmt: skip
RESULTS = [{"role": "tool", "tool_call_id": str(i), "content": f"r{i}"} for i in range(2)]
WRITTEN = (
    '<tool_call>\n{"name": "look", "arguments": {"at": 0}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
)


def test_calls_are_text_and_results_a_message_of_the_user_s():
    found = told([USER, CALLED, *RESULTS, USER], None, HERMES)
    results = "<tool_response>\nr0\n</tool_response>\n<tool_response>\nr1\n</tool_response>"
    assert found == [
        USER,
        {"role": "assistant", "content": WRITTEN},
        {"role": "user", "content": results},
        USER,
    ]
    said = told([USER, {**CALLED, "content": "I look."}], None, HERMES)
    assert said[1]["content"] == f"I look.\n{WRITTEN}"


def test_the_system_message_describes_the_tools():
    (system, user) = told([USER], [TOOL], HERMES)
    assert system["role"] == "system"
    assert '{"name": "look", "parameters": {"type": "object"}}' in system["content"]
    assert "<tool_call>" in system["content"]
    assert user == USER
    given = told([{"role": "system", "content": "Be brief."}, USER], [TOOL], HERMES)
    assert given[0]["content"] == f"Be brief.\n\n{system['content']}"
    assert len(given) == 2


def test_only_a_template_without_tools_has_them_told(tmp_path):
    kit.write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    prompt = encode_chat(tokenizer, [USER, CALLED, *RESULTS], tools=[TOOL], tool_format=HERMES)
    assert prompt.text.startswith("<|system|># Tools")
    assert f"<|assistant|>{WRITTEN}<|eot|><|user|><tool_response>" in prompt.text
    plain = encode_chat(tokenizer, [USER], tool_format=HERMES)
    assert plain == encode_chat(tokenizer, [USER])
    with pytest.raises(RequestError, match="does not show them"):
        encode_chat(tokenizer, [USER], tools=[TOOL])
    shows = "{{ tools | length }}{{ messages | length }}"
    shown = encode_chat(tokenizer, [USER], tools=[TOOL], tool_format=HERMES, chat_template=shows)
    assert shown.text.endswith("11")
