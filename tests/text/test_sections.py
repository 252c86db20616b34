"""Free text with sections: when a grammar holds, and when nothing does."""

import pytest
from tests import kit
from tests.text.test_matcher import allowed, follow, matcher

from octavo.errors import EngineError
from octavo.text.sections import SectionMatcher, all_but

VOCAB = 300
CALL = kit.EOT  # an added token


@pytest.fixture(scope="module")
def start(grammars):
    form = matcher(grammars, regex="[0-9]+;")
    return lambda: form.copy()


def test_a_text_is_free_until_a_trigger_and_after_the_section(start):
    found = SectionMatcher({CALL}, start)
    for token in (5, kit.EOS, 299):
        found.advance(token)
    assert found.mask() is None
    assert found.steady
    found.advance(CALL)
    assert not found.steady
    assert allowed(found) == set(range(ord("0"), ord("9") + 1))
    follow(found, "12;")
    assert found.mask() is None
    assert not found.complete
    found.advance(CALL)
    with pytest.raises(EngineError, match="the grammar failed"):
        found.advance(ord("x"))


def test_a_text_may_end_with_its_section(start):
    found = SectionMatcher({CALL}, start, repeats=False)
    found.advance(CALL)
    assert not follow(found, "1").complete
    assert follow(found, ";").complete


def test_free_text_that_may_not_end_lacks_the_tokens_that_would_end_it(start):
    outside = all_but({kit.EOS, 12, VOCAB + 5}, VOCAB)
    found = SectionMatcher({CALL}, start, outside=outside)
    assert allowed(found) == set(range(VOCAB)) - {kit.EOS, 12}
    found.advance(7)
    assert found.mask() is outside


def test_a_copy_goes_its_own_way(start):
    found = SectionMatcher({CALL}, start)
    found.advance(CALL)
    follow(found, "1")
    other = found.copy()
    follow(found, ";")
    assert found.mask() is None
    assert allowed(other) == {*range(ord("0"), ord("9") + 1), ord(";")}


def test_a_text_may_end_in_a_section_that_is_complete_and_may_go_on(grammars):
    found = SectionMatcher({CALL}, lambda: matcher(grammars, regex="a*"))
    found.advance(CALL)
    assert allowed(found) == {ord("a"), kit.EOS}
    found.advance(kit.EOS)
    assert found.mask() is None
