"""Saved conversations: what is written is read again, and mistakes are one line."""

import json

import pytest

from octavo.cli import chat_files
from octavo.cli.chat_session import Turn
from octavo.errors import RequestError
from octavo.params import SamplingParams

TURNS = [Turn("hello\nthere", "Hi — 漢字 👋"), Turn("again", "```py\nx\n```")]
PARAMS = SamplingParams(
    max_tokens=None, temperature=0.2, stop=["END", "\n"], logit_bias={7: 1.5}, stop_token_ids=[2]
)


def save(path, replace=False, turns=TURNS):
    chat_files.save(path, "stub", "be brief", turns, PARAMS, replace)


def test_json_is_read_again(tmp_path):
    path = tmp_path / "talk.json"
    save(path)
    assert chat_files.load(path) == chat_files.Saved("be brief", TURNS, PARAMS)
    content = json.loads(path.read_text())
    assert content["messages"][0] == {"role": "system", "content": "be brief"}
    assert content["model"] == "stub"
    assert content["settings"]["temperature"] == 0.2
    assert "top_k" not in content["settings"]
    assert "漢字" in path.read_text(), "readable as it is"


def test_a_list_of_messages_is_read(tmp_path):
    path = tmp_path / "list.json"
    path.write_text('[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]')
    assert chat_files.load(path) == chat_files.Saved(None, [Turn("a", "b")], None)


def test_markdown_is_for_people(tmp_path):
    path = tmp_path / "talk.md"
    save(path)
    text = path.read_text()
    assert text.startswith("# Conversation with stub\n\n## System\n\nbe brief\n\n## User\n\nhello")
    assert text.endswith("```py\nx\n```\n")


def test_another_file_is_not_overwritten(tmp_path):
    path = tmp_path / "talk.json"
    path.write_text("mine")
    with pytest.raises(RequestError, match="exists"):
        save(path)
    assert path.read_text() == "mine"
    save(path, replace=True)
    assert chat_files.load(path).turns == TURNS


@pytest.mark.parametrize("name", ["talk.txt", "talk", "nosuch/talk.json", "."])
def test_what_cannot_be_written(tmp_path, name):
    with pytest.raises(RequestError) as error:
        save(tmp_path / name)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("3", "list of messages"),
        ('{"messages": 3}', "list of messages"),
        ("[3]", r"messages\[0\] must be an object"),
        ('[{"role": "user"}]', r"messages\[0\] must have a role and a content"),
        ('[{"role": "user", "content": [1]}]', "texts"),
        ('[{"role": "assistant", "content": "x"}]', r"messages\[0\].role must be 'user'"),
        (
            '[{"role": "system", "content": "x"}, {"role": "tool", "content": "x"}]',
            r"messages\[1\].role must be 'user', not 'tool'",
        ),
        ('[{"role": "user", "content": "x"}]', "has no answer"),
        ('{"messages": [], "settings": 3}', "settings must be"),
        ('{"messages": [], "settings": {"temprature": 1}}', "did you mean 'temperature'"),
        ('{"messages": [], "settings": {"temperature": 9}}', "temperature"),
    ],
)
def test_what_cannot_be_read(tmp_path, content, says):
    path = tmp_path / "x.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RequestError, match=says) as error:
        chat_files.load(path)
    assert "x.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_no_such_file(tmp_path):
    with pytest.raises(RequestError, match="No such file"):
        chat_files.load(tmp_path / "nosuch.json")
