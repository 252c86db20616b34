"""Tokens that a folder adds to its vocabulary, from every file that `save_pretrained` has used.

`added_tokens_decoder` of tokenizer_config.json has them by id and with their flags; older folders
have `added_tokens.json` (text -> id), with the special ones named in special_tokens_map.json or in
tokenizer_config.json. Files that contradict each other are an error, as is what is not understood.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from octavo.errors import CheckpointError, shown

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
                "mask_token")  # fmt: skip
FILE = "added_tokens.json"
MAP = "special_tokens_map.json"
# Lists of special tokens that have no name: transformers 4, and 5.
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_MARKER = re.compile(r"<\|[^|<>\s]+\|>")


def text_of(token: Any) -> str | None:
    """A special token of a config: its text, or an object that holds it."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def unnamed_special(
    folder: Path, config: Mapping[str, Any], mapped: Mapping[str, Any]
) -> list[str]:
    """The special tokens beside `NAMED_TOKENS`, in the order of the files.

    config: tokenizer_config.json; mapped: special_tokens_map.json.
    """
    entries: list[tuple[str, str, Any]] = []
    for file, source in ((MAP, mapped), ("tokenizer_config.json", config)):
        for name in _LISTS:
            listed = source.get(name) or []
            if isinstance(listed, Mapping):  # names of the model's own -> tokens
                listed = list(listed.values())
            if not isinstance(listed, list):
                raise CheckpointError(f"{folder / file}: {name} is {shown(listed)}, not a list")
            entries += [(file, name, item) for item in listed]
    further = [(MAP, k, v) for k, v in mapped.items() if k not in (*NAMED_TOKENS, *_LISTS)]
    texts: dict[str, None] = {}
    for file, name, token in [*entries, *further]:
        if (text := text_of(token)) is None:
            raise CheckpointError(f"{folder / file}: {name} holds {shown(token)}, not a token")
        texts[text] = None
    return list(texts)


def by_id(
    folder: Path,
    config: Mapping[str, Any],
    legacy: Mapping[str, Any],
    special: Iterable[str],
    templates: Iterable[str],
) -> dict[int, AddedToken]:
    """The added tokens that have an id.

    legacy: added_tokens.json; special: texts of special tokens. A turn marker (`<|...|>`) that a
    chat template writes is special even if only added_tokens.json has it: else any message could
    spell one.
    """
    found: dict[int, AddedToken] = {}
    for key, entry in (config.get("added_tokens_decoder") or {}).items():
        flags = {k: v for k, v in entry.items() if k not in ("content", "__type")}
        found[int(key)] = AddedToken(entry["content"], **flags)
    ids = {token.content: number for number, token in found.items()}
    names, written = set(special), "\n".join(templates)
    for text, number in legacy.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise CheckpointError(f"{folder / FILE}: the id of {shown(text)} is {shown(number)}")
        known = found.get(number)
        if ids.get(text, number) != number or (known is not None and known.content != text):
            other = (
                f"{shown(known.content)} the id {number}"
                if known
                else f"{shown(text)} the id {ids[text]}"
            )
            raise CheckpointError(
                f"{folder / FILE} gives {shown(text)} the id {number}, but added_tokens_decoder in "
                f"tokenizer_config.json gives {other}"
            )
        if known is None:
            is_special = text in names or bool(_MARKER.fullmatch(text) and text in written)
            found[number] = AddedToken(text, normalized=False, special=is_special)
            ids[text] = number
    return dict(sorted(found.items()))


def add(
    file: Path, backend: tokenizers.Tokenizer, tokens: Mapping[int, AddedToken], last: Iterable[str]
) -> None:
    """Add `tokens`, each at its id, and then the special tokens `last` that have none."""
    present = backend.get_added_tokens_decoder()
    for number, token in tokens.items():
        if number not in present:
            backend.add_tokens([token])
        if (found := backend.token_to_id(token.content)) != number:
            raise CheckpointError(
                f"{file}: the added token {shown(token.content)} should have the id {number}, "
                f"but the vocabulary gives it {found}"
            )
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in last if text not in added]
    )
