"""Metrics add up, and are what vLLM's boards look for."""

import http.client
import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.core.plan import RunnerLimits
from octavo.core.policy import Gauge
from octavo.core.slo import SLOScheduler
from octavo.engine.capabilities import EngineCapabilities
from octavo.engine.messages import Stats
from octavo.engine.stats import EngineStats, Observations, exported
from octavo.server.metrics import Metrics
from serving import wait_until

# What vLLM's own Grafana board queries.
BOARD = (
    "vllm:e2e_request_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_count",
    "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_bucket", "vllm:time_to_first_token_seconds_bucket",
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket",
    "vllm:request_success_total", "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum",
    "vllm:request_params_max_tokens_sum", "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
    "vllm:cache_config_info", "vllm:iteration_tokens_total_count",
    "vllm:request_time_per_output_token_seconds_sum",
    "vllm:request_max_num_generation_tokens_sum", "vllm:request_inference_time_seconds_sum",
    "vllm:request_num_preemptions_count", "vllm:request_prefill_kv_computed_tokens_count",
    "vllm:prompt_tokens_by_source_total", "vllm:num_requests_waiting_by_reason",
    "http_requests_total", "http_request_duration_seconds_bucket",
    "http_request_duration_highr_seconds_bucket",
)  # fmt: skip
# All others of vLLM 0.33 that are not among BOARD's.
OTHERS = (
    "num_requests_waiting_by_reason", "lora_requests_info", "engine_sleep_state",
    "num_requests_kv_fetch_by_stage", "external_prefix_cache_queries",
    "external_prefix_cache_hits", "mm_cache_queries", "mm_cache_hits", "prompt_tokens_cached",
    "prompt_tokens_by_source", "prompt_tokens_cached_by_source", "admission_rejections",
    "corrupted_requests", "watermark_requests", "request_params_n", "kv_block_lifetime_seconds",
    "kv_block_idle_before_evict_seconds", "kv_block_reuse_gap_seconds",
    "estimated_flops_per_gpu_total", "estimated_read_bytes_per_gpu_total",
    "estimated_write_bytes_per_gpu_total", "spec_decode_num_drafts",
    "spec_decode_num_accepted_tokens_per_pos", "kv_offload_load_bytes",
    "kv_offload_cpu_cache_usage_perc", "simple_kv_offload_bytes", "nixl_xfer_time_seconds",
    "mooncake_put_time", "websocket_connections", "tool_call_parser_invocations_total",
)  # fmt: skip
# What the slo policy shows; boards of users query these names.
SLO = {
    f"octavo:slo_{name}"
    for name in (
        "p99_itl_seconds", "p99_ttft_seconds", "step_share", "step_tokens", "sequences",
        "changes_total", "shed_total",
    )
}  # fmt: skip


def scrape(server):
    return scraped(server.http.get("/metrics").text)


def full_name(name):
    return name if ":" in name else f"vllm:{name}"


