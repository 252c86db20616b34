"""Streamed text equals whole text, characters stay whole, stop strings never leak."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.params import SamplingParams
from octavo.text.detokenizer import Detokenizer, StopStrings
from octavo.text.markers import Markers


def letters(tokenizer: Any, text: str) -> list[int]:
    """Ids of single-character tokens, whatever the tokenizer would merge."""
    return [tokenizer.token_id({" ": "Ġ", "\n": "Ċ"}.get(char, char)) for char in text]


def pieces(tokenizer: Any, *texts: str) -> list[list[int]]:
    return [letters(tokenizer, text) for text in texts]


class Stream:
    """A detokenizer fed in steps, with what each step gave out."""

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int] = (),
        markers: Markers | None = None,
        **params: Any,
    ) -> None:
        self.detokenizer = Detokenizer(tokenizer, SamplingParams(**params), prompt, markers=markers)
        self.deltas: list[str] = []

    def feed(self, steps: Sequence[Sequence[int]]) -> "Stream":
        for ids in steps:
            self.detokenizer.append(ids)
            self.deltas.append(self.detokenizer.take_delta())
        self.detokenizer.finish()
        self.deltas.append(self.detokenizer.take_delta())
        return self

    @property
    def text(self) -> str:
        assert "".join(self.deltas) == self.detokenizer.text
        return self.detokenizer.text


@pytest.fixture
def byte(kinds: dict[str, Any]) -> Any:
    return kinds["byte"].ours


# --- characters -----------------------------------------------------------------------------


def test_str_02_characters_over_several_tokens_come_whole(kinds: dict[str, Any]) -> None:
    text = "ď漢字🌶👩‍👩‍👧‍👦"
    for name in ("byte", "spm", "llama"):
        tokenizer = kinds[name].ours
        singles = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
        ids = [singles[bytes([b])] for b in text.encode()]
        streams = [Stream(tokenizer, prompt=tokenizer.encode("x")).feed([[i] for i in ids])]
        for stream in streams:
            assert stream.text == text
            assert not any(c in delta for delta in stream.deltas for c in "\ufffd\ud800")
            assert [d for d in stream.deltas if d] == list(text)


def test_bytes_that_are_no_character_are_shown_when_that_is_certain(byte: Any) -> None:
    singles = {byte.token_bytes(i): i for i in reversed(range(byte.vocab_size))}
    start, rest, end = (singles[bytes([b])] for b in "漢".encode())
    stream = Stream(byte).feed([[start], [rest], letters(byte, "a"), [end], [start]])
    assert stream.deltas == ["", "", "\ufffda", "\ufffd", "", "\ufffd"]


def test_str_05_streamed_text_is_the_whole_text_less_the_prompt(kind: Any) -> None:
    """500 random id sequences a kind: any tokens, any cut between prompt and output."""
    tokenizer = kind.ours
    rng = random.Random(5)
    for _ in range(500):
        ids = [rng.randrange(tokenizer.vocab_size + 2) for _ in range(rng.randint(0, 12))]
        cut = rng.randint(0, len(ids))
        skip = rng.random() < 0.5
        stream = Stream(
            tokenizer, ids[:cut], skip_special_tokens=skip, ignore_eos=True, max_tokens=None
        ).feed([[i] for i in ids[cut:]])
        whole, prompt = (tokenizer.decode(part, skip) for part in (ids, ids[:cut]))
        if whole.startswith(prompt):
            assert stream.text == whole[len(prompt) :], (ids, cut)
        else:  # the output completes the prompt's last character
            assert prompt.endswith("\ufffd")
            assert prompt[:-1] + stream.text == whole, (ids, cut)


@pytest.mark.parametrize("name", ["byte", "spm", "unigram", "llama"])
@pytest.mark.parametrize("first", [" block", "block"])
def test_str_05_the_first_space_follows_the_rule(
    kinds: dict[str, Any], name: str, first: str
) -> None:
    tokenizer = kinds[name].ours
    ids = tokenizer.encode_inside(first)
    prompt = tokenizer.encode("The")
    assert Stream(tokenizer, prompt).feed([[i] for i in ids]).text == first
    alone = Stream(tokenizer, [tokenizer.bos_id]).feed([[i] for i in ids]).text
    assert alone == (first.lstrip() if tokenizer.strips_space else first)


def test_str_05_spaces_are_kept_as_they_are(kinds: dict[str, Any]) -> None:
    tokenizer = kinds["spm"].ours
    wanted = ["▁block", "▁the", "▁", "▁", "▁", "▁", ".", "<0x0A>", "▁", "▁t"]
    ids = [tokenizer.token_id(piece) for piece in wanted]
    assert None not in ids
    assert Stream(tokenizer).feed([[i] for i in ids]).text == "block the    .\n  t"


def test_special_tokens_are_shown_only_when_told_and_ends_never(byte: Any) -> None:
    end, turn = byte.token_id("<|im_end|>"), byte.token_id("<|im_start|>")
    steps = [*pieces(byte, "a"), [turn], *pieces(byte, "b"), [end]]
    assert Stream(byte).feed(steps).text == "ab"
    assert Stream(byte, skip_special_tokens=False).feed(steps).text == "a<|im_start|>b"
    shown = Stream(byte, skip_special_tokens=False, include_stop_str_in_output=True).feed(steps)
    assert shown.text == "a<|im_start|>b<|im_end|>"
    running = Stream(byte, skip_special_tokens=False, ignore_eos=True).feed(steps)
    assert running.text == "a<|im_start|>b<|im_end|>"


def test_the_text_of_a_stop_id_is_left_out(byte: Any) -> None:
    (full_stop,) = letters(byte, ".")
    steps = [*pieces(byte, "a", "b"), [full_stop]]
    assert Stream(byte, stop_token_ids=[full_stop]).feed(steps).text == "ab"
    included = Stream(byte, stop_token_ids=[full_stop], include_stop_str_in_output=True)
    assert included.feed(steps).text == "ab."


def test_without_detokenize_there_is_no_text(byte: Any) -> None:
    assert Stream(byte, detokenize=False).feed(pieces(byte, "abc")).text == ""


# --- stop strings ---------------------------------------------------------------------------


def compositions(text: str) -> list[list[str]]:
    """Every way to cut `text` into pieces."""
    ways = []
    for bits in range(2 ** (len(text) - 1)):
        way, start = [], 0
        for at in range(1, len(text) + 1):
            if at == len(text) or bits >> (at - 1) & 1:
                way.append(text[start:at])
                start = at
        ways.append(way)
    return ways


def test_str_01_a_stop_string_never_leaks_whatever_its_pieces(byte: Any) -> None:
    for way in compositions("DEFGHIJ"):
        steps = pieces(byte, "AB", "C", *way, "KL")
        stream = Stream(byte, stop=["DEFGHIJ"]).feed(steps)
        assert stream.text == "ABC"
        assert stream.detokenizer.stopped == "DEFGHIJ"


def test_str_01_pieces_that_overlap_the_stop_string(byte: Any) -> None:
    stream = Stream(byte, stop=["DEFG"]).feed(pieces(byte, "ABC", "DE", "FG", "HI"))
    assert stream.deltas == ["ABC", "", "", "", ""]
    stream = Stream(byte, stop=["DEFG"]).feed(pieces(byte, "ABCD", "EFGH", "I"))
    assert stream.text == "ABC"


def test_str_06_held_text_is_released_at_the_end(byte: Any) -> None:
    stream = Stream(byte, stop=["DEFG"]).feed(pieces(byte, "A", "DE", "X", "DE"))
    assert stream.deltas == ["A", "", "DEX", "", "DE"]
    assert stream.detokenizer.stopped is None


def test_str_06_text_that_begins_no_stop_string_is_not_held(byte: Any) -> None:
    stream = Stream(byte, stop=["END-OF-TEXT"]).feed(pieces(byte, "a", "b", "c", "d"))
    assert stream.deltas[:4] == ["a", "b", "c", "d"]
    # Only the longest suffix that can still become one is held.
    stream = Stream(byte, stop=["EEND"]).feed(pieces(byte, "xEE", "EN", "x"))
    assert stream.deltas == ["x", "E", "EENx", ""]


@pytest.mark.parametrize("stop", [["bar"], ["zzz", "bar"], ["bar", "zzz"]])
def test_stp_06_a_stop_string_inside_a_token(byte: Any, stop: list[str]) -> None:
    steps = pieces(byte, "foo", "ba", "r!baz")
    assert Stream(byte, stop=stop).feed(steps).text == "foo"
    stream = Stream(byte, stop=stop, include_stop_str_in_output=True).feed(steps)
    assert (stream.text, stream.detokenizer.stopped) == ("foobar", "bar")


def test_stp_06_a_stop_string_wholly_inside_one_token(byte: Any) -> None:
    """One token, as one call with its text cut from the vocabulary: ' blocks' holds 'lock'."""
    token = byte.token_id("Ġblock")
    stream = Stream(byte, stop="loc").feed([letters(byte, "a"), [token]])
    assert (stream.text, stream.detokenizer.stopped) == ("a b", "loc")
    kept = Stream(byte, stop="loc", include_stop_str_in_output=True).feed([[token]])
    assert kept.text == " bloc"


def test_the_string_that_completes_first_wins_then_the_one_that_starts_first(byte: Any) -> None:
    token = byte.token_id("Ġblock")
    for stops in (["lock", "bloc"], ["bloc", "lock"]):
        one_step = Stream(byte, stop=stops).feed([[token]])
        assert (one_step.text, one_step.detokenizer.stopped) == (" ", "bloc")
        spelled = Stream(byte, stop=["blockade", "loc"][:: 1 if stops[0] == "lock" else -1])
        assert spelled.feed(pieces(byte, *"a blockade")).text == "a b"
        assert spelled.detokenizer.stopped == "loc"
    # "loc" is complete before "block" is, but in the same token, and "block" starts first.
    nested = Stream(byte, stop=["loc", "block"]).feed([[token]])
    assert (nested.text, nested.detokenizer.stopped) == (" ", "block")
    same_start = Stream(byte, stop=["block", "blo"]).feed([[token]])
    assert same_start.detokenizer.stopped == "blo"


def test_stop_strings_do_not_act_before_min_tokens(byte: Any) -> None:
    steps = pieces(byte, *"axbxcxd")
    for least, expected in ((0, "a"), (1, "a"), (2, "axb"), (3, "axb"), (5, "axbxc")):
        stream = Stream(byte, stop=["x"], min_tokens=least).feed(steps)
        assert stream.text == expected, least
    late = Stream(byte, stop=["abc"], min_tokens=2).feed(pieces(byte, *"xabcd"))
    assert late.text == "x"  # begun before, complete after
    never = Stream(byte, stop=["ab"], min_tokens=4).feed(pieces(byte, *"xabcd"))
    assert never.deltas == ["x", "", "ab", "c", "d", ""]


def test_a_stop_string_that_does_not_act_yet_may_begin_another(byte: Any) -> None:
    """After "ab", too early, "b" is held: it may become "bc"."""
    stream = Stream(byte, stop=["ab", "bc"], min_tokens=2).feed(pieces(byte, *"abc"))
    assert (stream.text, stream.detokenizer.stopped) == ("a", "bc")


def test_the_prompt_s_text_never_stops(byte: Any) -> None:
    prompt = letters(byte, "say EN")
    stream = Stream(byte, prompt, stop=["END", "say"]).feed(pieces(byte, "D", "ok"))
    assert (stream.text, stream.detokenizer.stopped) == ("Dok", None)


def test_nothing_is_added_after_a_stop(byte: Any) -> None:
    stream = Stream(byte, stop=["b"]).feed([letters(byte, "abc"), letters(byte, "def")])
    assert stream.text == "a"
    assert stream.detokenizer.count == 2


def test_finish_may_be_called_again(byte: Any) -> None:
    stream = Stream(byte, stop=["ab"]).feed(pieces(byte, "xa"))
    stream.detokenizer.finish()
    assert stream.detokenizer.take_delta() == ""
    assert stream.text == "xa"


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None, list[int]]:
    """The rule written as plainly as can be: after each character, look at all of it."""
    held = []
    for end in range(1, len(text) + 1):
        seen = text[:end]
        hits = [s for s in stops if seen.endswith(s)]
        if hits:
            stop = max(hits, key=len)
            return seen[: end if include else end - len(stop)], stop, held
        held.append(
            max(
                (n for s in stops for n in range(1, len(s)) if seen.endswith(s[:n])),
                default=0,
            )
        )
    return text, None, held


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(alphabet="ab.", max_size=24),
    stops=st.lists(st.text(alphabet="ab.", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_one_character_at_a_time_equals_the_plain_rule(
    kinds: dict[str, Any], text: str, stops: list[str], include: bool
) -> None:
    tokenizer = kinds["byte"].ours
    expected, stopped, held = naive(text, stops, include)
    stream = Stream(tokenizer, stop=stops, include_stop_str_in_output=include)
    stream.feed([[i] for i in letters(tokenizer, text)])
    assert (stream.text, stream.detokenizer.stopped) == (expected, stopped)
    shown = 0
    for step, kept in enumerate(held):
        shown += len(stream.deltas[step])
        assert shown == step + 1 - kept  # exactly what could still become a stop is held


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=5))
def test_the_automaton_finds_every_string_in_linear_steps(stops: list[str]) -> None:
    automaton = StopStrings(stops)
    for text in ("abba" * 5, "".join(stops)):
        state = 0
        for end in range(1, len(text) + 1):
            state = automaton.step(state, text[end - 1])
            hits = [s for s in stops if text[:end].endswith(s)]
            assert automaton.found[state] == max(hits, key=len, default=None)


# --- markers --------------------------------------------------------------------------------


@pytest.fixture
def markers(byte: Any) -> Markers:
    """A special token, one that is not, and a word that is no token."""
    return Markers(byte, ["[INST]", "<think>", "<nothing>"])


def marked(tokenizer: Any, *texts: str) -> list[list[int]]:
    """A token each for the words of markers, letters for the rest."""
    added = {"[INST]", "<think>", "</think>", "[/INST]"}
    return [[tokenizer.token_id(t)] if t in added else letters(tokenizer, t) for t in texts]


@pytest.mark.parametrize("skip", [True, False])
def test_markers_stand_in_the_text_and_nothing_else_changes(
    byte: Any, markers: Markers, skip: bool
) -> None:
    said = marked(byte, "a", "[INST]", "<think>", "[INST]", "</think>", "[/INST]", "b")
    stream = Stream(byte, markers=markers, skip_special_tokens=skip).feed(said)
    special, think = (markers.in_text(word) for word in ("[INST]", "<think>"))
    assert len(special) == len(think) == 1
    others = "</think>" if skip else "</think>[/INST]"
    assert stream.text == f"a{special}{think}{special}{others}b"
    plain = Stream(byte, skip_special_tokens=skip).feed(said).text
    assert markers.plain(stream.text, skip) == plain
    spelled = Stream(byte, markers=markers).feed(marked(byte, *"<think>"))
    assert spelled.text == "<think>", "letters make no marker"


def test_a_marker_ends_a_character_that_was_cut(byte: Any, markers: Markers) -> None:
    singles = {byte.token_bytes(i): i for i in reversed(range(byte.vocab_size))}
    start = singles["漢".encode()[:1]]
    think = markers.in_text("<think>")
    (token,) = marked(byte, "<think>")
    assert Stream(byte, markers=markers).feed([[start], token]).text == "\ufffd" + think
    after = Stream(byte, prompt=[*token, start], markers=markers).feed([token])
    assert after.text == think, "the prompt's markers are its text's"


@pytest.mark.parametrize(
    ("stop", "said", "text"),
    [
        ("<think>", ("a", "<think>", "b"), "a"),
        ("<think>", ("a", *"<think>", "b"), "a"),
        ("[INST]", ("a", "[INST]", "b"), "a"),
        ("x<think>y", ("ax", "<think>", "yb"), "a"),
        ("hin", ("a", "<think>", "b"), "a"),
        ("STOP", ("a", "<think>", "ST", "OP"), "a<think>"),
    ],
)
def test_stop_strings_find_markers_as_they_are_spelled(
    byte: Any, markers: Markers, stop: str, said: tuple[str, ...], text: str
) -> None:
    stream = Stream(byte, markers=markers, stop=[stop]).feed(marked(byte, *said))
    assert markers.spelled(stream.text) == text
    assert stream.detokenizer.stopped == stop
