"""Ids, defaults, limits of the queue, and what a call leaves in the log."""

import concurrent.futures
import functools
import logging
import threading
import time

import pytest

from octavo.config import EngineConfig
from octavo.server.options import ServerConfig
from octavo.server.service import _served_names
from serving import Server, wait_until, write_model


@pytest.mark.parametrize(
    ("model", "served", "names"),
    [
        ("org/name", (), ("org/name",)), ("smollm2", (), ("smollm2",)),
        ("/some/where/Model-7B/", (), ("Model-7B",)), ("./x/tiny.gguf", (), ("tiny",)),
        ("tiny.gguf", (), ("tiny",)), ("/some/where", ("a", "b", "a"), ("a", "b")),
    ],
)  # fmt: skip
def test_a_path_is_not_a_name(model, served, names):
    options = ServerConfig(served_model_name=served)
    assert _served_names(EngineConfig(model=model), options) == names


def test_smp_21_the_model_s_defaults_over_http(tmp_path, engine_path, caplog):
    defaults = {"temperature": 0.5, "repetition_penalty": 1.5}
    model = write_model(tmp_path / "named", generation=defaults)
    caplog.set_level(logging.INFO)
    for wanted, engine in ((defaults, {}), ({}, {"generation_config": "octavo"})):
        with Server(model, {}, **engine) as server:
            assert server.service.defaults == wanted
            server.assert_alive()
    assert (
        "sampling defaults from the model: temperature=0.5, repetition_penalty=1.5" in caplog.text
    )


def test_one_line_per_request_without_its_text(server, caplog):
    caplog.set_level(logging.INFO)
    prompt = server.say("AB") + " secret"
    reply = server.complete(prompt, request_id="the-id")
    server.post("/v1/completions", prompt=prompt, temperature=7)
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("octavo")]
    assert len(lines) == 2
    assert lines[0].startswith(f"cmpl-the-id prompt={len(prompt)} cached=0 output=3 finish=stop")
    assert lines[0].endswith(" client=127.0.0.1")
    assert reply["id"] == "cmpl-the-id"
    assert "refused: 400 invalid_value param='temperature' client=127.0.0.1" in lines[1]
    assert "secret" not in "".join(lines)


def test_texts_are_logged_only_if_asked_for(make_server, caplog):
    caplog.set_level(logging.INFO)
    server = make_server({"log_requests": True})
    server.stream(server.say("AB") + " secret")
    assert "secret" in caplog.text
    assert "answers=['AB']" in caplog.text


def test_a_full_queue_is_503_with_retry_after(make_server):
    server = make_server(max_num_seqs=2, max_waiting=3)

    def ask(_):
        return server.post("/v1/completions", prompt="!slow" + server.say("ABC"), max_tokens=8)

    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        replies = list(pool.map(ask, range(40)))
    good = [r for r in replies if r.status_code == 200]
    full = [r for r in replies if r.status_code == 503]
    assert len(good) >= 5
    assert len(good) + len(full) == 40
    assert all(r.json()["choices"][0]["text"] == "ABC" for r in good)
    assert all(r.headers["retry-after"] == "1" for r in full)
    assert all(r.json()["error"]["code"] == "queue_full" for r in full)
    # More prompts than there is room are refused whole.
    assert server.post("/v1/completions", prompt=["x"] * 6).status_code == 503
    rejected = server.metric("vllm:admission_rejections_total", reason="queue_full")
    assert rejected == len(full) + 1
    server.assert_idle()


def test_what_the_scheduler_sheds_is_503_with_retry_after_also_for_a_stream(make_server):
    """The error keeps its type over the process border, and comes before a stream starts."""
    policy = "slo,p99_ttft_ms=1,shed=true"
    server = make_server(max_num_seqs=1, max_num_batched_tokens=16, scheduler=policy)
    body = {"prompt": "!slow hello " * 3, "max_tokens": 30, "ignore_eos": True}

    def ask(stream):
        return server.post("/v1/completions", **body, stream=stream)

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        replies = []
        for i in range(12):
            replies.append(pool.submit(ask, i % 2 == 1))
            time.sleep(0.05)
        replies = [reply.result() for reply in replies]
    shed = [reply for reply in replies if reply.status_code != 200]
    assert {reply.status_code for reply in shed} == {503}
    assert {reply.request.content.count(b"true") for reply in shed} == {1, 2}  # whole and streamed
    for reply in shed:
        assert reply.headers["retry-after"] == "1"
        assert reply.headers["content-type"] == "application/json"
        assert reply.json()["error"]["code"] == "queue_full"
        assert "requests wait" in reply.json()["error"]["message"]
    for reply in replies:
        assert reply.status_code == 503 or "error" not in reply.text
    assert server.metric("vllm:admission_rejections_total", reason="queue_full") == len(shed)
    assert server.metric("octavo:requests_received_total") == 12 - len(shed)
    server.assert_idle()
    wait_until(lambda: server.metric("octavo:slo_shed_total") == len(shed), 3)


