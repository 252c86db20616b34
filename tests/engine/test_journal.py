"""Which interrupted requests go on, how many at once, and which do not."""

import pytest

from octavo.engine.journal import (
    CLEARING_TOKENS,
    HEALTHY_TOKENS,
    MOST_DEATHS,
    SUSPECT_SECONDS,
    Journal,
)


@pytest.fixture
def journal() -> Journal:
    return Journal()


def test_a_request_that_kills_two_engines_in_a_row_is_not_given_a_third(journal: Journal) -> None:
    assert journal.interrupt("a") is None
    journal.sent("a", 1, 0.0)
    assert not journal.gained("a", CLEARING_TOKENS - 1)
    why = journal.interrupt("a")
    assert why is not None
    assert "2 engines in a row" in why
    assert journal.waiting == []
    journal.forget("a")
    assert len(journal) == 0


def test_tokens_clear_a_suspect_and_deaths_far_apart_are_survived(journal: Journal) -> None:
    for death in range(MOST_DEATHS - 1):
        assert journal.interrupt("a") is None, death
        journal.sent("a", death, 0.0)
        assert journal.gained("a", CLEARING_TOKENS)
        assert not journal.gained("a", 1), "cleared before"
    why = journal.interrupt("a")
    assert why is not None
    assert str(MOST_DEATHS) in why


def test_a_request_that_has_run_well_starts_anew(journal: Journal) -> None:
    for death in range(3 * MOST_DEATHS):
        assert journal.interrupt("a") is None, death
        journal.sent("a", death % 2, 0.0)
        assert journal.gained("a", HEALTHY_TOKENS // 2)
        journal.gained("a", HEALTHY_TOKENS // 2)
        assert len(journal) == 0
    journal.interrupt("a")
    journal.sent("a", 0, 0.0)
    assert journal.gained("a", HEALTHY_TOKENS), "cleared and well at once"
    assert journal.has_room(0, 0.0)


def test_waiting_through_a_death_is_not_held_against_a_request(journal: Journal) -> None:
    assert [journal.interrupt(name) for name in "abc"] == [None, None, None]
    journal.sent("b", 0, 0.0)
    assert journal.waiting == ["a", "c"]
    assert journal.interrupt("b") is not None
    journal.sent("a", 1, 0.0)
    assert journal.gained("a", CLEARING_TOKENS)
    assert journal.waiting == ["c"]


def test_an_engine_is_given_one_suspect_after_the_other(journal: Journal) -> None:
    for name in "abcd":
        journal.interrupt(name)
    assert journal.has_room(0, 0.0)
    journal.sent("a", 0, 0.0)
    assert not journal.has_room(0, 0.0)
    assert journal.has_room(1, 0.0)
    journal.gained("a", CLEARING_TOKENS)
    assert journal.has_room(0, 0.0)
    journal.sent("b", 0, 0.0)
    assert not journal.has_room(0, 0.0)
    assert journal.forget("b"), "an end makes room"
    assert journal.has_room(0, 0.0)
    journal.sent("c", 0, 0.5)
    assert not journal.has_room(0, SUSPECT_SECONDS)
    assert journal.has_room(0, SUSPECT_SECONDS + 0.5), "one that gains nothing holds up nobody"
    journal.sent("d", 0, SUSPECT_SECONDS + 0.5)
    assert journal.interrupt("c") is not None, "it may be the one"


def test_nothing_is_kept_of_what_has_ended(journal: Journal) -> None:
    assert not journal.forget("never interrupted")
    for name in "abc":
        journal.interrupt(name)
    journal.sent("a", 0, 0.0)
    assert journal.forget("a")
    assert not journal.forget("b")
    assert not journal.gained("a", 5)
    assert journal.waiting == ["c"]
    journal.forget("c")
    assert len(journal) == 0
    assert not any(journal._suspects.values())
