"""Two looks, their periods, and the file that keeps them."""

import json

import pytest

from modelled import Modelled, twice
from octavo.doctor.machine import Machine
from octavo.doctor.rules import diagnose
from octavo.doctor.snapshot import Look, Snapshot, down_of, reason_of, spoken
from octavo.errors import ConfigError, RequestError


def test_rates_are_of_the_time_between_the_looks():
    server = Modelled()
    for _ in range(10):
        server.metrics.received(1, 1)
    before = server.look()
    for _ in range(20):
        server.metrics.received(1, 1)
    snapshot = Snapshot("u", before, server.look())
    assert snapshot.rate("octavo:requests_received_total") == 4
    assert snapshot.recent.count("octavo:requests_received_total") == 20
    assert snapshot.life.count("octavo:requests_received_total") == 30
    assert snapshot.life.words == "since the start, 10.1 min ago"
    assert snapshot.period("octavo:requests_received_total", 20) is snapshot.recent
    assert snapshot.period("octavo:requests_received_total", 21) is snapshot.life
    assert snapshot.period("octavo:requests_received_total", 31) is None


def test_a_file_gives_the_same_diagnosis(tmp_path):
    server = Modelled()
    server.machine = Machine(memory_pressure=50.0)
    server.update(policy_errors=3)
    snapshot = twice(server)
    snapshot.save(tmp_path / "s.json")
    loaded = Snapshot.load(tmp_path / "s.json")
    assert diagnose(loaded) == diagnose(snapshot)
    assert {finding.rule for finding in diagnose(loaded)} == {"policy-errors", "memory-short"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "not a snapshot of octavo doctor .--save.*other"),
        ({"before": None}, "not a snapshot of octavo doctor"),
        ({"before": {"time": 2e9, "metrics": ""}}, "its second look is before its first"),
        ({"now": {"time": 2e9, "metrics": "x 1\n"}}, "not a snapshot of an Octavo server.*another"),
    ],
)
def test_files_that_are_no_snapshots(tmp_path, change, message):
    file = tmp_path / "s.json"
    twice(Modelled()).save(file)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ConfigError, match=message):
        Snapshot.load(file)


@pytest.mark.parametrize("content", [b"", b"[]", b"vllm:x 1\n", b"\xff\xfe", b'{"format": 1}'])
def test_other_files(tmp_path, content):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(ConfigError, match="f is not a snapshot of octavo doctor"):
        Snapshot.load(tmp_path / "f")


def test_folders_and_files_that_cannot_be_written(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        Snapshot.load(tmp_path)
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        twice(Modelled()).save(tmp_path)


def test_pages_of_another_server():
    with pytest.raises(RequestError, match=r"u/metrics has metrics of another program"):
        Snapshot("u", Look(1.0, "x 1\n"), Look(2.0, "x 1\n"))


def test_reasons_of_health():
    assert reason_of(Look(0, "", 503, '{"error": {"message": "loading"}}')) == "loading"
    texts = ("<html>", "[]", '{"error": 1}', "[" * 9999)
    assert [reason_of(Look(0, "", 502, text)) for text in texts] == [""] * 4
    assert down_of(Look(0, "", 200, '{"serving": 1, "down": {"0": "dead"}}')) == {"0": "dead"}
    assert [down_of(Look(0, "", 200, text)) for text in (*texts, '{"serving": 1}')] == [{}] * 5


def test_spans_of_time():
    assert [spoken(s) for s in (5, 90, 5400, 100_000)] == ["5 s", "1.5 min", "1.5 h", "1.2 d"]
