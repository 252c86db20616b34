"""`octavo chat` with piped input: turns, commands, what goes to which stream."""

import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from chat_stub import Stub
from octavo.cli.main import main
from octavo.errors import EngineDeadError


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Stub]]:
    """Run a chat with these lines on standard input."""

    def run(
        text: str, *flags: str, window: int = 100, stub: Stub | None = None
    ) -> tuple[int, Stub]:
        backend = stub or Stub(window)
        monkeypatch.setattr("octavo.cli.chat.open_backend", lambda args: backend)
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        return main(["chat", *flags]), backend

    return run


Piped = Callable[..., tuple[int, Stub]]


def test_only_answers_go_to_standard_output(
    piped: Piped, capsys: pytest.CaptureFixture[str]
) -> None:
    status, stub = piped("hello\n\n\nagain\n", "--system", "be brief")
    assert status == 0
    out, err = capsys.readouterr()
    assert out == "hello\nagain\n"
    assert err == ""
    assert [m["role"] for m in stub.asked[1]] == ["system", "user", "assistant", "user"]


def test_long_lines_are_not_wrapped_in_a_pipe(
    piped: Piped, capsys: pytest.CaptureFixture[str]
) -> None:
    piped("!say " + "word " * 60, window=1000)
    assert capsys.readouterr().out.count("\n") == 1


def test_a_block_is_one_message(piped: Piped) -> None:
    _, stub = piped('"""\ndef f():\n    pass\n"""\nfirst\\\nsecond\n')
    assert [asked[-1]["content"] for asked in stub.asked] == ["def f():\n    pass", "first\nsecond"]


def test_exit_ends_at_once(piped: Piped) -> None:
    for name in ("/exit", "/quit", "/bye"):
        status, stub = piped(f"{name}\nnever read\n")
        assert (status, stub.asked) == (0, [])


def test_commands_are_not_sent(piped: Piped, capsys: pytest.CaptureFixture[str]) -> None:
    _, stub = piped("/rest\n/?\n/set temprature 1\n")
    error = capsys.readouterr().err
    assert "no command '/rest'; did you mean '/reset'?" in error
    assert "did you mean 'temperature'?" in error
    assert "/regenerate" in error
    assert stub.asked == []


def test_regenerate(piped: Piped, capsys: pytest.CaptureFixture[str]) -> None:
    _, stub = piped("/regenerate\nhello\n/regenerate\n/regenerate now\n", "--temperature", "0")
    out, err = capsys.readouterr()
    assert out == "hello\nhello\n"
    assert len(stub.asked[1]) == 1
    assert "no answer to replace" in err
    assert "at temperature 0 the answer is the same" in err
    assert "takes nothing after it" in err


def test_it_is_said_where_an_answer_was_cut(
    piped: Piped, capsys: pytest.CaptureFixture[str]
) -> None:
    piped("!9\n", "--max-tokens", "3")
    assert "(cut at 3 tokens; /set max_tokens changes that)" in capsys.readouterr().err
    piped("!900\n")
    assert "(cut: the window of 100 tokens is full)" in capsys.readouterr().err
    piped("!9\n")
    assert capsys.readouterr().err == ""


def test_dropped_turns_are_reported_once(piped: Piped, capsys: pytest.CaptureFixture[str]) -> None:
    piped("x x x x x x x x x x\n" * 20 + "/stats\n/clear\n" + "x x x x x x x x x x\n" * 9)
    err = capsys.readouterr().err
    assert err.count("no longer sent to the model") == 2, "once for each conversation"
    assert "dropped      the oldest" in err


def test_a_message_that_does_not_fit_is_left_out(
    piped: Piped, capsys: pytest.CaptureFixture[str]
) -> None:
    status, stub = piped("one\n" + "x " * 200 + "\ntwo\n")
    out, err = capsys.readouterr()
    assert (status, out) == (0, "one\ntwo\n")
    assert "the message has" in err
    assert err.count("\n") == 1
    assert len(stub.asked[-1]) == 3


def test_an_answer_that_fails_ends_its_line(
    piped: Piped, capsys: pytest.CaptureFixture[str]
) -> None:
    assert piped("!fail now\nhello\n")[0] == 0
    out, err = capsys.readouterr()
    assert out == "!fail\nhello\n"
    assert err == "octavo: this answer was told to fail\n"


def test_a_dead_engine_ends_the_chat(piped: Piped, capsys: pytest.CaptureFixture[str]) -> None:
    stub = Stub()
    stub.fault = EngineDeadError("out of memory")
    assert piped("hello\nagain\n", stub=stub)[0] == 1
    assert "the engine is dead: out of memory" in capsys.readouterr().err
    assert len(stub.asked) == 1


def test_ctrl_c_stops_an_answer_and_keeps_it(
    piped: Piped, capsys: pytest.CaptureFixture[str]
) -> None:
    stub = Stub()
    stub.fault = KeyboardInterrupt()
    assert piped("hello there\n", stub=stub)[0] == 0
    out, err = capsys.readouterr()
    assert out == "hello\n"
    assert "(stopped; the partial answer is kept)" in err
    assert stub.closed == 1


def test_ctrl_c_before_an_answer_does_not_leave(
    piped: Piped, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = Stub()
    prepare = stub.prepare

    def interrupted(messages: list[Any]) -> Any:
        if messages[-1]["content"] == "now":
            raise KeyboardInterrupt
        return prepare(messages)

    monkeypatch.setattr(stub, "prepare", interrupted)
    assert piped("now\nhello\n", stub=stub)[0] == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("hello\n", "(stopped)\n")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--n", "2"], "--n 2"),
        (["--logprobs", "3"], "--logprobs 3"),
        (["--temperature", "nan"], "temperature"),
        (["--min-tokens", "9", "--max-tokens", "3"], "min_tokens"),
    ],
)
def test_what_cannot_be_is_reported_before_the_model_loads(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    says: str,
) -> None:
    monkeypatch.setattr("octavo.cli.chat.open_backend", lambda args: pytest.fail("it was loaded"))
    assert main(["chat", *flags]) == 1
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--system", "x " * 200], "the system message leaves no room"),
        (["--bad-words", "refused"], "the stub refuses"),
    ],
)
def test_what_the_model_s_description_forbids_is_reported_before_it_loads(
    piped: Piped, capsys: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    status, stub = piped("hello\n", *flags)
    assert (status, stub.loaded) == (1, False)
    assert says in capsys.readouterr().err


def test_bytes_that_are_no_text_do_not_end_the_chat() -> None:
    done = subprocess.run(
        [sys.executable, "tests/chat_stub.py"],
        input=b"\xff hello\n", capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == "\ufffd hello\n"


def test_help_needs_neither_the_editor_nor_torch() -> None:
    code = (
        "import sys; from octavo.cli.main import command_parser; command_parser('chat')\n"
        "print([m for m in ('prompt_toolkit', 'wcwidth', 'torch', 'jinja2') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
