"""Budgets of reasoning: what counts, when the end is forced, and what holds beside it."""

import pytest
from tests import kit
from tests.text.test_matcher import allowed, matcher

from octavo.text.sections import SectionMatcher
from octavo.text.thinking import BudgetedThinking, Marker

VOCAB = 300
BEGIN, END = kit.BOS, kit.EOT
A = ord("a")


def thinking(budget, inside=True, form=None, end=(END,), token_bytes=None):
    begin = Marker((BEGIN,))
    return BudgetedThinking(budget, begin, Marker(end, token_bytes), inside, form, VOCAB)


def forced(found):
    """The tokens that are forced next, which the text then gains."""
    tokens = []
    while (mask := found.mask()) is not None and found.mask() is mask:
        (token,) = allowed(found)
        tokens.append(token)
        found.advance(token)
    return tokens


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_after_so_many_tokens_the_end_is_forced_once(budget):
    found = thinking(budget)
    for _ in range(budget):
        assert found.mask() is None
        assert found.steady
        found.advance(A)
    assert not found.steady
    assert forced(found) == [END]
    for _ in range(10):
        found.advance(A)
        assert found.mask() is None


def test_reasoning_that_ends_itself_is_let_be():
    found = thinking(2)
    for token in (A, END, A, A, A):
        found.advance(token)
        assert found.mask() is None


def test_markers_do_not_count_and_several_blocks_have_one_budget():
    found = thinking(3, inside=False)
    for token in (A, A, A, A, BEGIN, A, A, END, A, BEGIN):
        assert found.mask() is None
        found.advance(token)
    assert found.mask() is None
    found.advance(A)
    assert forced(found) == [END]
    found.advance(BEGIN)
    assert forced(found) == [END]


TOKENS = {1: b"</", 2: b"end", 3: b">", 4: b">\n", 5: b"x", 6: b"</e", 7: b"nd>\n"}


@pytest.mark.parametrize(
    ("written", "rest"),
    [
        ((5, 5), [1, 2, 3]),
        ((5, 1, 5), [1, 2, 3]),
        ((5, 1, 2, 5), [1, 2, 3]),
        ((5, 5, 1), [2, 3]),  # one that has begun is finished
        ((5, 5, 1, 2), [3]),
        ((5, 1), []),  # but what it has of it does not count
        ((1, 2, 4, 5, 5, 5), []),  # it is found however its characters are split
        ((6, 7, 5, 5, 5), []),
        ((5, 6), [1, 2, 3]),
    ],
)
def test_an_end_of_several_tokens(written, rest):
    found = thinking(2, end=(1, 2, 3), token_bytes=lambda token: TOKENS[token])
    for token in written:
        assert found.mask() is None or token in allowed(found)
        found.advance(token)
    assert forced(found.copy()) == rest
    assert forced(found) == rest


def test_a_grammar_sees_the_forced_tokens(grammars):
    form = SectionMatcher({END}, lambda: matcher(grammars, regex="[0-9]+"), repeats=False)
    found = thinking(1, form=form)
    found.advance(A)
    assert allowed(found) == {END}
    found.advance(END)
    assert allowed(found) == set(range(ord("0"), ord("9") + 1))
    assert not found.steady


def test_where_a_grammar_does_not_allow_the_end_it_is_awaited(grammars):
    found = thinking(0, form=matcher(grammars, regex="ab(!|c)d"), end=(ord("!"),))
    assert allowed(found) == {A}
    found.advance(A)
    found.advance(ord("b"))
    assert allowed(found) == {ord("!")}
    found.advance(ord("!"))
    found.advance(ord("d"))
    assert found.complete
