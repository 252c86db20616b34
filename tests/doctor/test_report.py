"""What is shown: for readers, and as JSON."""

import json

import msgspec

from modelled import Modelled, twice
from octavo.doctor.machine import Machine
from octavo.doctor.report import as_json, as_text
from octavo.doctor.rules import RULES, diagnose
from octavo.doctor.snapshot import Snapshot


def test_a_symptom_with_evidence_cause_and_cure():
    server = Modelled(max_num_seqs=2)
    server.update(running=2, waiting=9, kv_blocks_usage=0.25)
    snapshot = twice(server)
    text = as_text(snapshot, diagnose(snapshot), width=60)
    assert "now: 2 running, 9 waiting, 0 swapped; 25% of the KV cache held" in text
    assert "1. warning: requests wait although KV memory is free [batch-too-small]\n" in text
    assert "   evidence  9 waited, now 9; 2 run, and max_num_seqs is 2\n" in text
    assert "   cure      raise --max-num-seqs\n" in text
    assert "healthy" not in text
    assert max(map(len, text.splitlines()[5:])) <= 60


def test_a_healthy_server_and_hints():
    server = Modelled(enable_prefix_caching=False)
    server.machine = Machine()
    before = server.look()
    server.update(steps=1)
    snapshot = type(twice(server))("u", before, server.look())
    text = as_text(snapshot, [])
    assert text.endswith(f"\n\nhealthy: no symptom, by {len(RULES)} rules")
    for _ in range(9):
        server.metrics.received(1, 1)
        server.metrics.answered(90, 0, 1)
    hinted = twice(server)
    text = as_text(hinted, diagnose(hinted))
    assert "1. hint: prompts are most of the work" in text
    assert "healthy: no symptom, but hints" in text


def test_a_terminal_gets_no_control_characters():
    shown = as_text(twice(Modelled()), [])
    page = twice(Modelled()).now
    metrics = page.metrics.replace('model_name="', 'model_name="\x1b]0;evil\x07\x9b31m')
    assert metrics != page.metrics
    changed = msgspec.structs.replace(page, metrics=metrics, version="\x1b[2J")
    text = as_text(Snapshot("u", changed, changed), [])
    assert "?]0;evil??31m" in text
    assert text.replace("\n", "").isprintable()
    assert len(text.splitlines()) == len(shown.splitlines())


def test_json_has_all_of_it():
    server = Modelled()
    server.update(policy_errors=1)
    snapshot = twice(server)
    found = json.loads(json.dumps(as_json(snapshot, diagnose(snapshot))))
    assert found["healthy"] is False
    assert (found["model"], found["version"], found["seconds"]) == ("m", "1", 5.0)
    assert found["figures"]["requests_per_second"] == 0
    [finding] = found["findings"]
    assert finding["rule"] == "policy-errors"
    assert set(finding) == {"rule", "severity", "symptom", "evidence", "cause", "cure"}
    assert len(found["not_judged"]) == 2
