"""The harness and an engine's process: what is said, what is measured, what goes wrong."""

from typing import Any

import pytest
from benchmarks.processes import EngineProcess, PeerError
from benchmarks.workloads import Job

JOBS = [Job([1, 2, 3], 4), Job([5], 6)]


def start(**options: Any) -> EngineProcess:
    return EngineProcess("fake", "tests.benchmarks.fake_peer", options)


def test_a_run_comes_back_measured() -> None:
    engine, seen = start(), []
    try:
        assert engine.facts == {"build": "fake 1"}
        assert engine.startup_s > 0
        engine.pause()
        engine.resume()
        result = engine.run(JOBS, seen.append)
        assert result["output_tokens"] == 10
        assert result["latency_s"] == [0.5, 0.5]
        assert result["kv"] == {"forgotten": 1}, "the prefix cache is emptied before each run"
        assert {"wall_s", "cores", "other_cores", "peak_rss_mb"} <= set(result)
        assert seen == [2]
        assert engine.run(JOBS)["kv"] == {"forgotten": 2}
    finally:
        engine.close()
    engine.close()  # closing twice does no harm


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"fail": "run"}, "MemoryError: full"),
        ({"short": 3}, "7 tokens came, 10 were asked for"),
    ],
)
def test_a_failing_run_says_why(options: dict[str, Any], word: str) -> None:
    engine = start(**options)
    try:
        with pytest.raises(PeerError, match=word):
            engine.run(JOBS)
    finally:
        engine.close()


def test_an_engine_that_does_not_start_says_why() -> None:
    with pytest.raises(PeerError, match="OSError: no such model"):
        start(fail="load")


def test_an_engine_that_vanishes_is_noticed() -> None:
    with pytest.raises(PeerError, match="exit code"):
        EngineProcess("gone", "no_such_module", {})
