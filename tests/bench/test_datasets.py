"""Prompts have the asked lengths; files are read, and faults in them named."""

import json
from pathlib import Path

import pytest

import kit
from octavo.bench import datasets
from octavo.bench.datasets import Sample, Shape
from octavo.errors import ConfigError
from octavo.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    kit.write_tokenizer(folder, ["ab", " word", "\x01", "é"])
    return load_tokenizer(folder)


def test_random_prompts_have_exact_lengths_and_follow_the_seed(tokens: Tokenizer) -> None:
    shape = Shape(20, 5)
    found = datasets.random_prompts(tokens, 4, shape, 1)
    assert [(len(tokens.encode(s.prompt)), s.prompt_len, s.output_len) for s in found] == [
        (20, 20, 5)
    ] * 4
    assert len({s.prompt for s in found}) == 4
    assert all(s.prompt.isascii() for s in found)
    assert found == datasets.random_prompts(tokens, 4, shape, 1)
    assert found != datasets.random_prompts(tokens, 4, shape, 2)


def test_a_range_spreads_lengths_and_a_prefix_is_shared(tokens: Tokenizer) -> None:
    found = datasets.random_prompts(tokens, 40, Shape(20, 10, 0.5, 8), 0)
    assert {s.prompt_len for s in found} <= set(range(18, 39))
    assert {s.output_len for s in found} <= set(range(5, 16))
    assert len({s.prompt_len for s in found}) > 5
    assert len({s.prompt[:7] for s in found}) == 1


def test_prefixes_are_repeated_in_shuffled_order(tokens: Tokenizer) -> None:
    found = datasets.prefix_repetition(tokens, 9, 12, 6, 3, 4, 0)
    assert [(s.prompt_len, s.output_len) for s in found] == [(18, 4)] * 9
    heads = [s.prompt[:11] for s in found]
    assert sorted(heads.count(head) for head in set(heads)) == [3, 3, 3]


class Joining:
    """Two letters of a kind are one token: text is shorter in tokens than it was made of."""

    vocab_size = 3

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [1] * (len(text.replace("aa", "b")))

    def decode(self, ids: object, skip_special_tokens: bool = True) -> str:
        return "a" * len(list(ids))  # type: ignore[call-overload]


def test_lengths_are_right_where_text_joins_into_other_tokens() -> None:
    (sample,) = datasets.random_prompts(Joining(), 1, Shape(11, 1), 0)
    assert sample.prompt_len == 11
    assert len(Joining().encode(sample.prompt)) == 11


@pytest.mark.parametrize("wrong", [{"input_len": 0}, {"range_ratio": 1.0}, {"prefix_len": -1}])
def test_a_wrong_shape_is_named(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Shape(**wrong)


def test_sharegpt_takes_first_turns_within_vllms_bounds(tokens: Tokenizer, tmp_path: Path) -> None:
    def talk(*texts: str) -> dict:
        return {"conversations": [{"from": "x", "value": text} for text in texts]}

    path = tmp_path / "talks.json"
    bad = [talk("alone now"), talk("abc", "abcdef"), talk("a question", "abc"), {}, 3,
           talk("x" * 1100, "an answer")]  # fmt: skip
    path.write_text(json.dumps([*bad, talk("a question", "an answer", "more")]))
    question = len(tokens.encode("a question"))
    assert datasets.sharegpt(path, tokens, 5, None, 0) == [Sample("a question", question, 9)]
    assert datasets.sharegpt(path, tokens, 5, 33, 0)[0].output_len == 33


def test_custom_lines_are_read_and_repeated(tokens: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "one"}\n\n{"prompt": "two", "output_tokens": 7}\n')
    found = datasets.custom(path, None, 5, 0, shuffle=False)
    assert found == [Sample("one", 0, 5), Sample("two", 0, 7)]
    assert datasets.custom(path, tokens, 5, 0)[0].prompt_len >= 3
    assert [s.prompt for s in datasets.repeated(found, 3)] == ["one", "two", "one"]
    assert len(datasets.repeated(found, 3, no_oversample=True)) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no usable prompt"),
        ('{"prompt": "a"}\n{', "line 2: no JSON"),
        ('{"text": "a"}', "line 1: needs a text"),
        ('{"prompt": "a", "output_tokens": 0}', "line 1: output_tokens"),
    ],
)
def test_a_faulty_file_is_named(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        datasets.custom(path, None, 5, 0)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="no usable"):
        datasets.sharegpt(path, Joining(), 1, None, 0)