def test_several_prompts_that_are_shed_leave_nothing_behind(make_server):
    policy = "slo,p99_ttft_ms=1,shed=true"
    server = make_server(max_num_seqs=1, max_num_batched_tokens=16, scheduler=policy)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ask = functools.partial(server.post, "/v1/completions", max_tokens=40, ignore_eos=True)
        running = []
        for count in (1, 2):
            running.append(pool.submit(ask, prompt="!slow " * 3))
            wait_until(lambda count=count: server.service.client.in_flight == count)
            time.sleep(0.1)
        reply = ask(prompt=["a", "b", "c"])
        assert reply.status_code == 503
        assert server.service.client.in_flight == 2
        assert all(reply.result().status_code == 200 for reply in running)
    server.assert_idle()


def test_a_deadline_orders_what_waits(make_server):
    server = make_server(max_num_seqs=1, scheduler="priority")
    ended = []

    def ask(name, **fields):
        server.post("/v1/completions", prompt="!slow", ignore_eos=True, **fields)
        ended.append(name)

    first = {"max_tokens": 60}  # it outlasts the arrival of the others
    late, soon = {"max_tokens": 10, "deadline": 60}, {"max_tokens": 10, "deadline": 1.5}
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for count, (name, fields) in enumerate(
            [("first", first), ("late", late), ("soon", soon)], start=1
        ):
            pool.submit(ask, name, **fields)
            wait_until(lambda count=count: server.service.client.in_flight == count)
    assert ended == ["first", "soon", "late"]
    reply = server.post("/v1/completions", prompt="x", deadline=-1)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "deadline"


def test_a_queue_of_no_length_still_runs_what_fits(make_server):
    server = make_server(max_num_seqs=2, max_waiting=0)
    replies = []

    def ask():
        replies.append(server.post("/v1/completions", prompt=["!slow", "!slow"], max_tokens=20))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: server.service.client.in_flight == 2)
    assert server.post("/v1/completions", prompt="x").status_code == 503
    thread.join()
    assert replies[0].status_code == 200
    server.assert_alive()


def test_srv_14_long_texts_do_not_hold_up_the_rest(server):
    """Probes and a stream go on while long prompts come in."""
    gaps, done = [], threading.Event()

    def probe():
        while not done.is_set():
            begun = time.monotonic()
            assert server.http.get("/health").status_code == 200
            gaps.append(time.monotonic() - begun)
            time.sleep(0.02)

    prober = threading.Thread(target=probe)
    prober.start()
    bodies = [
        ("/v1/completions", {"prompt": "word " * 2**20}),
        ("/tokenize", {"prompt": "word " * 600}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 10_000}),
    ]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        codes = list(pool.map(lambda b: server.post(b[0], **b[1]).status_code, bodies * 2))
    done.set()
    prober.join()
    assert codes == [400, 200, 400] * 2
    # Generous: this machine runs other tests too. On the loop it would take seconds.
    assert max(gaps) < 2


def test_the_client_is_the_one_that_a_trusted_proxy_names(server, make_server, caplog):
    caplog.set_level(logging.INFO)

    def client(server, forwarded):
        caplog.clear()
        server.http.post(
            "/v1/completions", json={"prompt": server.say("A")},
            headers={"X-Forwarded-For": forwarded},
        )  # fmt: skip
        line = next(r.getMessage() for r in caplog.records if " client=" in r.getMessage())
        return line.rpartition(" client=")[2]

    # A proxy on this machine is trusted.
    assert client(server, "203.0.113.9") == "203.0.113.9"
    assert client(server, "2001:db8::1") == "2001:db8::1"
    forged = client(server, "1.2.3.4 finish=stop [x]")
    assert not set(forged) & set(" =[]")
    wary = make_server({"forwarded_allow_ips": ("192.0.2.1",)})
    assert client(wary, "203.0.113.9") == "127.0.0.1"


def test_the_line_of_a_request_has_its_figures_as_fields(server, caplog):
    caplog.set_level(logging.INFO)
    server.complete(server.say("AB"), request_id="x1")
    (record,) = (r for r in caplog.records if hasattr(r, "fields"))
    assert record.fields["event"] == "request"
    assert record.fields["request_id"] == "cmpl-x1"
    assert record.fields["output_tokens"] == 3
    assert record.fields["finish_reasons"] == ["stop"]
    assert 0 < record.fields["ttft_seconds"] <= record.fields["total_seconds"]
