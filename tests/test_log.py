"""What child processes inherit, and where files go."""

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


def test_a_user_without_a_home_is_told_only_where_a_folder_is_needed(monkeypatch):
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
