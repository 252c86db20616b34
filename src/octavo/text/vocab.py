"""Build a `tokenizers` pipeline from a bare vocabulary: GGUF metadata or SentencePiece pieces.

A `tokenizer.json` describes its own pipeline; these two sources only hold tokens, scores,
merges and a name for the rule that splits text into words, so the rest is made here. The
split rules are those of the models' own `tokenizer.json` files, under the names that
`tokenizer.ggml.pre` gives them (llama.cpp, `llama-vocab.cpp`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from octavo.errors import CheckpointError, nearest

SPACE = "\u2581"

# Token types, with the same numbers in SentencePiece's proto and in GGUF.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_QWEN35 = (
    _ENGLISH + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(digits: str, suffix: str = "") -> str:
    """Words that change case inside are cut there (Mistral's Tekken, OpenAI's o200k)."""
    words = "|".join(
        f"[^\\r\\n\\p{{L}}\\p{{N}}]?{_UPPER}{up}{_LOWER}{low}{suffix}"
        for up, low in (("*", "+"), ("+", "*"))
    )
    return f"{words}|{digits}|{_PUNCTUATION}"


@dataclass(frozen=True)
class Splitter:
    """How text is cut into words before the merges act, and what else the name implies.

    patterns are applied one after the other, each within the pieces that the last one left.
    whole_words: a word that is a token is that token, whatever the merges say.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


