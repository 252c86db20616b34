"""A trace on disk: readable after a kill, bounded, and nobody's problem when the disk is full."""

import os
import signal
import time

import pytest

import trace_rules
from octavo.config import EngineConfig
from octavo.engine import trace_file
from octavo.engine.preflight import check_options
from octavo.engine.trace_file import TraceFile, TraceWriter, earlier_path, trace_path
from octavo.errors import ConfigError
from serving import wait_until


class Lines:
    """Events that are their records."""

    def begin(self):
        return [{"begin": 1}]

    def of(self, record):
        return [{"record": record}]

    def end(self, complete):
        return [{"end": complete}]


def records(events):
    return [event["record"] for event in events if "record" in event]


@pytest.mark.parametrize(("given", "what"), [
    ("", "must be a file"), (".", "must be a file"), ("no/such/trace.json", "no folder 'no/such'"),
    ("/dev/full", "no regular file"), ("a\0b", "cannot be a file: embedded null"),
    ("x" * 300, "cannot be a file: File name too long"), ("a\ud800", "cannot be a file: 'utf-8'"),
])  # fmt: skip
def test_a_place_that_cannot_be_written_is_said_before_the_start(
    tmp_path, monkeypatch, given, what
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=what):
        check_options(EngineConfig(trace=given))
    assert list(tmp_path.iterdir()) == []


def test_the_files_of_all_engines_are_looked_at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.engine1.json").mkdir()
    with pytest.raises(ConfigError, match=r"must be a file, .*not 't.engine1.json'"):
        check_options(EngineConfig(trace="t.json", data_parallel_size=2))
    with pytest.raises(ConfigError, match="it is no regular file"):
        TraceFile(tmp_path / "t.engine1.json", 1000, Lines())
    assert [path.name for path in tmp_path.iterdir()] == ["t.engine1.json"]


def test_two_engines_with_one_name_do_not_lose_the_later_one(tmp_path, caplog):
    path = tmp_path / "t.json"
    first = TraceWriter(TraceFile(path, 1000, Lines()))
    second = TraceFile(path, 1000, Lines())
    second.begin()
    second.add(["second"])
    for i in range(100):
        first.put(i)
    first.close()
    second.close()
    assert f"the trace ends: {path} cannot be written: another engine writes to" in caplog.text
    assert records(trace_rules.read(path)) == ["second"]
    assert records(trace_rules.read(earlier_path(path)))[:3] == [0, 1, 2]


def test_a_file_that_was_moved_away_is_followed_by_another(tmp_path):
    path = tmp_path / "t.json"
    file = TraceFile(path, 1000, Lines())
    file.begin()
    path.rename(tmp_path / "mine.json")
    for i in range(60):
        file.add([i])
    file.close()
    assert records(trace_rules.read(tmp_path / "mine.json"))[0] == 0
    assert records(trace_rules.read(path))[-1] == 59


def test_a_descriptor_that_may_be_another_s_by_now_is_left_alone(tmp_path, monkeypatch):
    file = TraceFile(tmp_path / "t.json", 1000, Lines())
    file.begin()

    def replace(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(trace_file.os, "replace", replace)
    number = file._descriptor
    with pytest.raises(OSError, match="Read-only"):
        file.add(range(100))
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    assert other == number  # as files are numbered
    file.give_up()
    assert os.fstat(other).st_size == 0
    os.close(other)


def test_a_folder_that_may_not_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ConfigError, match="cannot be written to; name another file"):
        check_options(EngineConfig(trace=str(tmp_path / "t.json")))


def test_a_file_that_cannot_be_made_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be written: No such file or directory"):
        TraceFile(tmp_path / "gone" / "t.json", 1 << 20, Lines())


def test_the_last_part_is_kept(tmp_path):
    path = tmp_path / "t.json"
    earlier_path(path).write_text("of another run")
    file = TraceFile(path, 1000, Lines())
    assert not earlier_path(path).exists()
    file.begin()
    for i in range(200):
        file.add([i])
    file.close()
    parts = [trace_rules.read(part) for part in (earlier_path(path), path)]
    kept = [number for events in parts for number in records(events)]
    assert kept == list(range(kept[0], 200))
    assert len(kept) > 20
    assert parts[0][-1] == {"end": False}
    assert parts[1][-1] == {"end": True}


def test_what_an_engine_wrote_before_it_died_is_kept_for_the_next_one(tmp_path):
    path = tmp_path / "t.json"
    path.write_text("[\n{}")
    file = TraceFile(path, 1000, Lines())
    file.begin()
    file.close()
    assert earlier_path(path).read_text() == "[\n{}"
    assert trace_rules.read(path)[0] == {"begin": 1}


def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path, monkeypatch, caplog):
    path = tmp_path / "t.json"
    real, room = os.write, [400]

    def write(descriptor, content):
        """A disk with a little room: some of what is written fits."""
        if len(content) <= room[0]:
            room[0] -= len(content)
            return real(descriptor, content)
        if room[0]:
            fitting, room[0] = content[: room[0]], 0
            return real(descriptor, fitting)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace_file.os, "write", write)
    monkeypatch.setattr(trace_file, "FLUSH_SECONDS", 0.001)
    writer = TraceWriter(TraceFile(path, 1 << 20, Lines()))
    while not writer._failed:
        writer.put("x" * 20)
        time.sleep(0.0005)
    writer.put("nobody notices")
    writer.close()
    assert not writer._records
    monkeypatch.undo()
    events = trace_rules.read(path, closed=False)  # up to the last whole event
    assert set(records(events)) <= {"x" * 20}
    assert [r.message for r in caplog.records] == [
        f"the trace ends: {path} cannot be written: No space left on device"
    ]


def test_a_disk_that_is_too_slow_loses_records_and_says_how_many(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trace_file, "_MOST_RECORDS", 10)
    monkeypatch.setattr(trace_file, "FLUSH_SECONDS", 60)
    writer = TraceWriter(TraceFile(tmp_path / "t.json", 1 << 20, Lines()))
    for i in range(15):
        writer.put(i)
    writer.close()
    assert records(trace_rules.read(tmp_path / "t.json")) == list(range(10))
    assert "the trace lacks 5 records" in caplog.text


def test_a_killed_process_leaves_a_file_that_can_be_read(tmp_path):
    path = tmp_path / "t.json"
    child = os.fork()
    if child == 0:
        writer = TraceWriter(TraceFile(path, 1 << 30, Lines()))
        for i in range(1 << 30):
            writer.put(i)
            time.sleep(1e-4)
    try:
        wait_until(lambda: path.exists() and path.stat().st_size > 1000)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert not path.read_bytes().rstrip().endswith(b"]")
    found = records(trace_rules.read(path, closed=False))
    assert found == list(range(len(found)))
    assert found


def test_a_fork_does_not_end_the_file(tmp_path):
    writer = TraceWriter(TraceFile(tmp_path / "t.json", 1 << 20, Lines()))
    child = os.fork()
    if child == 0:
        writer.close()
        os._exit(0)
    os.waitpid(child, 0)
    writer.put(1)
    writer.close()
    writer.close()
    assert records(trace_rules.read(tmp_path / "t.json")) == [1]


def test_names_of_files():
    assert str(trace_path("a/t.json")) == "a/t.json"
    assert str(trace_path("a/t.json", 1, 2)) == "a/t.engine1.json"
    assert str(earlier_path(trace_path("a/t.json", 1, 2))) == "a/t.engine1.earlier.json"
