"""Every rule finds its symptom, on a server over the scripted engine or a modelled one; a healthy
server has none."""

import contextlib
import os
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest
from scripts.docs import ROOT

from modelled import Modelled, twice
from octavo.cli import serve
from octavo.cli.arguments import Parser
from octavo.cli.doctor import look_twice
from octavo.doctor.load import KV_FREE
from octavo.doctor.machine import Machine
from octavo.doctor.memory import CHURN_LEAST, KV_PRESSURE
from octavo.doctor.rules import RULES, diagnose, is_healthy, not_judged
from octavo.doctor.snapshot import Snapshot
from octavo.engine.stats import Observations
from octavo.errors import EngineError
from octavo.server.metrics import Metrics
from serving import PYTHONPATH, Server, wait_until, write_model

# What this machine shows while tests run on it is not the server's.
OF_THE_MACHINE = {"neighbours", "throttled", "memory-short", "web-process", "between-steps"}


def found(snapshot):
    """Finding by rule."""
    return {finding.rule: finding for finding in diagnose(snapshot)}


def evidence(snapshot, rule):
    return " | ".join(found(snapshot)[rule].evidence)


# --- servers over the scripted engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "scripted")


@pytest.fixture
def start(folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    with contextlib.ExitStack() as stack:
        yield lambda options=None, **engine: stack.enter_context(
            Server(folder, options or {}, **engine)
        )


class Watched:
    """A snapshot from before a block to its end."""

    def __init__(self, server):
        self._server = server
        self._first = look_twice(server.url, None, 0.01)

    def snapshot(self):
        last = look_twice(self._server.url, None, 0.01)
        return Snapshot(self._server.url, self._first.before, last.now)


@contextlib.contextmanager
def streams(server, *prompts, **body):
    """Streams of which the head was read."""
    with contextlib.ExitStack() as stack:
        for prompt in prompts:
            fields = {"prompt": prompt, "stream": True, "max_tokens": 400, **body}
            stack.enter_context(server.http.stream("POST", "/v1/completions", json=fields))
        yield stack


@contextlib.contextmanager
def sending(server, *prompts, **body):
    """Futures of the answers; those that are not there at the end are given up."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        yield [
            pool.submit(server.post, "/v1/completions", prompt=prompt, **body) for prompt in prompts
        ]
        server.service.client.fail_all(EngineError("enough"))


def test_a_healthy_server_is_told_so(start):
    server = start(max_num_seqs=8)
    watched = Watched(server)
    for _ in range(5):
        server.complete(server.say("AB"))
    wait_until(lambda: server.metric("octavo:steps_total") > 0)
    snapshot = watched.snapshot()
    assert set(found(snapshot)) <= OF_THE_MACHINE
    elsewhere = [
        msgspec.structs.replace(look, machine=None) for look in (snapshot.before, snapshot.now)
    ]
    assert "another machine" in not_judged(Snapshot("u", *elsewhere))[-1]
    assert snapshot.recent.count("octavo:steps_total") > 0


def test_a_small_batch_a_growing_queue_and_refusals(start):
    server = start(max_num_seqs=1, max_waiting=3)
    watched = Watched(server)
    with sending(server, *["!slow"] * 4, max_tokens=400):
        wait_until(lambda: server.metric("vllm:num_requests_waiting") == 3)
        assert server.post("/v1/completions", prompt="x").status_code == 503
        grown, steady = watched.snapshot(), look_twice(server.url, None, 0.01)
    assert "0 waited, now 3" in evidence(grown, "queue-growth")
    assert "1 of 5 requests refused" in evidence(grown, "refused")
    assert "max_waiting is 3" in evidence(grown, "refused")
    assert "3 waited, now 3; 1 run, and max_num_seqs is 1" in evidence(steady, "batch-too-small")
    assert "kv-pressure" not in found(steady)
    assert "batch-too-small" not in found(grown)  # nothing waited at first


def test_clients_that_leave_and_requests_that_fail(start):
    server = start(max_num_seqs=32)
    watched = Watched(server)
    with streams(server, "!slow", n=20):
        pass
    aborted = ("vllm:request_success_total", "abort")
    wait_until(lambda: server.metric(aborted[0], finished_reason=aborted[1]) == 20)
    assert server.post("/v1/completions", prompt="!fail", max_tokens=2).status_code == 500
    snapshot = watched.snapshot()
    assert "20 of 21 choices (95.2%)" in evidence(snapshot, "aborted")
    assert "1 of 21 choices" in evidence(snapshot, "failed")


def test_memory_that_is_full_and_preemption(start):
    # Twelve blocks, and eight choices of ten each that grow together and share nothing but the
    # prompt: seven have to give way.
    server = start(
        max_num_seqs=8, num_gpu_blocks_override=13, max_model_len=190, enable_prefix_caching=False,
    )  # fmt: skip
    watched = Watched(server)
    server.complete("x", max_tokens=150, n=8)
    wait_until(lambda: server.metric("vllm:num_preemptions_total") >= CHURN_LEAST)
    churned = watched.snapshot()
    with sending(server, *["!slow" + "x" * 155] * 12, max_tokens=20):
        wait_until(lambda: server.metric("vllm:num_requests_waiting") >= 1)
        wait_until(lambda: server.metric("vllm:kv_cache_usage_perc") >= KV_PRESSURE)
        pressed = look_twice(server.url, None, 0.01)
    assert "swap_space is 0" in evidence(churned, "preemption-churn")
    assert "of the KV cache is held" in evidence(pressed, "kv-pressure")
    assert "batch-too-small" not in found(pressed)


def test_blocks_threads_and_prompts_without_a_cache(start):
    server = start(
        max_num_seqs=8, block_size=128, enable_prefix_caching=False, threads=4096,
    )  # fmt: skip
    watched = Watched(server)
    for _ in range(8):
        server.complete("a long prompt, always the same one", max_tokens=1)
    with streams(server, "!slow"):
        wait_until(lambda: server.metric("octavo:kv_fragmentation") > 0.5)
        waste = look_twice(server.url, None, 0.01)
    assert "block_size is 128" in evidence(waste, "block-size")
    assert "4096 compute threads" in evidence(waste, "threads")
    off = found(watched.snapshot())["prefix-cache-off"]
    assert "enable_prefix_caching is False" in off.evidence[0]
    assert is_healthy([off])  # a hint


def test_prompts_that_share_nothing(start):
    server = start(max_num_seqs=8)
    watched = Watched(server)
    for number in range(12):
        server.complete(f"{number:04} " * 100, max_tokens=1)
    wait_until(lambda: server.metric("vllm:prefix_cache_queries_total") >= 4096)
    assert "prompt tokens found in the cache" in evidence(watched.snapshot(), "prefix-cache-misses")


@pytest.mark.slow
def test_streams_that_nobody_reads(start):
    server = start({"stall_timeout": 1.0}, max_model_len=20_000, num_gpu_blocks_override=6000)
    watched = Watched(server)
    small = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)])
    many = {"max_tokens": 19_000, "logprobs": 5, "ignore_eos": True}
    server.http.close()
    with (
        httpx.Client(base_url=server.url, transport=small, timeout=30) as server.http,
        streams(server, *["x"] * 4, **many),
    ):
        wait_until(lambda: server.service.metrics.unread() == 4)
        unread = look_twice(server.url, None, 0.01)
        wait_until(lambda: server.service.metrics.stalled() >= 1)
        stalled = watched.snapshot()
    assert "4 answers were not read, now 4; 0" in evidence(unread, "slow-clients")
    assert "since the start" in evidence(stalled, "slow-clients")


def test_an_engine_that_is_killed(start):
    server = start()
    watched = Watched(server)
    os.kill(server.engine_pid, signal.SIGKILL)
    wait_until(lambda: server.metric("octavo:engine_deaths_total") == 1)
    snapshot = watched.snapshot()
    assert "ended with signal SIGKILL" in evidence(snapshot, "unavailable")
    assert "1 deaths of engines" in evidence(snapshot, "engine-died")
    assert diagnose(snapshot)[0].rule == "unavailable"  # the most severe first
    assert not is_healthy(diagnose(snapshot))


# --- modelled servers


def test_one_of_several_engines_is_down():
    server = Modelled(engines=3)
    server.metrics.down = lambda: {1: "engine 1 died"}
    server.health = '{"serving": 2, "down": {"1": "killed by SIGKILL"}}'
    assert evidence(twice(server), "engine-down") == (
        "1 of 3 engines down | engine 1: killed by SIGKILL"
    )


def test_a_server_that_its_supervisor_started_again():
    server = Modelled()
    server.metrics.received(1, 1)
    before = server.look()
    other = Modelled()
    other.values["process_start_time_seconds"] += 601
    other._time = server._time
    snapshot = Snapshot("u", before, other.look())
    assert "server-restarted" in found(snapshot)
    assert snapshot.rate("octavo:requests_received_total") == 0  # and not below


def test_a_policy_that_fails():
    server = Modelled()
    server.update(policy_errors=3)
    assert "3 failures since the start" in evidence(twice(server), "policy-errors")


def test_requests_that_wait_long():
    server = Modelled()
    before = server.look()
    server.update(Observations(queue=[3.0] * 10, ttft=[4.0] * 10))
    snapshot = Snapshot("u", before, server.look())
    assert "3 s in the queue on average, 4 s to the first token, in 5.0 s" in evidence(
        snapshot, "long-wait"
    )
    quick = Modelled()
    quick.update(Observations(queue=[1.5] * 10, ttft=[9.0] * 10))  # long prompts
    assert "long-wait" not in found(twice(quick))


@pytest.mark.parametrize(
    ("itl", "steps", "symptom"),
    [
        ([0.02] * 190 + [0.4] * 10, [8] * 150 + [2048] * 10, True),
        ([0.02] * 200, [8] * 150 + [2048] * 10, False),  # bounded by the policy
        ([0.02] * 190 + [0.4] * 10, [8] * 160, False),  # no prompts: another cause
        ([0.001] * 190 + [0.02] * 10, [8] * 150 + [2048] * 10, False),  # nobody notices
        ([0.02] * 90 + [0.4] * 10, [8] * 50 + [2048] * 10, False),  # too few
    ],
)
def test_tokens_in_bursts(itl, steps, symptom):
    server = Modelled(max_num_batched_tokens=4096)
    server.update(Observations(itl=itl, step_tokens=steps))
    snapshot = twice(server)
    assert ("unsteady-tokens" in found(snapshot)) == symptom
    if symptom:
        assert "max_num_batched_tokens is 4096" in evidence(snapshot, "unsteady-tokens")


def test_a_busy_web_process():
    server = Modelled()
    before = server.look()
    server.values["process_cpu_seconds_total"] += 4.6
    assert "0.92 cores in 5.0 s" in evidence(Snapshot("u", before, server.look()), "web-process")


def test_a_device_that_waits_for_python():
    server = Modelled()
    server.update(running=8, steps=100, gpu_utilization=0.4)
    before = server.look()
    server.update(running=8, steps=200, gpu_utilization=0.3)
    assert "20 steps/s; threads is" in evidence(
        Snapshot("u", before, server.look()), "between-steps"
    )
    server.update(running=8, steps=300, gpu_utilization=0.95)
    assert "between-steps" not in found(twice(server))


def test_streams_that_wait_without_being_ended():
    server = Modelled()
    server.metrics.unread = lambda: 2
    assert "2 answers were not read, now 2" in evidence(twice(server), "slow-clients")


@pytest.mark.parametrize(
    ("threads", "quota", "device", "symptom"),
    [("4", "", "cpu", False), ("5", "", "cpu", True), ("4", "2.5", "cpu", True),
     ("1", "0.5", "cpu", False), ("9,2", "", "auto", True), ("9", "", "cuda", False),
     ("", "1", "cpu", False), ("many", "", "cpu", False)],
)  # fmt: skip
def test_threads_beyond_processors(threads, quota, device, symptom):
    server = Modelled()
    server.metrics.config |= {"threads": threads, "cpu_quota": quota, "device": device}
    assert ("threads" in found(twice(server))) == symptom


def looks(server, *machines):
    pages = []
    for machine in machines:
        server.machine = machine
        pages.append(server.look())
    return Snapshot("u", *pages)


def test_a_quota_that_stops_the_processes():
    cut = [Machine(periods=p, throttled=t, quota=1.5) for p, t in ((100, 10), (150, 40), (200, 41))]
    assert "30 of 50 periods" in evidence(looks(Modelled(), *cut[:2]), "throttled")
    assert "throttled" not in found(looks(Modelled(), *cut[1:]))


def test_neighbours_that_take_the_processors():
    busy, quiet = Machine(cpu_pressure=60.0), Machine(cpu_pressure=3.0)
    assert "60% of the last 10 s" in evidence(looks(Modelled(), busy, busy), "neighbours")
    assert "neighbours" not in found(looks(Modelled(), quiet, busy))


def test_a_machine_without_memory():
    short = [
        Machine(memory_limit=2**30, memory_used=2**30 - 1),
        Machine(memory_total=2**36, memory_available=2**30),
        Machine(memory_pressure=20.0),
    ]
    for machine in short:
        assert "memory-short" in found(looks(Modelled(), machine, machine))
    roomy = Machine(memory_limit=2**30, memory_used=2**29, memory_total=2, memory_available=1)
    assert "memory-short" not in found(looks(Modelled(), roomy, roomy))


def test_an_idle_modelled_server_is_healthy_and_says_what_it_cannot_show():
    server = Modelled()
    for machine in (None, Machine()):
        server.machine = machine
        assert found(twice(server)) == {}
    assert "no step ran in 5.0 s" in not_judged(twice(server))[0]


# --- the list


def test_what_waits_for_memory_does_not_wait_for_room_in_the_batch():
    assert KV_FREE == KV_PRESSURE


def test_every_metric_that_rules_name_exists():
    page = Metrics("m").text().decode()
    names = set(re.findall(r"^# TYPE (\S+)", page, re.M)) | set(
        re.findall(r"^(\w\S*?)[{ ]", page, re.M)
    )
    for file in (ROOT / "src/octavo/doctor").glob("*.py"):
        used = set(re.findall(r'"((?:vllm|octavo|process)[:_][a-z_]+)"', file.read_text()))
        assert used - names - {"octavo:config_info"} == set(), file


def test_every_flag_that_rules_name_exists():
    parser = Parser(prog="octavo serve")
    serve.add_arguments(parser)
    for rule in RULES:
        for flag in re.findall(r"--[a-z-]+", f"{rule.cause} {rule.cure}"):
            assert parser.knows(flag), f"{rule.name}: {flag}"


def test_the_rules_and_the_table_of_diagnosis_are_in_step():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    page = re.sub(r'^\| <a id="([a-z-]+)"></a>(?=`\1`)', "| ", page, flags=re.M)  # for links
    rows = re.findall(r"^\| `([a-z-]+)` \| (.+) \| (.+) \| (.+) \|$", page, re.M)
    assert rows == [(rule.name, rule.symptom, rule.cause, rule.cure) for rule in RULES]


def test_every_rule_has_a_name_of_its_own_and_a_test_that_provokes_it():
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    text = Path(__file__).read_text()
    assert [name for name in names if f'"{name}")' not in text and f'"{name}" in' not in text
            and f'["{name}"]' not in text and f'"{name}"\n' not in text] == []  # fmt: skip
