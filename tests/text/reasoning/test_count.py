"""Reasoning tokens are those between the markers, whatever tokens write these, in any chunking."""

import random

import pytest

from octavo.constraints import Thinking
from octavo.text.reasoning.count import ReasoningCount

BEGIN, END, CALLS = 1000, 1001, 1002
WORDS = {BEGIN: b"<think>", END: b"</think>", CALLS: b"<call>", 900: b"</th", 901: b"ink>!",
         902: b"x</", 903: b"think>"}  # fmt: skip


def token_bytes(token_id):
    return WORDS.get(token_id) or bytes([token_id])


def count(thinking, ids, recurs=False, cut=None):
    counted = ReasoningCount(thinking, token_bytes, recurs, CALLS)
    for part in [ids] if cut is None else [ids[:cut], ids[cut:]]:
        counted.add(part)
    return counted.count


def spelled(text):
    return tuple(text.encode())


TOKENS = Thinking((BEGIN,), (END,))
LETTERS = Thinking(spelled("<think>"), spelled("</think>"))
INSIDE = Thinking(spelled("<think>"), spelled("</think>"), inside=True)


@pytest.mark.parametrize(
    ("thinking", "ids", "recurs", "wanted"),
    [
        (TOKENS, (BEGIN, *b"hm", END, *b"abc"), False, 2),
        (TOKENS, (*b"\n ", BEGIN, *b"hm"), False, 2),
        (TOKENS, (*b"a", BEGIN, *b"hm", END), False, 0),
        (TOKENS, (*b"a", BEGIN, *b"hm", END, *b"b", BEGIN, *b"x", END), True, 3),
        (TOKENS, (BEGIN, *b"hm", END, BEGIN, *b"x", END), False, 2),
        (TOKENS, (BEGIN, *b"hm", CALLS, *b"x"), False, 2),
        (TOKENS, (BEGIN, *b"</think>", END), False, 8),
        (LETTERS, (*b"<think>hm</think>abc",), False, 2),
        (LETTERS, (*b"<thing>hm</think>abc",), False, 0),
        (LETTERS, (*b"<think>h</thi</think>",), False, 6),
        (LETTERS, (*b"<think>hm", 900, 901, *b"abc"), False, 2),
        (LETTERS, (*b"<think>hm", 902, 903, *b"abc"), False, 2),
        (LETTERS, (*b"<think>hm</thin",), False, 8),
        (INSIDE, (*b"hm</think>abc",), False, 2),
        (INSIDE, (903, *b"a</think>"), False, 2),
        (Thinking((), (END,), inside=True), (*b"hm", END, *b"x"), False, 2),
        (Thinking((), (END,)), (*b"hm", END), False, 0),
    ],
)
def test_tokens_between_markers(thinking, ids, recurs, wanted):
    assert count(thinking, ids, recurs) == wanted
    for _ in range(5):
        assert count(thinking, ids, recurs, random.randrange(len(ids) + 1)) == wanted
