"""Batches and datasets through an engine without weights, on a clock that the test moves."""

from pathlib import Path

import pytest

import kit
from octavo import LLM
from octavo.bench.datasets import Sample
from octavo.bench.offline import Batch, latency, latency_text, throughput, throughput_text
from octavo.config import EngineConfig
from octavo.core.plan import RunnerLimits
from octavo.engine.fake import FakeRunner
from octavo.errors import ConfigError, OctavoError
from octavo.text.tokenizer import load_tokenizer


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    vocab = kit.write_tokenizer(tmp_path)
    runner = FakeRunner(RunnerLimits(400, 16, 1, 512, vocab))
    return LLM.over(runner, load_tokenizer(tmp_path), EngineConfig(enable_prefix_caching=False))


class Timed:
    """An engine for which the i-th call takes the i-th time; keeps what it was asked."""

    def __init__(self, llm: LLM, *seconds: float) -> None:
        self.now = 0.0
        self.calls: list[tuple] = []
        self._llm = llm
        self._seconds = iter(seconds)

    def generate(self, prompts, params=None, *, use_tqdm=True):
        self.calls.append((prompts, params))
        self.now += next(self._seconds)
        return self._llm.generate(prompts, params, use_tqdm=False)

    def clock(self) -> float:
        return self.now


def test_latency_counts_batches_after_the_warm_up(llm: LLM) -> None:
    timed = Timed(llm, 100, 1, 2, 3)
    batch = Batch(input_len=5, output_len=3, batch_size=2, num_iters_warmup=1, num_iters=3)
    told: list = []
    found = latency(timed, 256, batch, 0, True, timed.clock, lambda *now: told.append(now))
    assert (found["avg_latency"], found["latencies"]) == (2, [1, 2, 3])
    assert found["percentiles"]["50"] == 2
    assert told[-1] == (4, 4)
    prompts = [[p["prompt_token_ids"] for p in prompts] for prompts, _ in timed.calls]
    assert [[len(ids) for ids in batch] for batch in prompts] == [[5, 5]] * 4
    assert len({tuple(ids) for batch in prompts for ids in batch}) == 8  # no two are equal
    assert "Avg latency: 2.0 seconds" in latency_text(found)
    assert "99% percentile latency: 2.98 seconds" in latency_text(found)


def test_throughput_counts_all_tokens(llm: LLM) -> None:
    timed = Timed(llm, 4)
    samples = [Sample("abc", 4, 5), Sample("defgh", 6, 7)]
    found = throughput(timed, samples, 2, True, timed.clock, False)
    tokens_in = sum(len(llm.get_tokenizer().encode(s.prompt)) for s in samples)
    assert (found["elapsed_time"], found["num_requests"]) == (4, 2)
    assert found["requests_per_second"] == 0.5
    assert (found["total_prompt_tokens"], found["total_output_tokens"]) == (tokens_in, 24)
    assert found["total_num_tokens"] == tokens_in + 24
    assert found["output_tokens_per_second"] == 6
    assert throughput_text(found).startswith("Throughput: 0.50 requests/s, ")


class Short:
    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def generate(self, prompts, params=None, *, use_tqdm=True):
        short = params[0].with_(max_tokens=1)
        return self._llm.generate(prompts, short, use_tqdm=False)


def test_an_answer_that_is_not_whole_is_no_rate(llm: LLM) -> None:
    with pytest.raises(OctavoError, match="1 tokens came, 5 were asked for"):
        throughput(Short(llm), [Sample("abc", 4, 5)], progress=False)


@pytest.mark.parametrize("name", ["input_len", "output_len", "batch_size", "n", "num_iters"])
def test_a_wrong_batch_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, not 0"):
        Batch(**{name: 0})
