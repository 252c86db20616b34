"""Formats of tool calls, by name and by chat template."""

import pytest

from octavo.errors import ConfigError
from octavo.text.tools.base import Call
from octavo.text.tools.registry import FORMATS, detect, find


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
