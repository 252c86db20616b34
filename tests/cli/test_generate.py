"""`octavo generate` over a stand-in for the engine: what reaches it, and what is printed."""

import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main
from octavo.errors import ContextLengthError
from octavo.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from octavo.params import SamplingParams


class StandIn:
    """Answers every prompt with `<prompt>`, in capitals; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, SamplingParams]] = []
        self.checked: list[tuple[Any, SamplingParams]] = []
        self.loaded = 0
        self.error: str | None = None
        self.refusal: Exception | None = None

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(top_k=40, max_tokens=9)

    def encode(self, content: Any) -> Any:
        return content

    def fit(self, encoded: Any, params: SamplingParams) -> SamplingParams:
        return params

    def check(self, encoded: Any, params: SamplingParams) -> None:
        """The model is asked before it is loaded."""
        self.checked.append((encoded, params))
        if self.refusal:
            raise self.refusal

    def load(self) -> "StandIn":
        self.loaded += 1
        return self

    def generate(
        self, prompts: list[Any], params: list[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        self.asked += zip(prompts, params, strict=True)
        texts = [p if isinstance(p, str) else p[-1] for p in prompts]
        texts = [str(t["content"] if isinstance(t, dict) else t) for t in texts]
        return [
            output(*[text.upper()] * own.n, error=self.error)
            for text, own in zip(texts, params, strict=True)
        ]

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[RequestOutput]:
        self.asked.append((prompt, params))
        for piece in ("Hel", "lo"):
            yield output(piece, error=self.error)


def output(*texts: str, error: str | None = None) -> RequestOutput:
    choices = [CompletionOutput(i, text, [1, 2]) for i, text in enumerate(texts)]
    return RequestOutput("0", "prompt", [5, 6], choices, error=error)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr("octavo.cli.generate.prepare", lambda args: stand_in)
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
    assert [asked[0] for asked in engine.asked] == ["one", "two"]


def test_input_is_utf_8_in_every_locale(
    engine: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As Windows writes it: a byte order mark, and two characters at the end of a line."""
    data = "\ufeffça\r\nb\r\n".encode()
    (tmp_path / "prompts.txt").write_bytes(data)
    (tmp_path / "prompts.jsonl").write_bytes('\ufeff{"prompt": "ça"}\r\n'.encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))
    assert main(["generate"]) == 0
    assert main(["generate", "-f", str(tmp_path / "prompts.txt")]) == 0
    assert main(["generate", "-f", str(tmp_path / "prompts.jsonl")]) == 0
    assert [asked[0] for asked in engine.asked] == ["ça", "b", "ça", "b", "ça"]
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="ascii"))
    assert main(["generate"]) == 1
    assert capsys.readouterr().err == "octavo: standard input is not UTF-8: invalid start byte\n"


