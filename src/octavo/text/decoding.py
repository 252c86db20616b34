"""The exact bytes of each token, by the kind of decoder that the tokenizer names."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import tokenizers

from octavo.errors import CheckpointError
from octavo.text.vocab import SPACE, byte_alphabet


@dataclass(frozen=True)
class ByteRule:
    """How a token's spelling becomes bytes.

    "bytes": one character a byte (byte-level BPE). "marker": U+2581 is a space, and `<0xNN>`
    is a byte if `byte_tokens`. "words": tokens are words with a space between.
    strips_space: one leading space of a whole text is dropped.
    prefixes: encoding puts a space before the "first" word of a text, before "each" stretch
        between special tokens, or nowhere ("").
    """

    kind: Literal["bytes", "marker", "words"]
    byte_tokens: bool = False
    strips_space: bool = False
    prefixes: Literal["", "first", "each"] = ""


class TokenBytes:
    """token id -> its bytes; an id without a token has none."""

    def __init__(
        self, backend: tokenizers.Tokenizer, added: Mapping[int, Any], rule: ByteRule
    ) -> None:
        self._spelling = backend.id_to_token
        self._added = added
        self._rule = rule
        self._alphabet = byte_alphabet()

    def __call__(self, token_id: int) -> bytes:
        spelling: str | None = self._spelling(token_id)
        if spelling is None:
            return b""
        if self._rule.kind == "words":
            return b" " + spelling.encode()
        if self._rule.kind == "marker":
            return self._marked(spelling)
        if token_id in self._added or any(c not in self._alphabet for c in spelling):
            return spelling.encode()
        return bytes(self._alphabet[c] for c in spelling)

    def _marked(self, spelling: str) -> bytes:
        if self._rule.byte_tokens and len(spelling) == 6 and spelling.startswith("<0x"):
            try:
                return bytes([int(spelling[3:5], 16)])
            except ValueError:
                pass
        return spelling.replace(SPACE, " ").encode()


def byte_rule(backend: tokenizers.Tokenizer) -> ByteRule:
    """The rule that the backend's decoder stands for.

    Raises CheckpointError for a decoder whose text is not the join of its tokens' bytes.
    """
    steps = _steps(backend.decoder, "decoders")
    kinds = {step["type"] for step in steps}
    prefixes = _prefixes(backend)
    if not steps:
        return ByteRule("words", strips_space=True)
    if "ByteLevel" in kinds:
        return ByteRule("bytes", prefixes=prefixes)
    unknown = kinds - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if unknown or not kinds & {"Replace", "Metaspace"}:
        raise CheckpointError(
            f"the tokenizer's decoder {sorted(kinds)} is not supported; "
            "ByteLevel, Metaspace and Replace + ByteFallback + Fuse + Strip are"
        )
    strips = any(
        (step["type"] == "Strip" and step.get("start", 0) > 0)
        or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
        for step in steps
    )
    return ByteRule("marker", "ByteFallback" in kinds, strips, prefixes)


def _prefixes(backend: tokenizers.Tokenizer) -> Literal["", "first", "each"]:
    for step in _steps(backend.pre_tokenizer, "pretokenizers"):
        if step["type"] == "Metaspace" and step.get("prepend_scheme") == "first":
            return "first"
        if step["type"] == "Metaspace" and step.get("prepend_scheme") != "never":
            return "each"
        if step["type"] == "ByteLevel" and step.get("add_prefix_space"):
            return "each"
    normalizes = _steps(backend.normalizer, "normalizers")
    return "each" if any(step["type"] == "Prepend" for step in normalizes) else ""


def _steps(part: Any, children: str) -> list[dict[str, Any]]:
    """The steps of a pipeline part, nested sequences laid flat."""
    if part is None:
        return []
    return _flat(json.loads(part.__getstate__()), children)


def _flat(state: dict[str, Any], children: str) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    return [step for child in state[children] for step in _flat(child, children)]
