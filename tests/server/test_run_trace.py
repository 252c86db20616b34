"""The trace of a server: the engine's process writes the file, and ends it with itself."""

import trace_rules
from serving import Server


def test_an_engine_process_writes_a_trace_of_what_clients_asked(tmp_path, folder, engine_path):
    path = tmp_path / "trace.json"
    with Server(folder, {}, trace=str(path)) as server:
        server.complete(server.say("ABC"))
        engine = server.engine_pid
    events = trace_rules.read(path)
    trace_rules.check(events)
    assert {event["pid"] for event in events} == {engine}
    ended = [e["args"] for e in events if e["ph"] == "e" and e["name"] == "request"]
    assert ended == [{"finish_reason": "stop", "output_tokens": 2}]
    assert trace_rules.story(events, "r0")[0:2] == ["request", "queued"]
