"""Formats of tool calls, by name and by chat template; templates that write calls as formats do."""

import pytest
from tests.text.tools import chat_templates, transcripts

from octavo.errors import ConfigError
from octavo.text.sandbox import Template
from octavo.text.tools.base import Call
from octavo.text.tools.registry import FORMATS, detect, find

_OBJECT = '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
_LIST = f"[{{% for c in calls %}}{_OBJECT}{{{{ ', ' if not loop.last }}}}{{% endfor %}}]"

# The layouts of the families' own templates, in short: how each writes calls that were made.
TEMPLATES = {
    "Hermes": "{% for c in calls %}{{ '\\n' if not loop.first }}<tool_call>\n"
              + _OBJECT + "\n</tool_call>{% endfor %}",
    "Llama3Json": """{# {"name": function name, "parameters": dictionary of argument name and """
                  """its value} #}{% for c in calls %}{"name": "{{ c.name }}", """
                  """"parameters": {{ c.arguments | tojson }}}{{ '; ' if not loop.last }}"""
                  "{% endfor %}",
    "Mistral": "{% for c in calls %}[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}"
               "{% endfor %}",
    "MistralList": "[TOOL_CALLS]" + _LIST,
    "MistralSpacedList": "[TOOL_CALLS] " + _LIST,
    "Granite": "{# <|start_of_role|> #}<|tool_call|>" + _LIST,
    "Phi4MiniJson": "{# <|tool|>{{ tools }}<|/tool|> #}functools" + _LIST,
    "DeepSeekV3": "<｜tool▁calls▁begin｜>{% for c in calls %}{{ '\\n' if not loop.first }}"
                  "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n"
                  "{{ c.arguments | tojson }}\n```<｜tool▁call▁end｜>{% endfor %}"
                  "<｜tool▁calls▁end｜>",
    "DeepSeekV31": "<｜tool▁calls▁begin｜>{% for c in calls %}<｜tool▁call▁begin｜>{{ c.name }}"
                   "<｜tool▁sep｜>{{ c.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}"
                   "<｜tool▁calls▁end｜>",
    "KimiK2": "<|tool_calls_section_begin|>{% for c in calls %}<|tool_call_begin|>functions."
              "{{ c.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
              "{{ c.arguments | tojson }}<|tool_call_end|>{% endfor %}"
              "<|tool_calls_section_end|>",
    **chat_templates.TEMPLATES,
    "Harmony": "{% for c in calls %}{{ '<|call|><|start|>assistant' if not loop.first }}<|channel|>"
               "commentary to=functions.{{ c.name }} <|constrain|>json<|message|>"
               "{{ c.arguments | tojson }}{% endfor %}",
}  # fmt: skip
BY_CLASS = {type(one).__name__: one for one in FORMATS}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_says_which_format_its_model_has(name):
    assert detect(TEMPLATES[name]) is BY_CLASS[name]
    assert find(BY_CLASS[name].name, TEMPLATES[name]) is BY_CLASS[name]


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_are_written_as_the_template_writes_them(name):
    template, tool_format = Template(TEMPLATES[name]), BY_CLASS[name]
    for made in transcripts.transcripts(tool_format.markers, count=20, seed=5):
        if made.calls:
            calls = [{"name": one.name, "arguments": one.arguments} for one in made.calls]
            assert template.render({"calls": calls}, 100) == tool_format.write(made.calls)


def test_templates_that_mention_other_words_have_another_format():
    shown = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for other in ("<function=f>", "<arg_key>", "<tool_calls>[]</tool_calls>", '<invoke name="f">'):
        assert detect(f"{shown} {other}") is not BY_CLASS["Hermes"]
    assert detect("[TOOL_CALLS]f[CALL_ID]1[ARGS]{}") is BY_CLASS["MistralWithIds"]


def test_templates_that_show_the_tools_alone_have_a_format():
    assert detect("{{ 'List of tools: ' + tools | tojson }}") is BY_CLASS["Lfm2"]
    assert detect("{{ 'List of tools: <|tool_list_start|>[' }}") is BY_CLASS["Lfm2"]
    assert detect("{# List of tools: {{ tools }} <tool_call>{} #}") is BY_CLASS["Hermes"]


def test_formats_are_found_by_name_and_alias():
    for one in FORMATS:
        for name in (one.name, *one.aliases):
            assert find(name).name == one.name


def test_of_several_layouts_that_of_the_template_is_taken():
    assert find("mistral").write([Call("f", {})]) == "[TOOL_CALLS]f[ARGS]{}"
    older = find("mistral", "{{ '[TOOL_CALLS] [' }}")
    assert older.write([Call("f", {})]) == '[TOOL_CALLS] [{"name": "f", "arguments": {}}]'


def test_an_unknown_name_is_an_error_that_says_which_there_are():
    with pytest.raises(ConfigError, match=r"'herms'; did you mean 'hermes'.* there are .*hermes"):
        find("herms")


def test_a_template_without_calls_has_no_format():
    assert detect("{{ messages[0].content }}") is None
