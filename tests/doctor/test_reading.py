"""Pages of metrics: ours are read, others are named."""

import pytest

from modelled import Modelled
from octavo.doctor.reading import Period, Reading
from octavo.engine.stats import Observations
from octavo.errors import RequestError

VLLM = '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name="m"} 1.0\n'
NODE = "# TYPE node_load1 gauge\nnode_load1 0.5\n"


def read(server):
    return Reading.parse(server.look().metrics, "u")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (VLLM, "u has metrics of vLLM: octavo:engine_up is missing"),
        (NODE, "u has metrics of another program"),
        ("", "u is not a metrics page"),
        ("<html><body>hello</body></html>", "u is not a metrics page"),
        ('{"a": 1}', "u is not a metrics page"),
        ("a{b 1", "u is not a metrics page"),
    ],
)
def test_pages_that_are_not_ours(text, message):
    with pytest.raises(RequestError, match=message):
        Reading.parse(text, "u")


def test_sums_over_engines_the_most_of_one_and_settings():
    server = Modelled(engines=2, max_num_seqs=7)
    server.update(engine=0, running=3)
    server.update(engine=1, running=5)
    reading = read(server)
    assert reading.total("vllm:num_requests_running") == 8
    assert reading.total("vllm:num_requests_running", engine="1") == 5
    assert reading.most("vllm:num_requests_running") == 5
    assert (reading.setting("max_num_seqs"), reading.number("max_num_seqs")) == ("7", 7.0)
    assert (reading.setting("quantization"), reading.number("quantization")) == ("", None)
    assert reading.model == "m"


def test_a_server_too_old_to_tell_its_settings():
    server = Modelled()
    server.metrics.config = {}
    assert read(server).number("max_num_seqs") is None


def test_percentiles_are_within_the_bucket_of_the_sample():
    server = Modelled()
    server.update(Observations(itl=[0.02] * 98 + [0.45] * 2))
    first = read(server)
    life = Period(None, first, "")
    assert 0.01 < life.percentile("vllm:inter_token_latency_seconds", 0.5) <= 0.025
    assert 0.4 < life.percentile("vllm:inter_token_latency_seconds", 0.99) <= 0.5
    assert life.mean("vllm:inter_token_latency_seconds") == pytest.approx(0.0286)
    server.update(Observations(itl=[3.0]))
    recent = Period(first, read(server), "")
    assert recent.count("vllm:inter_token_latency_seconds_count") == 1
    assert 2.5 < recent.percentile("vllm:inter_token_latency_seconds", 0.5) <= 5
    empty = Period(first, first, "")
    assert empty.percentile("vllm:inter_token_latency_seconds", 0.5) == 0
    assert empty.mean("vllm:inter_token_latency_seconds") == 0


def test_a_sample_above_all_buckets():
    server = Modelled()
    server.update(Observations(itl=[1000.0]))
    assert Period(None, read(server), "").percentile("vllm:inter_token_latency_seconds", 0.5) == 80
