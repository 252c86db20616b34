"""Formats of tool calls, by name and by chat template."""

import pytest

from octavo.errors import ConfigError
from octavo.text.tools.registry import FORMATS, detect, find


def test_names_and_aliases_are_unique_and_found():
    known = [name for one in FORMATS for name in (one.name, *one.aliases)]
    assert len(known) == len(set(known))
    assert all(name in (find(name).name, *find(name).aliases) for name in known)


def test_an_unknown_name_is_an_error_that_says_which_there_are():
    with pytest.raises(ConfigError, match=r"'herms'; did you mean 'hermes'.* there are .*hermes"):
        find("herms")


def test_a_template_without_calls_has_no_format():
    assert detect("{{ messages[0].content }}") is None
