"""Requests go out at their times and are timed exactly, on a clock that only the test moves."""

import asyncio

import pytest
from tests.bench.virtual import HEAD, ScriptedServer, Step, answer, page, run, token

from octavo.bench.answer import Outcome
from octavo.bench.datasets import Sample
from octavo.bench.http import Address, Endpoint
from octavo.bench.load import Run, Target, first_model, wait_until_ready
from octavo.errors import ConfigError, OctavoError

ADDRESS = Address.parse("http://server:1")


def outcomes(
    server: ScriptedServer,
    times: list[float],
    max_concurrency: int | None = None,
    asked: int = 3,
    **target: object,
) -> tuple[list[Outcome], float]:
    async def work(clock) -> tuple[list[Outcome], float]:
        endpoint = Endpoint(ADDRESS, {}, server.connect)
        load = Run(endpoint, Target("m", **target), max_concurrency, clock)
        return await load.all([Sample(f"p{i}", 5, asked) for i in range(len(times))], times)

    return run(work)


def test_known_delays_are_measured_exactly() -> None:
    server = ScriptedServer(answer(2, 0.5, 1.5), answer(1, 1, 1))
    found, duration = outcomes(server, [0, 0.25])
    assert [(o.sent, o.ttft, o.itl, o.latency) for o in found] == [
        (0, 2, [0.5, 1.5], 4), (0.25, 1, [1, 1], 3)]  # fmt: skip
    assert [o.tpot for o in found] == [1, 1]
    assert duration == 4
    assert [o.ok for o in found] == [True, True]


def test_requests_are_sent_at_their_times_whatever_answers_do() -> None:
    server = ScriptedServer(*[answer(50)] * 4)
    outcomes(server, [0, 1, 1, 7])
    assert server.times == [0, 1, 1, 7]


def test_a_request_that_waits_for_its_turn_is_timed_when_it_is_sent() -> None:
    server = ScriptedServer(answer(4), answer(2), answer(1))
    found, duration = outcomes(server, [0, 0, 0], max_concurrency=1)
    assert server.times == [0, 4, 6]
    assert [o.ttft for o in found] == [4, 2, 1]
    assert [o.sent for o in found] == [0, 4, 6]
    assert duration == 7
    assert server.connections == 1  # kept open from answer to answer


@pytest.mark.parametrize(
    ("script", "kind", "says"),
    [
        (page(503, b'{"error": {"message": "the queue is full"}}'), "HTTP 503", "queue is full"),
        (page(502, b"<html>bad gateway"), "HTTP 502", "bad gateway"),
        ([(0.0, HEAD), (1.0, token())], "connection lost", "RemoteProtocolError"),
        ([], "connection lost", "RemoteProtocolError"),
        ([(0.0, HEAD), (1.0, token("a", "length")), (0, b"0\r\n\r\n")], "no [DONE]", "[DONE]"),
    ],
)
def test_failures_have_their_kinds(script: list[Step], kind: str, says: str) -> None:
    ((found,), _) = outcomes(ScriptedServer(script, close=True), [0])
    assert found.failure == kind
    assert says in found.error


def test_a_request_without_an_end_times_out() -> None:
    ((found,), duration) = outcomes(ScriptedServer([(0.0, HEAD)]), [0], timeout=30.0)
    assert (found.failure, duration) == ("timed out", 30)


def test_a_server_that_is_not_there_is_a_failure() -> None:
    class Absent(ScriptedServer):
        async def connect(self, host: str, port: int, ssl: object = None) -> tuple:
            raise ConnectionRefusedError("refused")

    ((found,), _) = outcomes(Absent(), [0])
    assert (found.failure, found.error) == (
        "connection lost", "ConnectionRefusedError: refused")  # fmt: skip


def test_an_idle_connection_that_the_server_closed_is_replaced() -> None:
    server = ScriptedServer(answer(1), [], answer(2), close=True)
    found, _ = outcomes(server, [0, 5])
    assert [o.ok for o in found] == [True, True]
    assert found[1].ttft == 2
    assert server.connections == 2


def test_bodies_ask_for_what_is_measured() -> None:
    server = ScriptedServer(answer(1, 1, 1), answer(1, 1, 1))
    outcomes(server, [0], ignore_eos=True, extra={"temperature": 0}, request_id_prefix="run-")
    assert server.bodies[0] == {
        "model": "m", "prompt": "p0", "max_tokens": 3, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True}, "temperature": 0}  # fmt: skip
    assert b"X-Request-Id: run-0" in server.heads[0]
    assert server.heads[0].startswith(b"POST /v1/completions HTTP/1.1\r\nHost: server:1")
    chat = ScriptedServer(answer(1, 1, 1))
    outcomes(chat, [0], api="chat", path="/v1/chat/completions")
    assert chat.bodies[0]["messages"] == [{"role": "user", "content": "p0"}]
    assert chat.bodies[0]["max_completion_tokens"] == 3


def ask_model(server: ScriptedServer) -> str:
    async def work(clock) -> str:
        return await first_model(Endpoint(ADDRESS, {"Authorization": "Bearer k"}, server.connect))

    return run(work)


def test_the_first_listed_model_is_taken() -> None:
    server = ScriptedServer(page(200, b'{"data": [{"id": "one"}, {"id": "two"}]}'))
    assert ask_model(server) == "one"
    assert b"Authorization: Bearer k" in server.heads[0]


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (page(401, b'{"error": {"message": "a key is needed"}}'), "401: a key is needed"),
        (page(200, b'{"data": []}'), "--model"),
        (page(200, b"<html>"), "--model"),
        ([], "no server at server:1"),
    ],
)
def test_a_server_that_lists_no_model_is_said(script: list[Step], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ask_model(ScriptedServer(script, close=True))


def test_the_check_for_readiness_asks_again_until_it_succeeds() -> None:
    async def check(clock, server: ScriptedServer, seconds: float) -> float:
        load = Run(Endpoint(ADDRESS, {}, server.connect), Target("m"), None, clock)
        await wait_until_ready(load, Sample("p", 1, 1), seconds, clock)
        return asyncio.get_running_loop().time()

    loading = page(503, b"loading")
    assert run(lambda c: check(c, ScriptedServer(loading, loading, answer(1)), 9)) == 3
    with pytest.raises(OctavoError, match="HTTP 503: loading"):
        run(lambda c: check(c, ScriptedServer(*[loading] * 9), 4))


def test_done_is_told_of_each_outcome() -> None:
    told: list[Outcome] = []

    async def work(clock) -> None:
        server = ScriptedServer(answer(2), answer(1))
        load = Run(Endpoint(ADDRESS, {}, server.connect), Target("m"), None, clock, told.append)
        await load.all([Sample("a", 1, 1), Sample("b", 2, 1)], [0, 0])

    run(work)
    assert [o.prompt_len for o in told] == [2, 1]
