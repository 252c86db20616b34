"""Marks: no text can make a special token once it is marked, and a calm one has none."""

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from octavo.text.control import ControlTokens

TOKENS = ControlTokens(
    {i: AddedToken(t, special=True) for i, t in enumerate(["<s>", "</s>", "<|a|>", "s><", "[X]"])}
)


@given(st.lists(st.text(alphabet="<s>/|a[X] ", max_size=8), min_size=1, max_size=4))
def test_marked_texts_joined_in_any_way_hold_no_special_token(texts: list[str]) -> None:
    joined = "".join(TOKENS.marked(text, "\ue000") for text in texts)
    assert TOKENS.pattern.search(joined) is None
    assert joined.replace("\ue000", "") == "".join(texts)


@given(st.text(alphabet="<s>/|a[X] ", max_size=8), st.sampled_from(["<s>", "</s>", "<|a|>"]))
def test_marked_text_next_to_parts_of_a_token_makes_none(text: str, token: str) -> None:
    marked = TOKENS.marked(text, "\ue000")
    for cut in range(1, len(token)):
        for around in (token[:cut] + marked, marked + token[cut:]):
            assert TOKENS.pattern.search(around) is None


def test_calm_texts_are_not_touched() -> None:
    assert not TOKENS.touches(["hello", "", " x ", "a|b", "x < y", "s", "sX"])
    for text in ("<s>", "a<", "a</", ">a", "s>", "[", "<|a|> "):
        assert TOKENS.touches([text]), text


def test_marks_stay_inside_what_trimming_keeps() -> None:
    for text in (" <s> ", "<s>", " a<", "> a"):
        marked = TOKENS.marked(text, "\ue000")
        assert marked.strip().replace("\ue000", "") == text.strip()