def _table() -> dict[str, Splitter]:
    digit_first = Splitter((r"\p{N}", _GPT2))
    gpt2, llama3 = Splitter((_GPT2,)), Splitter((_LLAMA3,), whole_words=True, add_bos=True)
    llama3_plain, qwen2 = Splitter((_LLAMA3,)), Splitter((_QWEN2,))
    o200k = Splitter((_cased(r"\p{N}{1,3}", _ENGLISH + "?"),))
    groups = {
        "gpt-2 phi-2 mpt olmo jais exaone4 trillion granite-docling gigachat mellum a.x-4.0": gpt2,
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": digit_first,
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": llama3,
        "dbrx smaug-bpe glm4 chatglm-bpe": llama3_plain,
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": qwen2,
        "qwen35": Splitter((_QWEN35,)),
        "tekken": Splitter((_cased(r"\p{N}"),), whole_words=True, add_bos=True),
        "gpt-4o llama4 kanana2 talkie minimax-m2": o200k,
        "falcon": Splitter((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
        "deepseek-coder": Splitter(
            ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
        ),
        "deepseek-v3 hunyuan-dense joyai-llm": Splitter(
            (
                r"\p{N}{1,3}",
                "[一-龥぀-ゟ゠-ヿ]+",
                r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
                r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
                r"|\s*[\r\n]+|\s+(?!\S)|\s+",
            )
        ),
        "default": Splitter((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    }
    return {name: splitter for names, splitter in groups.items() for name in names.split()}


SPLITTERS: Mapping[str, Splitter] = _table()


def splitter(name: str) -> Splitter:
    """The split rule called `name` in a GGUF. Raises CheckpointError that lists the known."""
    if name not in SPLITTERS:
        raise CheckpointError(
            f"tokenizer.ggml.pre is {name!r}, which is not known{nearest(name, SPLITTERS)}; "
            f"known: {', '.join(sorted(SPLITTERS))}"
        )
    return SPLITTERS[name]


@dataclass(frozen=True)
class Pieces:
    """A SentencePiece vocabulary: `kinds` are the token types above, `scores` rank merges.

    dummy_prefix puts one space before the text; `always` after each special token too, as
    encoding the texts between them one by one does (and llama.cpp, and most `tokenizer.json`).
    """

    texts: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    unk_id: int = 0
    unigram: bool = False
    byte_fallback: bool = True
    dummy_prefix: bool = True
    always: bool = True
    collapse_spaces: bool = False
    charsmap: bytes = b""


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte value: character -> byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in set(printable)]
    table = {chr(b): b for b in printable}
    table.update({chr(256 + i): b for i, b in enumerate(hidden)})
    return table


def byte_level_bpe(
    tokens: Sequence[str], merges: Sequence[str], kinds: Sequence[int], rule: Splitter
) -> tokenizers.Tokenizer:
    """A byte-level BPE pipeline. `tokens` are spelled in the byte alphabet, merges as "a b"."""
    vocab = _distinct(tokens)
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=rule.whole_words)
    backend = tokenizers.Tokenizer(model)
    steps: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(_special(tokens, kinds))
    plain = [t for t, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED]
    backend.add_tokens([AddedToken(token, normalized=False) for token in plain])
    return backend


def sentencepiece(pieces: Pieces) -> tokenizers.Tokenizer:
    """A BPE or Unigram pipeline that gives the ids SentencePiece gives."""
    vocab = _distinct(pieces.texts)
    unknown = pieces.texts[pieces.unk_id]
    model: Any
    if pieces.unigram:
        model = models.Unigram(
            list(zip(pieces.texts, pieces.scores, strict=True)),
            unk_id=pieces.unk_id,
            byte_fallback=pieces.byte_fallback,
        )
    else:
        model = models.BPE(
            vocab=vocab,
            merges=_merges(pieces),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=pieces.byte_fallback,
            ignore_merges=USER_DEFINED in pieces.kinds,
        )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(_normalizers(pieces))
    backend.pre_tokenizer = pre_tokenizers.Sequence(_cutters(pieces))
    backend.decoder = decoders.Sequence(_decoders(pieces))
    backend.add_special_tokens(_special(pieces.texts, pieces.kinds))
    return backend


def _special(tokens: Sequence[str], kinds: Sequence[int]) -> list[AddedToken]:
    return [
        AddedToken(token, normalized=False, special=True)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (CONTROL, UNKNOWN)
    ]


def _distinct(tokens: Sequence[str]) -> dict[str, int]:
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        double = next(t for i, t in enumerate(tokens) if vocab[t] != i)
        raise CheckpointError(f"the tokenizer holds the token {double!r} twice")
    return vocab


def _merges(pieces: Pieces) -> list[tuple[str, str]]:
    """Merges that SentencePiece's BPE makes from scores alone: any two normal pieces whose
    join is a normal piece, the best score of the join first."""
    normal = {
        text: (-score, index)
        for index, (text, score, kind) in enumerate(
            zip(pieces.texts, pieces.scores, pieces.kinds, strict=True)
        )
        if kind == NORMAL
    }
    ranked = [
        (rank, text[:cut], text[cut:])
        for text, rank in normal.items()
        for cut in range(1, len(text))
        if text[:cut] in normal and text[cut:] in normal
    ]
    ranked.sort()
    return [(left, right) for _, left, right in ranked]


def _normalizers(pieces: Pieces) -> list[Any]:
    steps: list[Any] = []
    if pieces.charsmap:
        steps.append(normalizers.Precompiled(pieces.charsmap))
    if pieces.collapse_spaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    steps.append(normalizers.Replace(" ", SPACE))
    if pieces.dummy_prefix and pieces.always:
        # Metaspace, below, takes a text's own first space for the prefix; SentencePiece has both.
        steps.append(normalizers.Replace(Regex(rf"\A{SPACE}"), SPACE * 2))
    return steps


def _cutters(pieces: Pieces) -> list[Any]:
    """The prefix, and then user-defined pieces cut out whole: nothing merges with them."""
    steps: list[Any] = []
    if pieces.dummy_prefix:
        scheme = "always" if pieces.always else "first"
        steps.append(pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False))
    texts = [t for t, k in zip(pieces.texts, pieces.kinds, strict=True) if k == USER_DEFINED]
    if texts:
        either = "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))
        steps.append(pre_tokenizers.Split(Regex(either), behavior="isolated"))
    return steps


def _decoders(pieces: Pieces) -> list[Any]:
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if pieces.dummy_prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    return steps
