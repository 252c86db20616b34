"""A byte-level BPE tokenizer from `vocab.json` and `merges.txt`, without a `tokenizer.json`.

What the two files leave out, how text is cut into words and which tokens are special, the class
named in tokenizer_config.json implies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers

from octavo.errors import CheckpointError, shown
from octavo.text.vocab import NORMAL, byte_level_bpe, splitter

_END = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class _Rule:
    """splitter: its name in `text.vocab`; nfc: text is normalized; named: the special tokens that
    a config leaves out."""

    splitter: str
    nfc: bool
    named: Mapping[str, str]


_GPT2 = _Rule("gpt-2", False, {"bos_token": _END, "eos_token": _END, "unk_token": _END})
_QWEN2 = _Rule("qwen2", True, {"eos_token": _END, "pad_token": _END})
_RULES = {"GPT2Tokenizer": _GPT2, "Qwen2Tokenizer": _QWEN2}


def read(
    vocab: Path, merges: Path, ids: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[tokenizers.Tokenizer, Mapping[str, str]]:
    """The tokenizer, and the special tokens that its class implies. ids: what `vocab` holds."""
    kind = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    if kind not in _RULES:
        raise CheckpointError(
            f"{vocab.parent} has {vocab.name} and {merges.name} but no tokenizer.json, and "
            f"tokenizer_config.json: tokenizer_class is {shown(config.get('tokenizer_class'))}; "
            f"known are {', '.join(_RULES)}; save it with a fast tokenizer, which writes "
            "tokenizer.json"
        )
    if config.get("add_prefix_space"):
        raise CheckpointError(f"{vocab.parent}: add_prefix_space is true; it must be false")
    if not merges.is_file():
        raise CheckpointError(f"{merges} is missing: {vocab.name} is of no use without it")
    texts = sorted(ids, key=ids.__getitem__)
    if [ids[text] for text in texts] != list(range(len(texts))):
        raise CheckpointError(f"{vocab}: the ids are not 0 to {len(texts) - 1}")
    lines = merges.read_text(encoding="utf-8").split("\n")
    pairs = [line for line in lines if line.strip() and not line.startswith("#version")]
    rule = _RULES[kind]
    backend = byte_level_bpe(texts, pairs, [NORMAL] * len(texts), splitter(rule.splitter))
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    return backend, rule.named
