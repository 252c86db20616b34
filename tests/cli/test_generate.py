"""`octavo generate` over a stand-in for the engine: what reaches it, and what is printed."""

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.cli.main import main
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.params import SamplingParams


class StandIn:
    """Answers every prompt with `<prompt>`, in capitals; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any, SamplingParams]] = []
        self.error: str | None = None

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(top_k=40, max_tokens=9)

    def generate(
        self, prompts: list[Any], params: SamplingParams, use_tqdm: bool
    ) -> list[RequestOutput]:
        return self._answers("generate", prompts, params)

    def chat(
        self, prompts: list[Any], params: SamplingParams, use_tqdm: bool
    ) -> list[RequestOutput]:
        return self._answers("chat", prompts, params)

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[RequestOutput]:
        self.asked.append(("stream", prompt, params))
        for piece in ("Hel", "lo"):
            yield output(piece, error=self.error)

    def _answers(self, how: str, prompts: list[Any], params: SamplingParams) -> list[RequestOutput]:
        self.asked.append((how, prompts, params))
        texts = [p if isinstance(p, str) else p[-1]["content"] for p in prompts]
        return [output(*[text.upper()] * params.n, error=self.error) for text in texts]


def output(*texts: str, error: str | None = None) -> RequestOutput:
    choices = [CompletionOutput(i, text, [1, 2]) for i, text in enumerate(texts)]
    return RequestOutput("0", "prompt", [5, 6], choices, error=error)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr("octavo.cli.generate.start", lambda args: stand_in)
    return stand_in


def say(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Put `text` on standard input."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_one_prompt_prints_the_answer_alone(
    engine: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "-p", "hello"]) == 0
    assert capsys.readouterr().out == "HELLO\n"


def test_several_prompts_are_named_and_go_together(
    engine: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "-p", "one", "--prompt", "two"]) == 0
    assert capsys.readouterr().out == "\n>>> one\nONE\n\n>>> two\nTWO\n"
    assert [asked[:2] for asked in engine.asked] == [("generate", ["one", "two"])]


def test_prompts_come_from_standard_input(
    engine: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(monkeypatch, "first\n\nsecond\n")
    assert main(["generate"]) == 0
    assert engine.asked[0][1] == ["first", "second"]


def test_no_prompt_at_all(
    engine: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(monkeypatch, "\n  \n")
    assert main(["generate"]) == 1
    assert "no prompt" in capsys.readouterr().err
    assert engine.asked == []


def test_flags_override_the_model_s_defaults(engine: StandIn) -> None:
    main(["generate", "-p", "x", "--temperature", "0", "--stop", "END"])
    params = engine.asked[0][2]
    assert (params.temperature, params.stop) == (0.0, ("END",))
    assert params.top_k == 40, "the model's own default stands where nothing was given"
    assert params.max_tokens == 256, "the command's own default"


def test_chat_sends_messages(engine: StandIn) -> None:
    main(["generate", "--chat", "-p", "hi"])
    assert engine.asked[0][:2] == ("chat", [[{"role": "user", "content": "hi"}]])


def test_a_system_message_implies_chat(engine: StandIn) -> None:
    main(["generate", "--system", "be brief", "-p", "hi"])
    roles = [message["role"] for message in engine.asked[0][1][0]]
    assert (engine.asked[0][0], roles) == ("chat", ["system", "user"])


def test_stream_prints_the_pieces(engine: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--stream", "-p", "x"]) == 0
    assert capsys.readouterr().out == "Hello\n"


def test_n_answers_are_numbered(engine: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", "-p", "x", "--n", "2"])
    assert capsys.readouterr().out == "[0]\nX\n[1]\nX\n"


def test_json_is_one_object_per_prompt(engine: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", "-p", "one", "-p", "two", "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["one", "two"]
    assert [line["outputs"][0]["text"] for line in lines] == ["ONE", "TWO"]
    assert lines[0]["rendered"] == "prompt"


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--stream", "--json"], "--json"),
        (["--stream", "--n", "2"], "--n 2"),
        (["--temperature", "nan"], "temperature"),
        (["--min-tokens", "9", "--max-tokens", "3"], "min_tokens"),
    ],
)
def test_what_cannot_be_is_told_before_the_model_loads(
    engine: StandIn, argv: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "-p", "x", *argv]) == 1
    error = capsys.readouterr().err
    assert word in error
    assert error.count("\n") == 1
    assert engine.asked == []


def test_a_failed_request_is_an_error(engine: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    engine.error = "logits are not finite"
    assert main(["generate", "--stream", "-p", "x"]) == 1
    assert "logits are not finite" in capsys.readouterr().err
    assert main(["generate", "-p", "x"]) == 1
