"""Traces in both formats, and one sentence for each way in which one can be wrong."""

import json
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.sim.requests import Job
from octavo.sim.traces import read_trace

HEAD = "arrival,prompt_tokens,output_tokens"


def trace(folder: Path, text: str, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_both_formats_say_the_same(tmp_path: Path) -> None:
    rows = [
        {"arrival": 0, "prompt_tokens": 10, "output_tokens": 5},
        {"arrival": 0.5, "prompt_tokens": 40, "output_tokens": 1, "priority": -2,
         "prefix_group": "a"},
        {"arrival": 0.5, "prompt_tokens": 30, "output_tokens": 7, "prefix_group": "a"},
        {"arrival": 2, "prompt_tokens": 99, "output_tokens": 8, "prefix_group": "b",
         "prefix_tokens": 64},
    ]  # fmt: skip
    lines = trace(tmp_path, "\n".join(json.dumps(row) for row in rows) + "\n\n", "t.jsonl")
    columns = "arrival, prompt_tokens, output_tokens, priority, prefix_group, prefix_tokens"
    table = trace(tmp_path, f"{columns}\n0,10,5,,,\n0.5,40,1,-2,a,\n0.5,30,7,,a,\n2,99,8,,b,64\n")
    wanted = [
        Job(0.0, 10, 5), Job(0.5, 40, 1, -2, 1, 30), Job(0.5, 30, 7, 0, 1, 30),
        Job(2.0, 99, 8, 0, 2, 64),
    ]  # fmt: skip
    assert read_trace(lines) == read_trace(table) == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arrival,prompt_tokens\n0,1\n", "line 1: the column output_tokens is missing; needed"),
        (f"{HEAD},prioritty\n", "line 1: unknown column 'prioritty'; did you mean 'priority'?"),
        (f"{HEAD}\n0,1,1\n0,-5,1\n", "line 3: prompt_tokens is -5; it must be at least 1"),
        (f"{HEAD}\n0,1,0\n", "line 2: output_tokens is 0; it must be at least 1"),
        (f"{HEAD}\n-1,1,1\n", "line 2: arrival is -1; it must be seconds, from 0"),
        (f"{HEAD}\nnan,1,1\n", "line 2: arrival is nan; it must be seconds, from 0"),
        (f"{HEAD}\n0,1.5,1\n", "line 2: prompt_tokens is '1.5'; it must be a whole number"),
        (f"{HEAD}\n0,many,1\n", "line 2: prompt_tokens is 'many'; it must be a number"),
        (f"{HEAD}\n0,1\n", "line 2: output_tokens is missing; it must be a number"),
        (f"{HEAD}\n0,1,1,1\n", "line 2: more values than the 3 columns"),
        (f"{HEAD}\n3,1,1\n2,1,1\n", r"line 3: arrival is 2, before that of the request above \(3"),
        (f"{HEAD},prefix_tokens\n0,1,1,8\n", "line 2: prefix_tokens needs a prefix_group"),
        (f"{HEAD}\n", "has no requests"),
        (f"{HEAD},arrival\n0,1,1,5\n", "line 1: the column 'arrival' is there twice"),
        (f"{HEAD}\n1700000000000,1,1\n", r"line 2: arrival is 1.7e\+12; it must be seconds, from"),
        (f"{HEAD}\n0,1e300,1\n", r"line 2: prompt_tokens is 1e\+300; it must be at most"),
        (f'{HEAD}\n"{"9" * 200_000}', "line 2: no CSV .*field limit"),
        ("", "line 1: the column arrival is missing"),
    ],
)
def test_what_is_wrong_in_a_table_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(trace(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"arrival": 0}\n', "line 1: the column prompt_tokens is missing"),
        ('{"arrival": 0', "line 1: no JSON"),
        ("[" * 100_000, "line 1: no JSON"),
        ('{"arrival": 0, "prompt_tokens": 1%s, "output_tokens": 1}' % ("0" * 400), "must be a num"),
        (
            '{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1, "prefix_group": []}',
            r"prefix_group is \[\]; it must be a name",
        ),
        ("[1]\n", r"line 1: must be an object, not \[1\]"),
        ('{"arrival": true, "prompt_tokens": 1, "output_tokens": 1}', "arrival is True; it must"),
        ('{"arrival": 0, "prompt_tokens": [], "output_tokens": 1}', r"prompt_tokens is \[\]; it"),
        ('{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1, "x": 1}', "unknown column 'x'"),
    ],
)
def test_what_is_wrong_in_lines_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(trace(tmp_path, text, "t.jsonl"))


def test_what_spreadsheets_and_editors_add_is_no_request(tmp_path: Path) -> None:
    wanted = [Job(0.0, 1, 2), Job(1.0, 3, 4)]
    table = f"\ufeff\n\n{HEAD}\r\n\n 0 ,1,2\n   \n1,3,4\n\n"
    assert read_trace(trace(tmp_path, table)) == wanted


def test_lines_end_with_a_newline_only(tmp_path: Path) -> None:
    row = {"arrival": 0, "prompt_tokens": 3, "output_tokens": 1, "prefix_group": "a\u2028\x85b"}
    text = "\ufeff" + json.dumps(row, ensure_ascii=False)
    assert read_trace(trace(tmp_path, text, "t.jsonl")) == [Job(0.0, 3, 1, 0, 1, 3)]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the trace .*none.csv cannot be read"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "b.csv")
