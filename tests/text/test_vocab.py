"""Where the split rules cut, against what each family's own tokenizer does."""

import pytest
from tokenizers import Regex, pre_tokenizers

from octavo.text.vocab import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    Pieces,
    byte_alphabet,
    sentencepiece,
    splitter,
)


def words(name: str, text: str) -> list[str]:
    steps = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        for pattern in splitter(name).patterns
    ]
    return [word for word, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "it's  2024!\n\nGo", ["it", "'s", " ", " 2024", "!", "\n", "\n", "Go"]),
        ("smollm", "a  2024", ["a", "  ", "2", "0", "2", "4"]),
        ("llama-bpe", "IT'S 12345\n\n x", ["IT", "'S", " ", "123", "45", "\n\n", " x"]),
        ("qwen2", "a 123 b", ["a", " ", "1", "2", "3", " b"]),
        ("qwen35", "kôn 1", ["kôn", " ", "1"]),
        ("tekken", "HelloWorld 12/", ["Hello", "World", " ", "1", "2", "/"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("falcon", "a-b 1234", ["a", "-", "b", " ", "123", "4"]),
        ("deepseek-v3", "a漢字 1234!x", ["a", "漢字", " ", "123", "4", "!x"]),
        ("deepseek-coder", "a b\n1", ["a", " b", "\n", "1"]),
        ("default", "a, 1234", ["a", ",", " ", "123", "4"]),
    ],
)
def test_words_are_cut_where_the_family_cuts_them(
    name: str, text: str, expected: list[str]
) -> None:
    assert words(name, text) == expected


def test_transformers_cuts_at_the_same_places() -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    text = "It's HelloWORLD'll  1234567 a\u0301b x\r\n\n  /path/ 漢字, don't… \t=> 5€ é’ ǅ"
    compared = 0
    for name, pattern in GGUF_PRE_TOKENIZER_SPLITS.items():
        try:
            ours = words(name, text)
        except ValueError:
            continue  # a family that we do not serve
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        assert ours == [word for word, _ in split.pre_tokenize_str(text)], name
        compared += 1
    assert compared >= 15


def test_the_byte_alphabet_is_the_library_s() -> None:
    table = byte_alphabet()
    assert sorted(table.values()) == list(range(256))
    assert set(table) == set(pre_tokenizers.ByteLevel.alphabet())
    assert (table["Ġ"], table["Ċ"], table["A"]) == (32, 10, 65)


def test_no_merge_makes_a_control_piece() -> None:
    """SentencePiece reads "<s>" in a text as three characters, though its parts are pieces."""
    texts = ["<unk>", "<s>", "<", "s", ">", "s>", "<s", "\u2581"]
    kinds = [UNKNOWN, CONTROL, *[NORMAL] * 6]
    pieces = Pieces(texts, [0.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0], kinds)
    backend = sentencepiece(pieces)
    backend.encode_special_tokens = True
    assert backend.encode("<s>").tokens == ["\u2581", "<", "s>"]


def test_the_best_score_merges_first_wherever_its_piece_stands() -> None:
    texts = ["<unk>", "a", "b", "c", "ab", "bc"]
    kinds = [UNKNOWN, *[NORMAL] * 5]
    for scores, expected in (([-1.0, -2.0], ["ab", "c"]), ([-2.0, -1.0], ["a", "bc"])):
        pieces = Pieces(texts, [0.0, -9.0, -9.0, -9.0, *scores], kinds, dummy_prefix=False)
        assert sentencepiece(pieces).encode("abc").tokens == expected
