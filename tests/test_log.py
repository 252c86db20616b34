"""What child processes inherit."""

from octavo import log


def test_a_child_inherits_what_is_set_and_gets_the_usual_else(monkeypatch):
    monkeypatch.setenv("OCTAVO_TEST_SET", "mine")
    monkeypatch.delenv("OCTAVO_TEST_UNSET", raising=False)
    made = log.environment_for_child(OCTAVO_TEST_SET="usual", OCTAVO_TEST_UNSET="usual")
    assert made["OCTAVO_TEST_SET"] == "mine"
    assert made["OCTAVO_TEST_UNSET"] == "usual"
    assert "PATH" in made
