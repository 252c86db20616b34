"""`octavo chat` over a stand-in for the engine: turns, commands, Ctrl-C."""

import builtins
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.cli.chat import Conversation
from octavo.cli.main import main
from octavo.errors import ContextLengthError
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.params import SamplingParams


class StandIn:
    """Streams "Hi", " there"; remembers the messages, and whether a stream was closed early."""

    def __init__(self) -> None:
        self.asked: list[list[Any]] = []
        self.closed = 0
        self.fault: BaseException | None = None

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams()

    def stream(self, messages: list[Any], params: SamplingParams) -> Iterator[RequestOutput]:
        self.asked.append([dict(message) for message in messages])
        try:
            yield piece("Hi")
            if self.fault:
                raise self.fault
            yield piece(" there")
        finally:
            self.closed += 1


def piece(text: str) -> RequestOutput:
    return RequestOutput("0", None, [], [CompletionOutput(0, text, [1])])


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr("octavo.cli.chat.start", lambda args: stand_in)
    return stand_in


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """Let the user type these lines, or press Ctrl-C; then the input ends."""
    waiting = iter([*lines, EOFError])

    def read(prompt: str = "") -> str:
        line = next(waiting)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(builtins, "input", read)


def test_turns_build_the_conversation(
    engine: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "hello", "", "again")
    assert main(["chat", "--system", "be brief"]) == 0
    assert capsys.readouterr().out == "Hi there\nHi there\n"
    assert [[m["role"] for m in asked] for asked in engine.asked] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
    ]
    assert engine.asked[1][2]["content"] == "Hi there"


def test_reset_forgets_all_but_the_system_message(
    engine: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "one", "/reset", "two")
    main(["chat", "--system", "s"])
    assert [m["content"] for m in engine.asked[1]] == ["s", "two"]


def test_exit_ends_at_once(engine: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, "/exit", "never read")
    assert main(["chat"]) == 0
    assert engine.asked == []


def test_an_unknown_command_is_not_sent(
    engine: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "/rest", "/help")
    main(["chat"])
    error = capsys.readouterr().err
    assert "no command '/rest'; did you mean '/reset'?" in error
    assert "/exit" in error
    assert engine.asked == []


def test_ctrl_c_stops_an_answer_and_keeps_it(
    engine: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = Conversation(engine, SamplingParams(), None)  # type: ignore[arg-type]
    engine.fault = KeyboardInterrupt()
    chat.turn("tell me")
    assert chat.messages[-1] == {"role": "assistant", "content": "Hi"}
    assert "(stopped)" in capsys.readouterr().err
    assert engine.closed == 1, "the request must be aborted"


def test_ctrl_c_between_two_tokens_aborts_the_request(
    engine: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = []
    stream = engine.stream
    monkeypatch.setattr(engine, "stream", lambda *args: streams.append(stream(*args)) or streams[0])

    def interrupted(*args: object, **options: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    chat = Conversation(engine, SamplingParams(), None)  # type: ignore[arg-type]
    monkeypatch.setattr(builtins, "print", interrupted)
    chat.turn("tell me")
    assert engine.closed == 1, "someone else still holds the stream, so it must be closed by name"


def test_ctrl_c_at_the_prompt_does_not_leave(
    engine: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, KeyboardInterrupt, "hello")
    assert main(["chat"]) == 0
    assert len(engine.asked) == 1
    assert "/exit" in capsys.readouterr().err


def test_a_message_that_does_not_fit_is_left_out(
    engine: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = Conversation(engine, SamplingParams(), None)  # type: ignore[arg-type]
    engine.fault = ContextLengthError("the prompt has 9000 tokens, the window 8192")
    chat.turn("too long")
    assert chat.messages == []
    assert "9000" in capsys.readouterr().err


def test_two_answers_at_once_are_refused(
    engine: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "--n", "2"]) == 1
    assert "--n 2" in capsys.readouterr().err
