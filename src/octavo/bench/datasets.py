"""Requests for load generation: synthetic prompts of exact lengths, and files of prompts.

The datasets, their options and their meanings are those of `vllm bench`. Everything is drawn from
one seed. Lengths are in tokens of the given tokenizer, the special ones it adds included.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from octavo.bench.arrivals import generator
from octavo.errors import ConfigError

_TRIES = 10  # to reach a length: text joins into other tokens than it was made of


class Tokens(Protocol):
    """What is needed of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True)
class Sample:
    """One request. prompt_len: tokens of the prompt, 0 where there is no tokenizer to count."""

    prompt: str
    prompt_len: int
    output_len: int


@dataclass(frozen=True)
class Shape:
    """How long random prompts and answers are.

    Lengths are uniform in [length x (1 - range_ratio), length x (1 + range_ratio)].
    prefix_len: tokens that all prompts share, in addition.
    """

    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"range_ratio must be in [0, 1), not {self.range_ratio}")
        if self.prefix_len < 0:
            raise ConfigError(f"prefix_len must be at least 0, not {self.prefix_len}")


class Writer:
    """Writes text of a given number of tokens out of random ones."""

    def __init__(self, tokens: Tokens, rng: np.random.Generator) -> None:
        self._tokens = tokens
        self._rng = rng

    def text(self, length: int, begin: str = "") -> tuple[str, int]:
        """(text that starts with `begin`, its tokens): `length` of them, or nearly.

        Text may join into other tokens than it was made of, so it is encoded again, and cut or
        extended, until the length is right.
        """
        text, best = begin, (begin, 0)
        for _ in range(_TRIES):
            count = len(self._tokens.encode(text))
            if best[1] == 0 or abs(count - length) < abs(best[1] - length):
                best = (text, count)
            if count == length:
                break
            if count < length:
                text += "".join(self._word() for _ in range(length - count))
            else:
                text = self._shorter(text, count - length, len(begin))
        return best

    def _shorter(self, text: str, excess: int, keep: int) -> str:
        own = self._tokens.encode(text[keep:], add_special_tokens=False)
        return text[:keep] + self._tokens.decode(own[: max(0, len(own) - excess)], True)

    def _word(self) -> str:
        """The text of a random token that is plain ASCII, so that it stays one token mostly."""
        for _ in range(1000):
            text = self._tokens.decode([int(self._rng.integers(self._tokens.vocab_size))], True)
            if text.strip().isalpha() and text.isascii():
                return text
        return " a"  # a vocabulary without ASCII words


def _lengths(rng: np.random.Generator, length: int, ratio: float, count: int) -> list[int]:
    low = max(1, int(np.floor(length * (1 - ratio))))
    high = max(low, int(np.ceil(length * (1 + ratio))))
    return [int(n) for n in rng.integers(low, high + 1, count)]


def random_prompts(tokens: Tokens, count: int, shape: Shape, seed: int) -> list[Sample]:
    """`--dataset-name random`."""
    rng = generator(seed)
    writer = Writer(tokens, rng)
    inputs = _lengths(rng, shape.input_len, shape.range_ratio, count)
    outputs = _lengths(rng, shape.output_len, shape.range_ratio, count)
    prefix = writer.text(shape.prefix_len)[0] if shape.prefix_len else ""
    prompts = (writer.text(shape.prefix_len + length, prefix) for length in inputs)
    return [Sample(*prompt, length) for prompt, length in zip(prompts, outputs, strict=True)]


def prefix_repetition(
    tokens: Tokens,
    count: int,
    prefix_len: int,
    suffix_len: int,
    num_prefixes: int,
    output_len: int,
    seed: int,
) -> list[Sample]:
    """`--dataset-name prefix_repetition`: each prefix with suffixes of its own, shuffled."""
    for name, value in (("num_prefixes", num_prefixes), ("output_len", output_len),
                        ("prefix_len", prefix_len), ("suffix_len", suffix_len)):  # fmt: skip
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    rng = generator(seed)
    writer = Writer(tokens, rng)
    prefixes = [writer.text(prefix_len)[0] for _ in range(min(num_prefixes, count))]
    samples = [
        Sample(*writer.text(prefix_len + suffix_len, prefixes[i % len(prefixes)]), output_len)
        for i in range(count)
    ]
    return [samples[i] for i in rng.permutation(count)]


def sharegpt(
    path: Path, tokens: Tokens, count: int, output_len: int | None, seed: int
) -> list[Sample]:
    """`--dataset-name sharegpt`: first question and first answer of each conversation.

    As in vLLM, prompts and answers of fewer than 4 tokens, prompts over 1024 and pairs over 2048
    are left out. Raises ConfigError.
    """
    conversations = _read_json(path)
    if not isinstance(conversations, list):
        raise ConfigError(f"{path} must hold a list of conversations")
    rng = generator(seed)
    found: list[Sample] = []
    for i in rng.permutation(len(conversations)):
        turns = _turns(conversations[i])
        if len(turns) < 2:
            continue
        length = len(tokens.encode(turns[0]))
        answer = output_len or len(tokens.encode(turns[1], add_special_tokens=False))
        if 4 <= length <= 1024 and answer >= 4 and length + answer <= 2048:
            found.append(Sample(turns[0], length, answer))
        if len(found) == count:
            break
    return _some(found, path)


def _turns(conversation: Any) -> list[str]:
    parts = conversation.get("conversations") if isinstance(conversation, dict) else None
    if not isinstance(parts, list):
        return []
    texts = [part.get("value") for part in parts if isinstance(part, dict)]
    return [text for text in texts if isinstance(text, str)]


def custom(
    path: Path, tokens: Tokens | None, output_len: int, seed: int, shuffle: bool = True
) -> list[Sample]:
    """`--dataset-name custom`: JSON lines with `prompt`, and `output_tokens` if they differ.

    Raises ConfigError, naming the line.
    """
    found = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: no JSON ({error})") from error
        prompt = item.get("prompt") if isinstance(item, dict) else None
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(f'{path}, line {number}: needs a text as "prompt"')
        length = item.get("output_tokens", output_len)
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise ConfigError(f"{path}, line {number}: output_tokens must be from 1, not {length}")
        found.append(Sample(prompt, len(tokens.encode(prompt)) if tokens else 0, length))
    if shuffle:
        found = [found[i] for i in generator(seed).permutation(len(found))]
    return _some(found, path)


def _some(found: list[Sample], path: Path) -> list[Sample]:
    if not found:
        raise ConfigError(f"{path} holds no usable prompt")
    return found


def repeated(found: list[Sample], count: int, no_oversample: bool = False) -> list[Sample]:
    """`count` samples: from the start again where there are too few, unless `no_oversample`."""
    wanted = min(count, len(found)) if no_oversample else count
    return [found[i % len(found)] for i in range(wanted)]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"dataset-path {path} cannot be read: {error}") from error


def _read_json(path: Path) -> Any:
    try:
        return json.loads(_read(path))
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
