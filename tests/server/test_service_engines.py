"""Several engines behind one server: one set of metrics, and a health that says which are down."""

import json
import logging
import os
import signal

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.config import EngineConfig
from octavo.engine.messages import Stats
from octavo.engine.stats import EngineStats, Observations, at_rest, merged
from octavo.errors import ConfigError
from octavo.llm import LLM
from octavo.server.metrics import Metrics
from octavo.server.rates import RatesLog
from serving import wait_until


def samples(metrics):
    families = text_string_to_metric_families(metrics.text().decode())
    return {
        (s.name, s.labels.get("engine"), s.labels.get("reason", "")): s.value
        for family in families
        for s in family.samples
    }


def test_every_metric_of_an_engine_has_a_series_for_each():
    found = samples(Metrics("m", 3))
    names = {name for name, engine, _ in found if engine == "0"}
    for engine in ("1", "2"):
        assert {name for name, other, _ in found if other == engine} == names
    routed = [key for key in found if key[0] == "octavo:requests_routed_total"]
    assert len(routed) == 3 * 3
    assert not any("routed" in name for name, *_ in samples(Metrics("m")))


def test_figures_are_those_of_the_engine_and_add_up():
    metrics = Metrics("m", 2)
    metrics.down = lambda: {1: "gone"}
    metrics.update(0, Stats(EngineStats(running=3, preemptions=2), Observations(ttft=[0.1, 0.2])))
    metrics.update(1, Stats(EngineStats(running=4, preemptions=5), Observations(ttft=[0.1])))
    metrics.answered(prompt=10, cached=4, generated=7, engine=1)
    metrics.ended("stop", 2, engine=1)
    metrics.routed(1, "prefix")
    found = samples(metrics)
    assert [found["vllm:num_requests_running", e, ""] for e in "01"] == [3, 4]
    assert [found["vllm:time_to_first_token_seconds_count", e, ""] for e in "01"] == [2, 1]
    assert [found["vllm:generation_tokens_total", e, ""] for e in "01"] == [0, 7]
    assert [found["octavo:engine_up", e, ""] for e in "01"] == [1, 0]
    assert found["octavo:requests_routed_total", "1", "prefix"] == 1
    metrics.lost(1)  # nothing runs there; what it has counted stays
    found = samples(metrics)
    assert [found["vllm:num_requests_running", e, ""] for e in "01"] == [3, 0]
    assert [found["vllm:num_preemptions_total", e, ""] for e in "01"] == [2, 5]


def test_statistics_of_several_are_sums_and_means():
    one = EngineStats(running=1, throughput=10.0, cached_tokens=10, queried_tokens=40,
                      kv_blocks_usage=0.2, finished={"stop": 1, "abort": 2}, cache_hit_rate=0.25,
                      policy_name="fifo")  # fmt: skip
    other = EngineStats(running=2, throughput=5.0, cached_tokens=30, queried_tokens=40,
                        kv_blocks_usage=0.4, finished={"stop": 3}, policy_name="fifo")  # fmt: skip
    both = merged([one, other])
    assert (both.running, both.throughput, both.cache_hit_rate) == (3, 15.0, 0.5)
    assert both.kv_blocks_usage == pytest.approx(0.3)
    assert both.finished == {"stop": 4, "abort": 2}
    assert both.policy_name == "fifo"
    assert merged([one]) is one
    assert merged([]) == EngineStats()
    assert at_rest(one).running == 0
    assert at_rest(one).cached_tokens == 10


def test_the_log_s_line_is_of_all_and_says_how_they_divide_it(caplog):
    caplog.set_level(logging.INFO)
    metrics, now = Metrics("m", 2), [0.0]
    log = RatesLog(metrics, 10, lambda: now[0])
    for steps, tokens in ((5, (100, 300)), (2, (50, 400))):  # the first one starts again
        for engine, count in enumerate(tokens):
            stats = EngineStats(steps=steps + 3 * engine * steps, generation_tokens=count,
                                running=engine + 1)  # fmt: skip
            metrics.update(engine, Stats(stats, Observations()))
        now[0] += 10
        log.tick()
        metrics.lost(0)
    first, second = caplog.records
    assert first.getMessage().startswith("3 running, 0 waiting, 0 swapped; tokens/s: 0.0 in, 40.0")
    assert first.getMessage().endswith("; running by engine: 1, 2")
    assert first.fields["running_by_engine"] == [1, 2]
    assert second.fields["output_tokens_per_second"] == 15.0


def test_an_llm_is_one_engine():
    with pytest.raises(ConfigError, match=r"size is 2.*use AsyncLLM or `octavo serve`"):
        LLM("nothing", data_parallel_size=2)
    assert EngineConfig(data_parallel_size=3).data_parallel_size == 3


def test_a_server_of_two_answers_until_both_are_gone(make_server, monkeypatch, caplog):
    monkeypatch.setattr("octavo.server.service.DEATH_LINGER_SECONDS", 0.5)
    server = make_server(data_parallel_size=2, max_num_seqs=4)
    for letters in ("AB", "DE", "AB", "ABC"):
        server.complete(server.say(*letters) + letters[0] * 40, n=2)
    names = ("octavo:requests_received_total", "vllm:request_success_total",
             "vllm:generation_tokens_total")  # fmt: skip
    for name in names:
        parts = [server.metric(name, engine=engine) for engine in "01"]
        assert min(parts) > 0
        assert sum(parts) == server.metric(name)
    assert server.metric("octavo:requests_received_total") == 4
    assert server.metric("octavo:requests_routed_total") == 4
    assert server.metric("octavo:engine_up") == 2
    server.assert_idle()
    assert server.http.get("/health").content == b""
    pids = [link.process.pid for link in server.service.client.links]

    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: server.service.engines_down())
    health = server.http.get("/health")
    assert health.status_code == 200
    assert json.loads(health.content) == {
        "serving": 1, "down": {"1": "its process ended with signal SIGKILL"},
    }  # fmt: skip
    assert [server.metric("octavo:engine_up", engine=engine) for engine in "01"] == [1, 0]
    for _ in range(3):
        server.assert_alive()
    server.assert_idle()

    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: server.http.get("/health").status_code == 503)
    assert server.end() == 1
    assert "engine 0: its process ended with signal SIGKILL; engine 1: its" in caplog.text