def scraped(text):
    """(name, sorted labels) -> value, through the strict parser."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(found, name, **labels):
    return sum(
        value
        for (n, ls), value in found.items()
        if n == name and labels.items() <= dict(ls).items()
    )


def test_the_names_that_boards_look_for_are_there(server):
    server.complete(server.say("AB"))
    names = {name for name, _ in scrape(server)}
    assert set(BOARD) - names == set()
    labels = dict(next(ls for n, ls in scrape(server) if n == "vllm:num_requests_running"))
    assert labels == {"model_name": "scripted", "engine": "0"}


def test_every_metric_of_vllm_is_there_or_listed_with_the_reason(server):
    page = (Path(__file__).parents[2] / "docs/server.md").read_text()
    here, absent = page.partition("| Of vLLM 0.33, not here")[::2]
    rows = [line.split("|")[1] for line in absent.splitlines() if line.startswith("| `")]
    patterns = [p.replace("*", ".*") for p in re.findall(r"`([a-z_*]+)`", "".join(rows))]
    server.complete(server.say("AB"))
    there = {family.name for family in text_string_to_metric_families(
        server.http.get("/metrics").text)}  # fmt: skip
    suffixes = re.compile("_(bucket|count|sum|total)$")
    for name in (*OTHERS, *(suffixes.sub("", n.removeprefix("vllm:")) for n in BOARD)):
        names = {f"vllm:{name}", f"vllm:{suffixes.sub('', name)}", suffixes.sub("", name), name}
        listed = any(re.fullmatch(pattern, name) for pattern in patterns)
        assert listed != bool(names & there), name
        assert listed or f"`{name}" in here, name


def test_the_longest_choice_and_what_was_computed(make_server):
    server = make_server()
    server.complete(server.say("A", "B"), n=2)
    wait_until(lambda: total(scrape(server), "vllm:request_max_num_generation_tokens_count") == 1)
    found = scrape(server)
    assert total(found, "vllm:request_max_num_generation_tokens_sum") == 3
    assert total(found, "vllm:request_generation_tokens_sum") == 6
    computed = total(found, "vllm:prompt_tokens_by_source_total", source="local_compute")
    assert computed == total(found, "vllm:prompt_tokens_total") > 0
    assert computed == total(found, "vllm:request_prefill_kv_computed_tokens_sum")


def test_every_counter_begins_at_0():
    families = list(text_string_to_metric_families(Metrics("m").text().decode()))
    empty = [f.name for f in families if f.type == "counter" and not f.samples]
    assert empty == []
    reasons = {s.labels["finished_reason"] for f in families
               if f.name == "vllm:request_success" for s in f.samples}  # fmt: skip
    assert reasons == {"stop", "length", "abort", "error"}


def test_label_values_are_escaped():
    text = Metrics('a"b\\c\nd').text().decode()
    families = list(text_string_to_metric_families(text))
    gauge = next(f for f in families if f.name == "vllm:num_requests_running")
    assert gauge.samples[0].labels["model_name"] == 'a"b\\c\nd'


def leave_before_the_answer(server):
    """A client that leaves once its request is admitted."""
    body = json.dumps({"prompt": "!slow", "max_tokens": 400})
    client = http.client.HTTPConnection("127.0.0.1", server.port)
    client.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    wait_until(lambda: server.service.client.in_flight == 1)
    client.close()
    wait_until(lambda: server.service.client.in_flight == 0)


def test_srv_17_counters_add_up(make_server):
    server = make_server(max_num_seqs=4)
    usages = []
    earlier = scrape(server)
    for repeat in range(2):
        for i in range(5):
            prompt = f"{i:02}" * 20 + server.say("ABC")
            usages.append(server.complete(prompt)["usage"])
        found = scrape(server)
        hits = total(found, "vllm:prefix_cache_hits_total")
        assert (hits > 0) == (repeat > 0)  # distinct prompts hit nothing
        assert hits <= total(found, "vllm:prefix_cache_queries_total")
        counters = [k for k in earlier if k[0].endswith(("_total", "_count", "_bucket"))]
        assert all(found[k] >= earlier[k] for k in counters)
        earlier = found
    for _ in range(2):
        assert server.post("/v1/completions", prompt="!fail").status_code == 500
        leave_before_the_answer(server)
        server.post("/v1/completions", prompt="x", temperature=9)
    wait_until(lambda: total(scrape(server), "vllm:request_success_total") == 14)
    server.assert_idle()
    wait_until(lambda: total(scrape(server), "vllm:iteration_tokens_total_count") > 0)
    found = scrape(server)

    def ended(reason):
        return total(found, "vllm:request_success_total", finished_reason=reason)

    assert (ended("stop"), ended("error"), ended("abort")) == (10, 2, 2)
    assert total(found, "octavo:requests_received_total") == 14
    wanted = sum(u["prompt_tokens"] for u in usages)
    assert total(found, "vllm:prompt_tokens_total") == wanted
    assert total(found, "vllm:generation_tokens_total") == sum(
        u["completion_tokens"] for u in usages
    )
    cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
    assert total(found, "vllm:prompt_tokens_cached_total") == cached
    for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting",
                  "vllm:kv_cache_usage_perc", "octavo:kv_fragmentation"):  # fmt: skip
        assert total(found, gauge) == 0


@pytest.mark.parametrize("name", ["time_to_first_token_seconds", "e2e_request_latency_seconds"])
def test_times_are_between_the_finest_buckets_and_what_we_waited(make_server, name):
    server = make_server()
    server.complete("!slow" + server.say("ABC"))
    wait_until(lambda: total(scrape(server), f"vllm:{name}_count") == 1)
    assert 0.01 < total(scrape(server), f"vllm:{name}_sum") < 10


def loaded(gauges, scheduler="slo"):
    """The metrics of a server whose engine has loaded."""
    metrics = Metrics("m")
    limits = RunnerLimits(9, 16, 1, 64, 256)
    metrics.loaded(0, EngineCapabilities(limits, scheduler, gauges=tuple(gauges)))
    return metrics


def test_no_counter_falls_when_an_engine_is_started_again():
    gauges = SLOScheduler(p99_itl_ms=50).gauges()
    metrics = loaded(gauges)
    counters = [metric for metric in exported(EngineStats) if metric.kind == "counter"]
    names = [metric.field for metric in counters]

    def shown():
        found = scraped(metrics.text().decode())
        values = {total(found, full_name(metric.name) + "_total") for metric in counters}
        return (
            values,
            total(found, "octavo:slo_shed_total"),
            total(found, "vllm:num_requests_running"),
        )

    def report(count, running):
        counts = dict.fromkeys(names, count)
        stats = EngineStats(**counts, running=running, policy={"shed": float(count)})
        metrics.update(0, Stats(stats, Observations()))

    report(5, running=3)
    assert shown() == ({5.0}, 5.0, 3.0)
    for _ in range(2):  # its death, and a start that failed
        metrics.lost(0)
        assert shown() == ({5.0}, 5.0, 0.0)
    report(0, running=0)
    assert shown() == ({5.0}, 5.0, 0.0)
    report(7, running=2)
    assert shown() == ({12.0}, 12.0, 2.0)
    report(8, running=1)
    assert shown() == ({13.0}, 13.0, 1.0)


def test_what_an_slo_policy_does_is_shown_while_there_is_one():
    assert b"octavo:slo_" not in Metrics("m").text()
    assert b"octavo:policy_errors_total" in Metrics("m").text()
    gauges = SLOScheduler(p99_itl_ms=50).gauges()
    share = next(gauge.value for gauge in gauges if gauge.name == "step_share")
    metrics = loaded(gauges)
    names = {line.split("{")[0] for line in metrics.text().decode().splitlines() if "slo_" in line}
    assert {name for name in names if name[0] != "#"} == SLO
    stats = EngineStats(*[0.5] * 7, *[3] * 9, {}, policy={"p99_itl_seconds": 0.5, "shed": 2.0})
    metrics.update(0, Stats(stats, Observations()))
    text = metrics.text().decode()
    assert 'octavo:slo_p99_itl_seconds{engine="0",model_name="m"} 0.5' in text
    assert 'octavo:slo_shed_total{engine="0",model_name="m"} 2.0' in text
    assert f'octavo:slo_step_share{{engine="0",model_name="m"}} {share}' in text


def test_every_statistic_that_says_so_is_exported_once():
    """The names, kinds and help texts are those of the fields, for gauges and for histograms."""
    text = Metrics("m").text().decode()
    declared = [*exported(EngineStats), *exported(Observations)]
    assert len({metric.name for metric in declared}) == len(declared) > 25
    for metric in declared:
        name = metric.name if ":" in metric.name else f"vllm:{metric.name}"
        suffix = "_total" if metric.kind == "counter" else ""
        assert text.count(f"# TYPE {name}{suffix} {metric.kind}\n") == 1
        assert f"# HELP {name}{suffix} {metric.help}\n" in text


def test_a_policy_s_name_is_made_fit_for_a_metric():
    text = loaded([Gauge("depth", "How deep.", 3.0)], "my module:Short-First").text().decode()
    assert 'octavo:my_module_short_first_depth{engine="0",model_name="m"} 3.0' in text
