"""Words wrap at the terminal's edge while they stream."""

import random
from itertools import pairwise

import pytest
from wcwidth import wcswidth

from octavo.cli.chat_wrap import Wrapper, harmless


def wrapped(text, width=20, pieces=1):
    """`text`, fed `pieces` characters at a time."""
    out = []
    wrapper = Wrapper(out.append, lambda: width)
    for start in range(0, len(text), pieces):
        wrapper.feed(text[start : start + pieces])
    wrapper.finish()
    return "".join(out)


PROSE = "A customer came to the bakery, and the owner was delighted to serve her at once."


@pytest.mark.parametrize("width", [9, 10, 20, 33, 79, 80, 200])
def test_lines_end_between_words(width):
    lines = wrapped(PROSE, width).splitlines()
    assert " ".join(lines) == PROSE
    assert all(len(line) <= width for line in lines)
    for line, following in pairwise(lines):
        assert len(line) + 1 + len(following.split()[0]) > width, "no line is shorter than needed"


@pytest.mark.parametrize("seed", range(5))
def test_pieces_do_not_matter(seed):
    text = PROSE + "\n\n- an item\n```py\nx = 1  # long long line\n```\n漢字かな交じり文。" * 2
    rng, out = random.Random(seed), []
    wrapper = Wrapper(out.append, lambda: 20)
    rest = text
    while rest:
        size = rng.randint(1, 9)
        wrapper.feed(rest[:size])
        rest = rest[size:]
    wrapper.finish()
    assert "".join(out) == wrapped(text)


def test_a_word_is_printed_once_it_is_whole():
    out = []
    wrapper = Wrapper(out.append, lambda: 20)
    wrapper.feed("Cust")
    assert out == []
    wrapper.feed("omer to")
    assert "".join(out) == "Customer"
    wrapper.finish()
    assert "".join(out) == "Customer to\n"


def test_lines_and_indentation_stay():
    text = "Items:\n\n  - one\n    two\n\nEnd"
    assert wrapped(text) == text + "\n"
    assert wrapped("ends with a line\n") == "ends with a line\n"
    assert wrapped("") == ""


def test_a_word_longer_than_the_line_is_left_to_the_terminal():
    url = "https://example.org/" + "x" * 50
    assert wrapped(f"See {url} for more") == f"See\n{url} for more\n"
    assert wrapped("x" * 40 + " for more") == "x" * 40 + "\nfor more\n"
    assert wrapped("x" * 20 + " for more") == "x" * 20 + "\nfor more\n"


@pytest.mark.parametrize("fence", ["```", "~~~~", "  ```"])
def test_code_is_kept_as_it_is(fence):
    code = "def f(a, b):\n    return a + b  # a comment that is longer than the line"
    block = f"{fence}python\n{code}\n{fence}\n"
    assert wrapped(block + "and then the prose goes on") == block + "and then the prose\ngoes on\n"


def test_three_backticks_within_a_line_open_no_block():
    text = "```x``` is code\nand the next line is wrapped"
    assert wrapped(text) == "```x``` is code\nand the next line is\nwrapped\n"


@pytest.mark.parametrize("width", [10, 11, 21])
def test_wide_characters_break_anywhere_but_before_punctuation(width):
    text = "今日は、いい天気ですね。「散歩」に行きましょう。" * 2
    lines = wrapped(text, width).splitlines()
    assert "".join(lines) == text
    assert all(wcswidth(line) <= width for line in lines)
    assert all(line[0] not in "、。」" for line in lines)
    assert not any(line.endswith("「") for line in lines)


def test_an_emoji_of_several_characters_stays_whole():
    family, flag, wave = "👨‍👩‍👧", "🇩🇪", "👋🏽"
    for line in wrapped((family + flag + wave) * 8, 10).splitlines():
        assert wcswidth(line) <= 10
        rest = line.replace(family, "").replace(flag, "").replace(wave, "")
        assert rest == ""


def test_a_combining_accent_stays_with_its_letter():
    assert wrapped("cafe\u0301 " * 6, 10) == "cafe\u0301 cafe\u0301\n" * 3


def test_a_narrower_terminal_counts_from_the_next_word():
    width, out = 40, []
    wrapper = Wrapper(out.append, lambda: width)
    wrapper.feed("one two three four ")
    width = 10
    wrapper.feed("five six seven eight")
    wrapper.finish()
    last = "".join(out).splitlines()[1:]
    assert last
    assert all(len(line) <= 10 for line in last)


def test_no_text_commands_the_terminal():
    assert harmless("a\x1b[2Jb\r\x07\x9b\tc\n") == "a\u241b[2Jb\u240d\u2407\ufffd\tc\n"
    assert "\x1b" not in wrapped("```\n\x1b]0;title\x07\n```\n\x1b[31mred")
