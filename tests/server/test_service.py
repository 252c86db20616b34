"""Ids, defaults, limits of the queue, and what a call leaves in the log."""

import concurrent.futures
import logging
import threading
import time

import pytest

from octavo.config import EngineConfig, ServerConfig
from octavo.server.service import _served_names
from serving import Server, wait_until, write_model


@pytest.mark.parametrize(
    ("model", "served", "names"),
    [
        ("org/name", None, ("org/name",)), ("smollm2", None, ("smollm2",)),
        ("/some/where/Model-7B/", None, ("Model-7B",)), ("./x/tiny.gguf", None, ("tiny",)),
        ("tiny.gguf", None, ("tiny",)), ("/some/where", "a, b,a", ("a", "b")),
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
    assert reply["id"] == "cmpl-the-id"
    assert "refused: 400 invalid_value param='temperature'" in lines[1]
    assert "secret" not in "".join(lines)


def test_texts_are_logged_only_if_asked_for(make_server, caplog):
    caplog.set_level(logging.INFO)
    server = make_server({"log_requests": True})
    server.stream(server.say("AB") + " secret")
    patience = time.monotonic() + 10  # the line is written after the last chunk has gone out
    while "answers=" not in caplog.text and time.monotonic() < patience:
        time.sleep(0.01)
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
