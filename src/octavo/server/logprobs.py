"""Log-probabilities in OpenAI's two shapes: parallel arrays, and one object per token."""

import codecs
from collections.abc import Sequence

from octavo.outputs import Logprob, PositionLogprobs, finite, position_as_dict
from octavo.server.replies import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from octavo.text.tokenizer import Tokenizer


def likeliest(position: PositionLogprobs, count: int) -> list[tuple[int, Logprob]]:
    """The `count` likeliest tokens of a position, in order."""
    ranked = sorted(position.items(), key=lambda item: item[1].rank)
    return ranked[:count]


def prompt_logprobs(
    positions: Sequence[PositionLogprobs | None],
) -> list[dict[str, dict[str, float | int | str]] | None]:
    """vLLM's shape: for each prompt token, token id -> its values; null for the first one."""
    return [None if position is None else position_as_dict(position) for position in positions]


class TokenFormatter:
    """How tokens are shown: as text, as `bytes:\\x..` where that is no text, or as ids."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._hidden = tokenizer.special_ids if skip_special else frozenset[int]()

    def raw(self, token: int) -> bytes:
        """The bytes that the token adds to the text: none, if it is hidden."""
        return b"" if token in self._hidden else self._tokenizer.token_bytes(token)

    def text(self, token: int) -> str:
        """For chat, where the entry also has the bytes."""
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_text(token)

    def key(self, token: int) -> str:
        """For completions, where the text is a key, so that parts of characters must differ."""
        if self._as_ids:
            return f"token_id:{token}"
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class CompletionArrays:
    """The arrays of one choice, chunk by chunk; `text_offset` goes on from chunk to chunk."""

    def __init__(self, formatter: TokenFormatter, count: int) -> None:
        self._formatter = formatter
        self._count = count
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(
        self, tokens: Sequence[int], positions: Sequence[PositionLogprobs | None]
    ) -> CompletionLogprobs:
        """The arrays for these tokens. The first token of a prompt has no position: null."""
        arrays = CompletionLogprobs([], [], [], [])
        for token, position in zip(tokens, positions, strict=True):
            arrays.text_offset.append(self._offset)
            arrays.tokens.append(self._formatter.key(token))
            self._offset += len(self._decoder.decode(self._formatter.raw(token)))
            if position is None:
                arrays.token_logprobs.append(None)
                arrays.top_logprobs.append(None)
                continue
            arrays.token_logprobs.append(finite(position[token].logprob))
            shown = [*likeliest(position, self._count), (token, position[token])]
            arrays.top_logprobs.append(
                {self._formatter.key(i): finite(entry.logprob) for i, entry in shown}
            )
        return arrays


def chat_logprobs(
    formatter: TokenFormatter,
    count: int,
    tokens: Sequence[int],
    positions: Sequence[PositionLogprobs],
) -> ChatLogprobs:
    """One entry per token, each with exactly `count` alternatives, the likeliest first."""
    entries: list[TokenLogprob] = []
    for token, position in zip(tokens, positions, strict=True):
        top = [
            TopLogprob(formatter.text(i), finite(entry.logprob), list(formatter.raw(i)))
            for i, entry in likeliest(position, count)
        ]
        value = finite(position[token].logprob)
        entries.append(TokenLogprob(formatter.text(token), value, list(formatter.raw(token)), top))
    return ChatLogprobs(entries)
