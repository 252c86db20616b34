"""The commands of `octavo chat`."""

import pytest

from chat_stub import Stub
from octavo.cli.chat_commands import (
    COMMANDS,
    SETTINGS,
    Commands,
    settings_line,
    show_value,
    split,
)
from octavo.cli.chat_session import Session, Turn
from octavo.errors import RequestError
from octavo.params import SamplingParams


class Talk:
    """A session, its commands, and what they said."""

    def __init__(self, window=100):
        params = SamplingParams(max_tokens=None, temperature=0.8)
        self.session = Session(Stub(window), params)
        self.said = []
        self.commands = Commands(self.session, self.said.append)

    def run(self, line):
        self.said.clear()
        self.commands.run(*split(line))
        return "\n".join(self.said)

    def ask(self, text):
        return self.session.ask(text, lambda text: None)


@pytest.fixture
def talk():
    return Talk()


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("/help", ("/help", "")),
        ("/?", ("/help", "")),
        ("/reset", ("/clear", "")),
        ("/quit", ("/exit", "")),
        ("/set top_p 0.5 ", ("/set", "top_p 0.5")),
        ("/system be\nbrief", ("/system", "be\nbrief")),
        ("/system\nbe brief", ("/system", "be brief")),
        ("/rest", ("/rest", "")),
        ("/usr/bin/ls does what?", None),
        (" /help", None),
        ("hello /help", None),
        ("// a comment", None),
    ],
)
def test_what_is_a_command(line, want):
    assert split(line) == want


@pytest.mark.parametrize(("line", "near"), [("/rest", "/reset"), ("/stat", "/stats"), ("/?!", "")])
def test_unknown_commands_have_a_hint(talk, line, near):
    with pytest.raises(RequestError) as error:
        talk.run(line)
    assert f"no command {line!r}" in str(error.value)
    assert near in str(error.value)
    assert "/help" in str(error.value)


def test_what_takes_nothing_says_so(talk):
    with pytest.raises(RequestError, match="/clear takes nothing after it, not 'all'"):
        talk.run("/clear all")


def test_help_lists_every_command(talk):
    said = talk.run("/?")
    assert all(name in said for name in COMMANDS)
    assert '"""' in said


def test_system_shows_replaces_and_removes(talk):
    assert "no system message" in talk.run("/system")
    assert "be brief" in talk.run("/system be brief")
    talk.ask("hello")
    assert talk.session.backend.asked[-1][0] == {"role": "system", "content": "be brief"}
    talk.run('/system """\nbe\nlong\n"""')
    assert talk.session.system == "be\nlong"
    assert talk.session.turns == [Turn("hello", "hello")], "the conversation goes on"
    talk.run("/system none")
    assert talk.session.system is None


def test_clear_forgets_all_but_the_system_message(talk):
    talk.run("/system s")
    talk.ask("one")
    talk.run("/clear")
    talk.ask("two")
    assert [m["content"] for m in talk.session.backend.asked[-1]] == ["s", "two"]


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("temperature 0.2", "temperature", 0.2),
        ("top-p .5", "top_p", 0.5),
        ("seed -3", "seed", -3),
        ("seed none", "seed", None),
        ("max_tokens 30", "max_tokens", 30),
        ("stop END 'two words' \\n", "stop", ("END", "two words", "\n")),
        ("stop none", "stop", ()),
        ("stop_token_ids 2,7", "stop_token_ids", (2, 7)),
        ("logit_bias 15:-100", "logit_bias", {15: -100.0}),
        ("ignore_eos on", "ignore_eos", True),
        ("skip_special_tokens off", "skip_special_tokens", False),
        ("temperature default", "temperature", 0.8),
    ],
)
def test_set_changes_a_setting(talk, line, name, value):
    talk.session.set_params(talk.session.params.with_(temperature=0.1, seed=5), ())
    said = talk.run(f"/set {line}")
    assert getattr(talk.session.params, name) == value
    assert said.startswith(name)
    talk.ask("x")
    assert getattr(talk.session.backend.params[-1], name) == value


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("temprature 1", "did you mean 'temperature'"),
        ("temperature 9", r"temperature must be in \[0, 2\]"),
        ("temperature warm", "temperature: invalid float"),
        ("temperature 1 2", "one value"),
        ("temperature none", "no value none"),
        ("top_p 0", "top_p"),
        ("max_tokens 0", "max_tokens"),
        ("ignore_eos maybe", "on or off"),
        ("stop 'open", "closing quotation"),
        ("stop_token_ids x", "ids such as"),
        ("bad_words refused", "the stub refuses"),
        ("n 2", "of no use"),
        ("logprobs 1", "of no use"),
    ],
)
def test_set_explains_what_is_wrong(talk, line, says):
    before = talk.session.params
    with pytest.raises(RequestError, match=says) as error:
        talk.run(f"/set {line}")
    assert "\n" not in str(error.value)
    assert talk.session.params == before


def test_set_shows_all_or_one(talk):
    assert len(talk.run("/set").splitlines()) == len(SETTINGS)
    assert talk.run("/set temperature").split()[:2] == ["temperature", "0.8"]


def test_settings_in_one_line():
    params = SamplingParams(max_tokens=9, temperature=0.0, stop=["a b"], ignore_eos=True)
    chat = Session(Stub(), params, given=["top_p"])
    assert settings_line(chat) == (
        "temperature 0.0, top_p 1.0, stop 'a b', ignore_eos on, max_tokens 9"
    )
    assert show_value({3: 0.5}) == "3:0.5"


def test_stats(talk):
    assert "100 tokens" in talk.run("/stats")
    for _ in range(9):
        talk.ask("!20")
    said = talk.run("/stats")
    assert "9, 180 tokens generated" in said
    assert "20 tokens" in said
    assert "of 100 tokens used" in said
    assert f"the oldest {talk.session.first} turns" in said


def test_save_and_load(talk, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match="nothing to save"):
        talk.run("/save talk.json")
    with pytest.raises(RequestError, match="needs the name of a file"):
        talk.run("/save")
    talk.run("/system s")
    talk.run("/set seed 3")
    talk.ask("one")
    assert "1 turn written" in talk.run("/save talk.json")
    talk.ask("two")
    talk.run("/save talk.json")  # its own file
    talk.run("/save my talk.md")
    other = Talk()
    with pytest.raises(RequestError, match=r"other\.json"):
        other.run("/load other.json")
    other.ask("zero")
    other.run("/load talk.json")
    assert other.session.turns == talk.session.turns
    assert (other.session.system, other.session.params.seed) == ("s", 3)
    with pytest.raises(RequestError, match="exists"):
        other.run("/save my talk.md")
    other.run("/save talk.json")


def test_load_of_a_conversation_longer_than_the_window(talk, tmp_path):
    talk.session.restore([Turn("x " * 20, "y " * 20)] * 5)
    talk.run(f"/save {tmp_path / 'long.json'}")
    other = Talk(50)
    other.run(f"/load {tmp_path / 'long.json'}")
    other.ask("hi")
    assert other.session.first == 5


def test_completion(talk, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talk.json").touch()
    (tmp_path / "folder").mkdir()
    complete = lambda text: list(talk.commands.complete(text))  # noqa: E731
    assert complete("/s") == [("/system", 2), ("/set", 2), ("/stats", 2), ("/save", 2)]
    assert complete("/set top") == [("top_p", 3), ("top_k", 3)]
    assert complete("/load t") == [("talk.json", 1)]
    assert complete("/load f") == [("folder/", 1)]
    assert complete("/load nosuch/") == complete("hello") == complete("/help x") == []
