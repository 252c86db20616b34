"""Traces: files of requests as they came, in CSV or JSON lines.

A request has `arrival` (seconds), `prompt_tokens` and `output_tokens`, and may have `priority`
(lower is earlier), `prefix_group` (a name: its requests share their first tokens) and
`prefix_tokens` (how many; default: as many as the shortest prompt of the group has).
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, brief, nearest, shown
from octavo.sim.requests import Job

_NEEDED = ("arrival", "prompt_tokens", "output_tokens")
_OPTIONAL = ("priority", "prefix_group", "prefix_tokens")
_COLUMNS = (*_NEEDED, *_OPTIONAL)
# Where a float still tells steps apart. Milliseconds since 1970, taken for seconds, are later.
LATEST = 1e11
_MOST = 2**53  # whole numbers that a float holds exactly


def read_trace(path: Path) -> list[Job]:
    """The requests of a file, in its order. Raises ConfigError, naming line and column."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets begin files with a mark
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}") from error
    is_json = path.suffix in (".jsonl", ".json", ".ndjson") or text.lstrip().startswith("{")
    groups: dict[str, int] = {}
    found: list[Job] = []
    for line, values in (_json_lines if is_json else _csv_lines)(path, text):
        job = _job(f"{path}, line {line}", values, groups)
        if found and job.arrival < found[-1].arrival:
            raise ConfigError(
                f"{path}, line {line}: arrival is {job.arrival:g}, before that of the request "
                f"above ({found[-1].arrival:g}); requests must be sorted by arrival"
            )
        found.append(job)
    if not found:
        raise ConfigError(f"the trace {path} has no requests")
    return _with_shared(found)


def _csv_lines(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.reader(io.StringIO(text), skipinitialspace=True)
    columns: list[str] | None = None
    try:
        for cells in reader:
            where = f"{path}, line {reader.line_num}"
            if len(cells) < 2 and not "".join(cells).strip():
                continue
            if columns is None:
                columns = [name.strip() for name in cells]
                _check_columns(where, columns)
                continue
            if len(cells) > len(columns):
                raise ConfigError(f"{where}: more values than the {len(columns)} columns")
            padded = (*cells, *("",) * (len(columns) - len(cells)))
            values = zip(columns, padded, strict=True)
            yield reader.line_num, {name: value.strip() or None for name, value in values}
    except csv.Error as error:  # such as a quote that nothing closes
        raise ConfigError(f"{path}, line {reader.line_num}: no CSV ({error})") from error
    if columns is None:
        _check_columns(f"{path}, line 1", [])


def _json_lines(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    # Not `splitlines`: strings may hold other characters that end lines in some scripts.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: no JSON ({brief(error, 120)})") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: must be an object, not {shown(values)}")
        _check_columns(where, list(values))
        yield number, values


def _check_columns(where: str, names: list[str]) -> None:
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ConfigError(f"{where}: the column {name!r} is there twice")
        if name not in _COLUMNS:
            raise ConfigError(
                f"{where}: unknown column {shown(name)}{nearest(name, _COLUMNS)}; there are "
                f"{', '.join(_COLUMNS)}"
            )
    for name in _NEEDED:
        if name not in names:
            raise ConfigError(f"{where}: the column {name} is missing; needed are "
                              f"{', '.join(_NEEDED)}")  # fmt: skip


def _job(where: str, values: Mapping[str, Any], groups: dict[str, int]) -> Job:
    arrival = _number(where, "arrival", values["arrival"])
    if not 0 <= arrival <= LATEST:
        raise ConfigError(
            f"{where}: arrival is {arrival:g}; it must be seconds, from 0 to {LATEST:g}"
        )
    prompt = _count(where, "prompt_tokens", values["prompt_tokens"], 1)
    output = _count(where, "output_tokens", values["output_tokens"], 1)
    priority, group, shared = (values.get(name) for name in _OPTIONAL)
    if shared is not None and group is None:
        raise ConfigError(f"{where}: prefix_tokens needs a prefix_group")
    if not isinstance(group, str | int | None) or isinstance(group, bool):
        raise ConfigError(f"{where}: prefix_group is {shown(group)}; it must be a name")
    return Job(
        arrival,
        prompt,
        output,
        0 if priority is None else _count(where, "priority", priority, None),
        0 if group is None else groups.setdefault(str(group), len(groups) + 1),
        -1 if shared is None else _count(where, "prefix_tokens", shared, 0),
    )


def _number(where: str, name: str, value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError(value)
        return float(value)
    except (TypeError, ValueError, OverflowError):
        found = "missing" if value is None else shown(value)
        raise ConfigError(f"{where}: {name} is {found}; it must be a number") from None


def _count(where: str, name: str, value: Any, least: int | None) -> int:
    number = _number(where, name, value)
    if not number.is_integer():
        raise ConfigError(f"{where}: {name} is {shown(value)}; it must be a whole number")
    if abs(number) > _MOST:
        raise ConfigError(f"{where}: {name} is {number:g}; it must be at most {_MOST}")
    if least is not None and number < least:
        raise ConfigError(f"{where}: {name} is {int(number)}; it must be at least {least}")
    return int(number)


def _with_shared(jobs: list[Job]) -> list[Job]:
    """Each group without a number of shared tokens shares all of its shortest prompt."""
    shortest: dict[int, int] = {}
    for job in jobs:
        shortest[job.group] = min(job.prompt_len, shortest.get(job.group, job.prompt_len))
    return [
        job if job.shared >= 0 else job._replace(shared=shortest[job.group] if job.group else 0)
        for job in jobs
    ]
