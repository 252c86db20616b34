"""What child processes inherit, and where files go."""

import io
import json
import logging
import os
import re
from pathlib import Path

import pytest

from octavo import log
from octavo.errors import ConfigError


def test_a_child_inherits_what_is_set_and_gets_the_usual_else(monkeypatch):
    monkeypatch.setenv("OCTAVO_TEST_SET", "mine")
    monkeypatch.delenv("OCTAVO_TEST_UNSET", raising=False)
    made = log.environment_for_child(OCTAVO_TEST_SET="usual", OCTAVO_TEST_UNSET="usual")
    assert made["OCTAVO_TEST_SET"] == "mine"
    assert made["OCTAVO_TEST_UNSET"] == "usual"
    assert "PATH" in made


def test_a_missing_home_is_an_error_only_where_a_folder_is_needed(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    for name in ("OCTAVO_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    assert log.find_cache_dir() is None
    with pytest.raises(ConfigError, match="set OCTAVO_CACHE_DIR"):
        log.cache_dir()
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert log.cache_dir() == Path("/x/octavo")
    monkeypatch.setenv("OCTAVO_CACHE_DIR", "/own")
    assert log.cache_dir() == Path("/own")


@pytest.fixture
def lines(monkeypatch):
    """Log one record: `lines(form, message, *args, **options)` gives what stderr gets."""

    def write(form, message, *args, **options):
        out = io.StringIO()
        root = logging.getLogger("octavo")
        monkeypatch.setattr(root, "handlers", [])
        monkeypatch.setattr(root, "propagate", True)
        monkeypatch.setattr(root, "level", root.level)
        monkeypatch.setattr("sys.stderr", out)
        log.configure(form=form)
        log.get_logger("tried").warning(message, *args, **options)
        return out.getvalue().splitlines()

    return write


def test_the_text_log_has_dates_and_one_line_a_record(lines):
    (line,) = lines("text", "id=%s", "a\nb\r\x1b[2J\u2028c\x85")
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d W octavo\.tried: "
        r"id=a\\nb\\r\\x1b\[2J\\u2028c\\x85", line
    )  # fmt: skip
    assert re.fullmatch(r"\d\d:\d\d:\d\d W octavo\.tried: x", lines("brief", "x")[0])


def test_a_trace_is_indented_so_that_it_cannot_look_like_a_record(lines):
    try:
        raise ValueError("first\n2026-01-01T00:00:00.000+00:00 I octavo: forged")
    except ValueError:
        found = lines("text", "failed", exc_info=True)
    assert len(found) > 3
    assert all(line.startswith("  ") for line in found[1:])


def test_the_json_log_is_one_object_a_line_with_fields(lines):
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        (line,) = lines(
            "json", "id=%s", "a\nb", exc_info=True, extra={"fields": {"output_tokens": 3}}
        )
    found = json.loads(line)
    assert found["message"] == "id=a\nb"
    assert found["level"] == "warning"
    assert found["logger"] == "octavo.tried"
    assert found["output_tokens"] == 3
    assert found["process"] == os.getpid()
    assert found["time"][10] == "T"
    assert found["exception"].endswith("ValueError: first\nsecond")


def test_a_terminal_with_a_json_log_has_no_bars(lines, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    for form, bars in (("text", True), ("json", False)):
        lines(form, "x")
        assert log.can_redraw(Terminal()) == bars


def test_a_child_logs_as_its_parent_does(lines, monkeypatch):
    lines("json", "x")
    made = log.environment_for_child()
    assert (made["OCTAVO_LOG_FORMAT"], made["OCTAVO_LOG_LEVEL"]) == ("json", "info")
    monkeypatch.setenv("OCTAVO_LOG_FORMAT", "text")
    assert log.environment_for_child()["OCTAVO_LOG_FORMAT"] == "json"  # a flag said so


@pytest.mark.parametrize("name", ["OCTAVO_LOG_LEVEL", "OCTAVO_LOG_FORMAT"])
def test_a_variable_with_a_wrong_value_is_reported(name, monkeypatch):
    monkeypatch.setenv(name, "loud")
    with pytest.raises(ConfigError, match=f"{name} must be one of .*not 'loud'"):
        log.configure()


def test_an_api_key_from_the_environment(monkeypatch):
    for name in ("OCTAVO_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert log.api_keys_from_environment() == ()
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert log.api_keys_from_environment() == ("theirs",)
    monkeypatch.setenv("OCTAVO_API_KEY", "ours")
    assert log.api_keys_from_environment() == ("ours",)
    monkeypatch.setenv("OCTAVO_API_KEY", "")
    with pytest.raises(ConfigError, match="OCTAVO_API_KEY is set and empty"):
        log.api_keys_from_environment()


def test_a_child_of_a_program_without_octavo_s_log_logs_what_the_program_would(monkeypatch):
    monkeypatch.delenv("OCTAVO_LOG_LEVEL", raising=False)
    root = logging.getLogger("octavo")
    monkeypatch.setattr(root, "handlers", [])
    for level, name in ((logging.WARNING, "warning"), (logging.INFO, "info")):
        monkeypatch.setattr(root, "level", level)
        assert log.environment_for_child()["OCTAVO_LOG_LEVEL"] == name
    monkeypatch.setenv("OCTAVO_LOG_LEVEL", "error")
    assert log.environment_for_child()["OCTAVO_LOG_LEVEL"] == "error"


@pytest.mark.parametrize("form", ["brief", "json"])
def test_a_process_of_several_puts_its_name_before_each_message(monkeypatch, form):
    stream = io.StringIO()
    root = logging.getLogger("octavo")
    root.handlers[:] = []
    monkeypatch.setattr("sys.stderr", stream)
    log.configure(form=form, prefix="rank 1: ")
    log.get_logger("octavo.x").info("%d blocks", 3)
    assert "rank 1: 3 blocks" in stream.getvalue()


def test_lines_of_one_of_several_processes_are_marked(lines, monkeypatch):
    configure = log.configure

    def marked(form):
        configure(form=form)
        log.mark_lines("engine 1")

    monkeypatch.setattr(log, "configure", marked)
    (line,) = lines("text", "said")
    assert line.endswith("octavo.tried: engine 1: said")
    found = json.loads(lines("json", "said")[0])
    assert (found["source"], found["message"]) == ("engine 1", "said")
