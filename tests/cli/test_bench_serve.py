"""`octavo bench serve` against Octavo's own server, over an engine that does what prompts say."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.cli import bench_serve
from octavo.cli.main import main
from serving import PYTHONPATH, Server, write_model

KEY = "secret"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_model(tmp_path_factory.mktemp("models") / "scripted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHONPATH)  # the engine process finds the tests' executor
        with Server(
            folder, {"api_key": (KEY,), "served_model_name": ("m",)}, max_num_seqs=8
        ) as running:
            yield running


def prompts(path: Path, *lines: object) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def bench(server: Server, *flags: str) -> int:
    common = ["--base-url", server.url, "--api-key", KEY, "--tokenizer", str(server.folder)]
    return main(["bench", "serve", *common, *flags])


def test_random_prompts_are_answered_and_saved_with_vllms_keys(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--num-prompts", "6", "--random-input-len", "20", "--random-output-len", "5",
             "--ignore-eos", "--max-concurrency", "4", "--num-warmups", "2",
             "--ready-check-timeout-sec", "20", "--goodput", "ttft:60000", "--metadata", "who=me",
             "--metric-percentiles", "50,99", "--save-detailed", "--result-dir", str(tmp_path),
             "--result-filename", "run.json"]  # fmt: skip
    assert bench(server, *flags) == 0
    saved = json.loads((tmp_path / "run.json").read_text())
    assert (saved["completed"], saved["failed"], saved["num_prompts"]) == (6, 0, 6)
    assert (saved["total_input_tokens"], saved["total_output_tokens"]) == (120, 30)
    assert (saved["model_id"], saved["backend"], saved["who"]) == ("m", "openai", "me")
    assert (saved["request_rate"], saved["max_concurrency"]) == ("inf", 4)
    assert saved["request_goodput"] == saved["request_throughput"] > 0
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for key in ("mean", "median", "std", "p50", "p99"):
            assert saved[f"{key}_{metric}_ms"] >= 0
    assert saved["output_lens"] == [5] * 6
    assert saved["max_concurrent_requests"] <= 4
    for sent, ttft, gaps in zip(saved["start_times"], saved["ttfts"], saved["itls"], strict=True):
        assert 0 <= sent <= sent + ttft + sum(gaps) <= saved["duration"]
    assert "Successful requests:                     6" in capsys.readouterr().out


def test_chat_and_appended_results(server: Server, tmp_path: Path) -> None:
    path = prompts(tmp_path / "in.jsonl", {"prompt": "hello"})
    flags = ["--backend", "openai-chat", "--dataset-name", "custom", "--dataset-path", path,
             "--num-prompts", "2", "--output-len", "4", "--append-result", "--label", "mine",
             "--skip-chat-template", "--trust-remote-code",
             "--result-dir", str(tmp_path), "--result-filename", "all.jsonl"]  # fmt: skip
    assert bench(server, *flags) == 0
    assert bench(server, *flags) == 0
    first, second = map(json.loads, (tmp_path / "all.jsonl").read_text().splitlines())
    assert first["total_output_tokens"] == second["total_output_tokens"] == 8
    assert first["label"] == "mine"
    assert "ttfts" not in first


def test_failures_are_counted_by_kind(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end_early = {"prompt": server.say("ABC"), "output_tokens": 9}
    lines = [{"prompt": "whole"}, {"prompt": "!fail"}, {"prompt": "x" * 600}, end_early]
    path = prompts(tmp_path / "in.jsonl", *lines)
    flags = ["--dataset-name", "custom", "--dataset-path", path, "--num-prompts", "4",
             "--custom-output-len", "3"]  # fmt: skip
    assert bench(server, *flags) == 1
    shown = capsys.readouterr()
    assert "Successful requests:                     2" in shown.out
    assert "  error event:                           1" in shown.out
    assert "  HTTP 400:                              1" in shown.out
    assert "HTTP 400: " in shown.err


def test_a_key_and_the_model_are_needed(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["bench", "serve", "--base-url", server.url, "--num-prompts", "1", "--input-len", "5",
            "--output-len", "2"]  # fmt: skip
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert main(line) == 1
    assert "/v1/models answers 401" in capsys.readouterr().err
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert main(line) == 1
    assert "name one with --tokenizer" in capsys.readouterr().err
    tokenizer = ["--model", str(server.folder), "--served-model-name", "m"]
    assert main([*line, *tokenizer]) == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--num-prompts", "0"], "--num-prompts must be at least 1, not 0"),
        (["--dataset-name", "custom"], "needs --dataset-path"),
        (["--dataset-path", "x"], "add --dataset-name custom"),
        (["--dataset-name", "custom", "--dataset-path", "/nosuch"], "no such file"),
        (["--random-output-len", "0"], "--random-output-len must be at least 1, not 0"),
        (["--backend", "openai", "--endpoint", "/v1/chat/completions"], "does not go with"),
        (["--endpoint", "/v1/embeddings"], "--endpoint must be a path such as"),
        (["--request-rate", "0"], "request_rate must be above 0"),
        (["--burstiness", "0"], "burstiness must be above 0"),
        (["--max-concurrency", "0"], "max_concurrency must be at least 1"),
        (["--goodput", "itl:3"], "goodput must be pairs"),
        (["--percentile-metrics", "ttfs"], "did you mean 'ttft'"),
        (["--metric-percentiles", "x"], "such as 50,90,99"),
        (["--metadata", "x"], "--metadata must be NAME=VALUE"),
        (["--header", "x", "--model", "m"], "--header must be NAME=VALUE"),
        (["--base-url", "nowhere"], "base-url must be such as"),
        (["--extra-body", "[1]", "--model", "m"], "--extra-body must be a JSON object"),
        (["--save-result", "--result-dir", "/dev/null/x", "--model", "m"], "--result-dir"),
    ],
)
def test_mistakes_are_reported_before_anything_is_sent(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *flags]) == 1
    assert says in capsys.readouterr().err


def test_the_endpoint_says_which_interface_it_is() -> None:
    assert bench_serve.interface(None, "/api/v1/chat/completions")[0] == "openai-chat"
    assert bench_serve.interface(None, None) == ("openai", "/v1/completions")
    assert bench_serve.interface("openai-chat", None)[1] == "/v1/chat/completions"