def test_prompts_come_from_standard_input(
    engine: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(monkeypatch, "first\n\nsecond\n")
    assert main(["generate"]) == 0
    assert [asked[0] for asked in engine.asked] == ["first", "second"]


def test_no_prompt_at_all(
    engine: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(monkeypatch, "\n  \n")
    assert main(["generate"]) == 1
    assert "no prompt" in capsys.readouterr().err
    assert engine.asked == []


def test_flags_override_the_model_s_defaults(engine: StandIn) -> None:
    main(["generate", "-p", "x", "--temperature", "0", "--stop", "END"])
    params = engine.asked[0][1]
    assert (params.temperature, params.stop) == (0.0, ("END",))
    assert params.top_k == 40, "the model's own default stands where nothing was given"
    assert params.max_tokens == 256, "the command's own default"


def test_chat_sends_messages(engine: StandIn) -> None:
    main(["generate", "--chat", "-p", "hi"])
    assert engine.asked[0][0] == [{"role": "user", "content": "hi"}]


def test_a_system_message_implies_chat(engine: StandIn) -> None:
    main(["generate", "--system", "be brief", "-p", "hi"])
    assert [message["role"] for message in engine.asked[0][0]] == ["system", "user"]


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
        (["-p", ""], "the prompt is empty"),
        (["--file", "x"], "--prompt and --file"),
        (["--jsonl"], "--prompt and --jsonl"),
        (["-o", "nowhere/x"], "--output nowhere/x cannot be written"),
    ],
)
def test_what_cannot_be_is_reported_before_the_model_loads(
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


LOGPROBS = {7: Logprob(-math.inf, 2, "x"), 8: Logprob(-0.5, 1, "y")}


def test_json_of_everything_that_an_answer_may_have(
    engine: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = RequestOutput(
        "0", "p", [5], [CompletionOutput(0, "y", [8], -0.5, [LOGPROBS], "length")], True,
        [None, LOGPROBS], 0, RequestMetrics(1.0, 2.0, 3.0, 4.0),
    )  # fmt: skip
    monkeypatch.setattr(engine, "generate", lambda *args, **options: [whole])
    assert main(["generate", "--json", "--logprobs", "1", "--prompt-logprobs", "1", "-p", "p"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["outputs"][0]["logprobs"] == [
        {
            "7": {"logprob": -9999.0, "rank": 2, "decoded_token": "x"},
            "8": {"logprob": -0.5, "rank": 1, "decoded_token": "y"},
        }
    ]
    assert line["prompt_logprobs"][0] is None
    assert line["metrics"]["first_scheduled_time"] == 2.0


def test_a_prompt_that_cannot_be_served_is_reported_before_the_load(
    engine: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.refusal = ContextLengthError("too long", "prompt")
    assert main(["generate", "-p", "x"]) == 1
    assert capsys.readouterr().err == "octavo: too long\n"
    assert engine.checked[0][1].max_tokens == 256
    assert engine.loaded == 0


def test_json_lines_go_in_and_come_out(
    engine: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "in.jsonl"
    lines = [
        {"prompt": "two\nlines", "temperature": 0, "max_tokens": 3, "id": "a"},
        {"messages": [{"role": "user", "content": "hi"}], "n": 2, "logit_bias": {"5": 1}},
        {"prompt": [1, 2]},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    out = tmp_path / "out.jsonl"
    assert main(["generate", "--file", str(file), "--top-k", "3", "-o", str(out)]) == 0
    assert capsys.readouterr().out == ""
    first, second, third = map(json.loads, out.read_text().splitlines())
    assert (first["id"], first["prompt"], first["outputs"][0]["text"]) == (
        "a", "two\nlines", "TWO\nLINES",
    )  # fmt: skip
    assert second["messages"] == lines[1]["messages"]
    assert len(second["outputs"]) == 2
    assert third["prompt"] == [1, 2]
    params = [asked[1] for asked in engine.asked]
    assert [p.temperature for p in params] == [0.0, 1.0, 1.0]
    assert [p.max_tokens for p in params] == [3, 256, 256]
    assert {p.top_k for p in params} == {3}
    assert params[1].logit_bias == {5: 1.0}


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        ([], ["a", "b", "---", "c"]),
        (["--separator", r"\n---\n"], ["a\nb", "c"]),
        (["--separator", ""], ["a\nb\n---\nc"]),
    ],
)
def test_prompts_of_several_lines_come_from_a_file(
    engine: StandIn, tmp_path: Path, argv: list[str], found: list[str]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a\nb\n---\nc\n")
    assert main(["generate", "-f", str(file), *argv]) == 0
    assert [asked[0] for asked in engine.asked] == found


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "not JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "either prompt or messages"),
        ('{"prompt": ""}', "the prompt is empty"),
        ('{"prompt": 5}', "text or token ids"),
        ('{"prompt": ["a"]}', "integers"),
        ('{"messages": "a"}', "a list of messages"),
        ('{"messages": ["a"]}', "messages[0]"),
        ('{"prompt": "a", "temprature": 1}', "did you mean 'temperature'"),
        ('{"prompt": "a", "temperature": 9}', "temperature"),
        ('{"prompt": "a", "logit_bias": {"a": 1}}', "logit_bias"),
    ],
)
def test_a_wrong_line_is_named_before_the_load(
    engine: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    line: str, word: str,
) -> None:  # fmt: skip
    say(monkeypatch, '{"prompt": "fine"}\n\n' + line + "\n")
    assert main(["generate", "--jsonl"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("octavo: line 3: ")
    assert word in error
    assert error.count("\n") == 1
    assert engine.loaded == 0
