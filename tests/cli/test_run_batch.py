"""`octavo run-batch` over an engine that does what prompts say: answers, bad lines, resuming."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tool_model
from fake_engine import EXECUTOR
from octavo.cli import run_batch
from octavo.cli.main import command_parser, main
from octavo.errors import ConfigError, OctavoError
from serving import PYTHONPATH, write_model

Run = Callable[..., int]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "scripted")


@pytest.fixture
def run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run a batch of these lines, from in.jsonl to out.jsonl; returns the exit code."""
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)

    def run(*lines: object, flags: tuple[str, ...] = ()) -> int:
        write(tmp_path / "in.jsonl", *lines)
        argv = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
        argv += ["--model", str(model), "--swap-space", "0", "--no-load-progress", *flags]
        return run_batch.run(command_parser("run-batch").parse(argv), EXECUTOR)

    return run


def write(path: Path, *lines: object) -> None:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))


def chat(name: str, text: str = "hi", **body: object) -> dict[str, object]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def completion(name: str, prompt: object = "hi", **body: object) -> dict[str, object]:
    body = {"prompt": prompt, "max_tokens": 4, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


def answers(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]


def test_each_line_has_its_answer_and_a_bad_line_ends_nothing(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(
        completion("a"),
        chat("b", model="scripted"),
        "{",
        "",
        completion("c", temperature=9),
        completion("a"),
        {**completion("d"), "url": "/v1/embeddings"},
        chat("e", model="another"),
        chat("f", stream=True),
        completion("g", [1, 2], n=2, logprobs=1),
    )
    found = {line["custom_id"]: line for line in answers(tmp_path) if line["custom_id"]}
    assert set(found) == set("abcdefg")
    assert set(found["a"]) == {"id", "custom_id", "response", "error"}
    assert found["a"]["error"] is None
    reply = found["a"]["response"]
    assert (reply["status_code"], reply["body"]["choices"][0]["text"]) == (200, "abcd")
    assert reply["request_id"]
    assert found["b"]["response"]["body"]["choices"][0]["message"]["content"] == "abcd"
    assert len(found["g"]["response"]["body"]["choices"]) == 2
    bad = found["c"]
    assert bad["response"]["status_code"] == 400
    assert "temperature" in bad["response"]["body"]["error"]["message"]
    assert bad["error"]["message"] == bad["response"]["body"]["error"]["message"]
    assert found["e"]["response"]["status_code"] == 404
    assert found["d"]["response"] is None
    assert "line 7: url must be one of" in found["d"]["error"]["message"]
    assert "stream" in found["f"]["error"]["message"]
    nameless = [line["error"]["message"] for line in answers(tmp_path) if not line["custom_id"]]
    assert sorted(message.split(":")[0] for message in nameless) == ["line 3", "line 6"]
    assert any("'a' is given twice" in message for message in nameless)
    assert code == 1
    assert "9 answered now" in capsys.readouterr().err


def test_a_second_run_asks_only_what_has_no_answer(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [completion("a"), "{", completion("b"), completion("c")]
    run(*lines[:2])
    out = tmp_path / "out.jsonl"
    whole = out.read_bytes()
    out.write_bytes(whole + b'{"id": "batch_req_1", "custom_id": "b", "resp')
    assert run(*lines) == 1, "a line of the run before has failed"
    assert out.read_bytes().startswith(whole)
    names = [line["custom_id"] for line in answers(tmp_path)]
    assert sorted(map(str, names)) == ["None", "a", "b", "c"]
    assert "2 answered now, 2 answered before" in capsys.readouterr().err
    monkeypatch.setattr("octavo.server.batch.batch_engine", None)  # no engine is started
    before = out.read_bytes()
    run(*lines)
    assert out.read_bytes() == before
    monkeypatch.undo()


def test_overwrite_begins_anew(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("not ours\n")
    with pytest.raises(ConfigError, match=r"line 1 of the output file.*--overwrite"):
        run(completion("a"))
    assert out.read_text() == "not ours\n"
    assert run(completion("a"), flags=("--overwrite",)) == 0
    assert [line["custom_id"] for line in answers(tmp_path)] == ["a"]


def test_an_input_that_changed_is_answered_too(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(completion("a"), completion("b")) == 0
    assert run(completion("c"), completion("b")) == 0
    assert sorted(line["custom_id"] for line in answers(tmp_path)) == ["a", "b", "c"]
    assert "1 answered now, 1 answered before" in capsys.readouterr().err


def test_a_line_longer_than_any_request_is_one_error(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_batch, "_MAX_LINE", 1 << 20)
    long = completion("a", "x" * (5 << 20))
    for _ in range(2):  # the second run finds all answered
        assert run(long, "{", completion("b")) == 1
        errors = [line["error"] for line in answers(tmp_path)]
        assert [error and error["message"][:20] for error in errors] == [
            "line 1: longer than ", "line 2: not JSON: Ex", None
        ]  # fmt: skip


def test_a_full_disk_keeps_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        if len(data) < 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data[: len(data) - 4])

    with run_batch.open_output(tmp_path / "out") as out:
        run_batch.append(out, b"whole\n")
        monkeypatch.setattr(os, "write", write)
        with pytest.raises(ConfigError, match="No space left on device; its answers are kept"):
            run_batch.append(out, b"does not fit\n")
    assert (tmp_path / "out").read_bytes() == b"whole\n"


@pytest.mark.parametrize("flag", ["-i", "-o"])
def test_files_that_cannot_be_read_again_are_refused(run: Run, tmp_path: Path, flag: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("/dev/null", str(tmp_path / "pipe"), str(tmp_path)):
        with pytest.raises(ConfigError, match="is no regular file"):
            run(completion("a"), flags=(flag, name))


def test_a_batch_may_have_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    folder = tool_model.write(tmp_path / "hermes")
    said = f"say [{tool_model.ids(folder, tool_model.call())}]"
    asked = {"tools": tool_model.TOOLS, "max_tokens": 200}
    write(tmp_path / "in.jsonl", chat("a", said, **asked), chat("b", **asked, tool_choice="some"))
    argv = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"),
            "--model", str(folder), "--swap-space", "0", "--max-model-len", "2048",
            "--tool-call-parser", "hermes", "--no-load-progress"]  # fmt: skip
    assert run_batch.run(command_parser("run-batch").parse(argv), EXECUTOR) == 1
    called, refused = sorted(answers(tmp_path), key=lambda answer: str(answer["custom_id"]))
    choice = called["response"]["body"]["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == tool_model.ROME
    assert refused["response"]["body"]["error"]["param"] == "tool_choice"


def test_an_engine_that_dies_costs_no_answer(run: Run, tmp_path: Path) -> None:
    with pytest.raises(OctavoError, match="engine"):
        run(completion("a"), completion("b", "!kill"), flags=("--max-num-seqs", "1"))
    assert "b" not in [line["custom_id"] for line in answers(tmp_path)]
    assert run(completion("a"), completion("b")) == 0
    assert sorted(line["custom_id"] for line in answers(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["-i", "missing.jsonl", "-o", "out"], "--input-file missing.jsonl cannot be read"),
        (["-i", "in", "-o", "nowhere/out"], "--output-file nowhere/out cannot be written"),
        (["-i", "in", "-o", "in", "--overwrite"], "--output-file is the input file"),
        (["-i", "in", "-o", "kept", "--overwrite", "--scheduler", "no:No"], "no:No"),
        (["-i", "in", "-o", "out", "--scheduler", "adaptiv"], "unknown scheduler"),
        (["-i", "in", "-o", "out", "--chat-template", "x.jinja"], "x.jinja"),
    ],
)
def test_a_mistake_is_reported_before_an_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    argv: list[str], word: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in", completion("a"))
    (tmp_path / "kept").write_text("answers\n")
    monkeypatch.setattr("octavo.server.batch.batch_engine", None)
    assert main(["run-batch", *argv]) == 1
    error = capsys.readouterr().err
    assert word in error
    assert error.count("\n") == 1
    assert (tmp_path / "in").read_bytes().count(b"\n") == 1
    assert (tmp_path / "kept").read_bytes() == b"answers\n"


def test_two_runs_never_write_to_one_file(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        run_batch.open_output(out),
        pytest.raises(ConfigError, match="another run-batch"),
        run_batch.open_output(out),
    ):
        pass


# Runs a batch over the fake engine, as the fixture does.
CHILD = """
import sys
from octavo.cli import run_batch
from octavo.cli.main import command_parser
sys.exit(run_batch.run(command_parser("run-batch").parse(sys.argv[1:]), "fake_engine:create"))
"""


@pytest.mark.slow
def test_killed_in_the_middle_and_run_again_all_is_there_once(model: Path, tmp_path: Path) -> None:
    count = 400
    write(tmp_path / "in.jsonl", *[completion(f"r{i}", f"!slow {i}") for i in range(count)])
    out = tmp_path / "out.jsonl"
    argv = ["-i", str(tmp_path / "in.jsonl"), "-o", str(out), "--model", str(model)]
    argv += ["--swap-space", "0", "--max-num-seqs", "4"]
    command = [sys.executable, "-c", CHILD, *argv]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    for wanted in (20, 60):
        with subprocess.Popen(command, env=environment) as process:
            while not out.exists() or out.read_bytes().count(b"\n") < wanted:
                assert process.poll() is None
            process.send_signal(signal.SIGKILL)
        assert len(out.read_bytes().splitlines()) < count
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    names = [line["custom_id"] for line in answers(tmp_path)]
    assert len(names) == count
    assert set(names) == {f"r{i}" for i in range(count)}
