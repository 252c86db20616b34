"""What the specification of the Chrome trace event format asks of a trace."""

import json
from pathlib import Path

REQUIRED = {"ph", "name", "pid", "tid", "ts"}
MORE = {"X": {"dur"}, "b": {"cat", "id"}, "n": {"cat", "id"}, "e": {"cat", "id"}, "M": {"args"},
        "C": {"args"}, "i": {"s"}}  # fmt: skip
METADATA = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}


def read(path: Path, closed: bool = True) -> list[dict]:
    """The events of a file: whole, or as a killed process leaves it, without the bracket."""
    text = path.read_text()
    if not closed and not text.rstrip().endswith("]"):
        text += "]"
    events = json.loads(text)
    # One a line, so that tools for lines can be used.
    assert text.count("\n") >= len(events)
    return events


def check(events: list[dict], balanced: bool = True) -> None:
    """balanced: whether every async event must have its end."""
    for event in events:
        kind = event["ph"]
        assert event.keys() >= REQUIRED | MORE[kind], event
        assert isinstance(event["pid"], int), event
        assert isinstance(event["tid"], int), event
        assert isinstance(event["ts"], int | float), event
        assert event["ts"] >= 0, event
        if kind == "M":
            assert METADATA[event["name"]] in event["args"], event
        elif kind == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values()), event
        elif kind == "i":
            assert event["s"] in ("g", "p", "t"), event
    _check_names(events)
    _check_slices(events)
    _check_async(events, balanced)


def _check_names(events: list[dict]) -> None:
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    assert {e["pid"] for e in events} <= processes
    assert {(e["pid"], e["tid"]) for e in events} <= named


def _check_slices(events: list[dict]) -> None:
    """Complete events of one thread are nested or apart, never crossed."""
    threads: dict[tuple, list[tuple]] = {}
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            span = (event["ts"], event["ts"] + event["dur"])
            threads.setdefault((event["pid"], event["tid"]), []).append(span)
    for spans in threads.values():
        ends: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while ends and ends[-1] <= start:
                ends.pop()
            assert not ends or end <= ends[-1], "two slices cross"
            ends.append(end)


def _check_async(events: list[dict], balanced: bool) -> None:
    """Nestable async events of one id are a tree: ends match the latest begin, times rise."""
    trees: dict[tuple, list[dict]] = {}
    last: dict[tuple, float] = {}
    for event in events:
        if event["ph"] not in "bne":
            continue
        key = (event["pid"], event["cat"], event["id"])
        assert event["ts"] >= last.get(key, 0), event
        last[key] = event["ts"]
        opened = trees.setdefault(key, [])
        if event["ph"] == "b":
            opened.append(event)
        elif event["ph"] == "n":
            assert opened, event
        else:
            assert opened, event
            assert opened.pop()["name"] == event["name"], event
    if balanced:
        assert {key for key, opened in trees.items() if opened} == set()


def story(events: list[dict], key: str) -> list[str]:
    """The phases of one choice in their order, without chunks."""
    return [
        event["name"] for event in events
        if event.get("id") == key and event["ph"] in "bn" and event["name"] != "chunk"
    ]  # fmt: skip
