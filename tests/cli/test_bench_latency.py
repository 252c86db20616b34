"""`octavo bench latency` and `throughput` end to end, over an engine without weights."""

import json
from pathlib import Path

import pytest

import kit
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.core.plan import RunnerLimits
from octavo.engine.fake import FakeRunner
from octavo.text.tokenizer import load_tokenizer


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """The options with which the engine was made."""
    from octavo import llm

    found: dict = {}

    def make(**options: object) -> llm.LLM:
        found.update(options)
        vocab = kit.write_tokenizer(tmp_path / "toy")
        runner = FakeRunner(RunnerLimits(400, 16, 1, 512, vocab))
        config = EngineConfig(enable_prefix_caching=False)
        return over(runner, load_tokenizer(tmp_path / "toy"), config)

    over = llm.LLM.over
    monkeypatch.setattr(llm, "LLM", make)
    return found


def test_latency(asked: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--input-len", "6", "--output-len", "4", "--batch-size", "2", "--num-iters", "3",
             "--num-iters-warmup", "1", "--output-json", str(tmp_path / "out.json"),
             "--max-num-seqs", "2"]  # fmt: skip
    assert main(["bench", "latency", "toy", *flags]) == 0
    saved = json.loads((tmp_path / "out.json").read_text())
    assert len(saved["latencies"]) == 3
    assert set(saved["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert "Avg latency: " in capsys.readouterr().out
    assert (asked["model"], asked["max_num_seqs"]) == ("toy", 2)
    assert asked["enable_prefix_caching"] is False


def test_throughput(asked: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-prompts", "3", "--input-len", "12", "--output-len", "5", "--output-json",
             str(tmp_path / "out.json"), "--disable-detokenize"]  # fmt: skip
    assert main(["bench", "throughput", "toy", *flags]) == 0
    saved = json.loads((tmp_path / "out.json").read_text())
    assert (saved["num_requests"], saved["total_num_tokens"]) == (3, 3 * 17)
    assert "Total num output tokens:  15" in capsys.readouterr().out
    assert "enable_prefix_caching" not in asked


def test_throughput_of_several_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Over processes; no more at once than their queues take."""
    from octavo import async_llm
    from serving import PYTHONPATH, write_model

    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    folder, made = write_model(tmp_path / "toy"), []

    class Scripted(async_llm.AsyncLLM):
        def _start(self, config: EngineConfig, executor: str) -> None:
            made.append(self)
            super()._start(config, "fake_engine:create")

    monkeypatch.setattr(async_llm, "AsyncLLM", Scripted)
    flags = ["--num-prompts", "7", "--input-len", "12", "--output-len", "5", "--output-json",
             str(tmp_path / "out.json"), "--data-parallel-size", "2", "--swap-space", "0",
             "--max-num-seqs", "1", "--max-waiting", "1"]  # fmt: skip
    assert main(["bench", "throughput", str(folder), *flags]) == 0
    saved = json.loads((tmp_path / "out.json").read_text())
    assert (saved["num_requests"], saved["total_num_tokens"]) == (7, 7 * 17)
    assert made[0].config.data_parallel_size == 2
    made[0].shutdown()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["latency", "--batch-size", "0"], "batch_size must be at least 1, not 0"),
        (["latency", "--output-json", "/nosuch/x"], "--output-json /nosuch/x"),
        (["throughput", "--n", "0"], "--n must be at least 1, not 0"),
        (["throughput", "--dataset-name", "sharegpt"], "needs --dataset-path"),
        (["throughput", "--random-range-ratio", "1"], "range_ratio must be in [0, 1), not 1.0"),
    ],
)
def test_mistakes_are_reported_before_the_load(
    argv: list[str], says: str, asked: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *argv]) == 1
    assert says in capsys.readouterr().err
    assert asked == {}
