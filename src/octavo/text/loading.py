"""Find a tokenizer's files and read the parts that a `Tokenizer` is made of.

A folder holds `tokenizer.json` (with its `tokenizer_config.json`) or, in older checkpoints, a
SentencePiece `tokenizer.model`, or `vocab.json` and `merges.txt`, each with further files of added
and special tokens; a `.gguf` file carries its tokenizer in its metadata.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from octavo.checkpoint.gguf import read_gguf_header
from octavo.checkpoint.json_file import read_json
from octavo.errors import CheckpointError, ConfigError, ModelNotFoundError, brief, shown
from octavo.text import added_tokens, vocab_files
from octavo.text.added_tokens import NAMED_TOKENS as NAMED_TOKENS
from octavo.text.added_tokens import text_of
from octavo.text.charsmap import check_tokenizer_json
from octavo.text.spm_model import piece_texts, read_spm_model
from octavo.text.vocab import (
    CONTROL,
    NORMAL,
    SPACE,
    USER_DEFINED,
    Pieces,
    byte_level_bpe,
    sentencepiece,
    splitter,
)

_GGUF_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")
# The files that hold a vocabulary, the first that is there is read.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# What llama.cpp's converters call the rows of a model's table that no token stands for.
_PADDING = re.compile(r"\[PAD(\d+)\]|<dummy\d{5}>")
_MERGES = re.compile(rb',\s*"merges"\s*:\s*\[')
# Vocabularies of formats that are not read, for the message.
_FOREIGN = ("*.tiktoken", "tekken.json", "spiece.model", "*.bpe.model", "vocab.txt",
            "tokenizer.model.v*")  # fmt: skip


@dataclass(frozen=True)
class Parts:
    """What a tokenizer's files hold.

    named: "bos_token", "eos_token", ... -> text. eos_ids: further ids that end a text.
    chat_templates: name -> jinja source. add_bos, add_eos: None leaves it to the backend.
    """

    backend: tokenizers.Tokenizer
    named: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()
    add_bos: bool | None = None
    add_eos: bool | None = None


def read_parts(path: str | Path, metadata: Mapping[str, Any] | None = None) -> Parts:
    """What the tokenizer of the folder, `tokenizer.json`, `tokenizer.model` or `.gguf` at `path`
    is made of.

    `metadata` is a GGUF's, where the caller has read it already.
    Raises ModelNotFoundError when there is nothing there, CheckpointError when what is there
    is damaged, incomplete or of a kind that is not known.
    """
    path = Path(os.path.expanduser(path))  # which, unlike Path.expanduser, needs no home
    try:
        return _read(path, metadata)
    except ConfigError as error:
        if str(path) in str(error):
            raise
        raise CheckpointError(f"{path}: {error}") from error
    except Exception as error:  # whatever a file that lies brings about, in the library or here
        raise CheckpointError(f"{path}: the tokenizer cannot be built: {brief(error)}") from error


def _read(path: Path, metadata: Mapping[str, Any] | None) -> Parts:
    if metadata is not None or path.suffix == ".gguf":
        return _from_gguf(path, read_gguf_header(path).metadata if metadata is None else metadata)
    return _from_folder(*_vocabulary(path))


def num_ids(path: str | Path, metadata: Mapping[str, Any] | None = None) -> int | None:
    """One more than the largest id that a token of the tokenizer at `path` stands for, as
    `Tokenizer.vocab_size`, without making one; None where there is no tokenizer.

    `metadata` is a GGUF's. Raises CheckpointError as `read_parts`.
    """
    path = Path(os.path.expanduser(path))
    if metadata is not None or path.suffix == ".gguf":
        values = read_gguf_header(path).metadata if metadata is None else metadata
        return _without_padding(path, values, _listed(path, values, "tokens", str)) or None
    try:
        folder, file = _vocabulary(path)
    except (CheckpointError, ModelNotFoundError):
        return None
    try:
        described, ids = _described(folder), _ids_of(file)
        end = 1 + max([-1, *ids.values(), *described.added])
        known = ids.keys() | {token.content for token in described.added.values()}
    except ConfigError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path}: the tokenizer cannot be read: {brief(error)}") from error
    return end + sum(text not in known for text in described.special)


def _ids_of(file: Path) -> dict[str, int]:
    """Text -> id of a file's vocabulary. A tokenizer.json's merges, most of it, are not read."""
    if file.suffix == ".model":
        return {text: i for i, text in enumerate(piece_texts(file))}
    if file.name == "vocab.json":
        return read_json(file)
    data = file.read_bytes()
    start = [match.start() for match in _MERGES.finditer(data)]
    try:
        state = json.loads(data[: start[-1]] + b"}}" if start else data)
    except ValueError:
        state = read_json(file)
    vocab = state["model"]["vocab"]
    if isinstance(vocab, list):  # Unigram: [text, score] by id
        vocab = {text: i for i, (text, _) in enumerate(vocab)}
    return {**vocab, **{token["content"]: token["id"] for token in state["added_tokens"]}}


def _without_padding(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> int:
    """How many of a GGUF's tokens there are before the padding at their end."""
    count = len(tokens)
    while count and (found := _PADDING.fullmatch(tokens[count - 1])):
        if found[1] is not None and int(found[1]) != count - 1:
            break
        count -= 1
    used = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _GGUF_IDS)
    return max([count, *(i + 1 for i in used if isinstance(i, int) and i < len(tokens))])


def _vocabulary(path: Path) -> tuple[Path, Path]:
    """The folder, and the file in it that holds the vocabulary."""
    if path.is_file():
        return path.parent, path
    if not path.is_dir():
        raise ModelNotFoundError(f"{path} does not exist")
    for name in _VOCABULARIES:
        if (path / name).is_file():
            return path, path / name
    foreign = sorted(file.name for kind in _FOREIGN for file in path.glob(kind))
    found = f" (it holds {', '.join(foreign)}, which is not read)" if foreign else ""
    raise CheckpointError(
        f"{path} has no tokenizer: no tokenizer.json, no tokenizer.model, and no vocab.json with "
        f"merges.txt{found}"
    )


@dataclass(frozen=True)
class _Folder:
    """What the files around a vocabulary say. config: tokenizer_config.json over
    special_tokens_map.json; special: the unnamed special tokens; added: tokens by their id."""

    config: Mapping[str, Any]
    templates: dict[str, str]
    special: list[str]
    added: dict[int, AddedToken]


def _described(folder: Path) -> _Folder:
    own, mapped, legacy = (
        {k: v for k, v in read_json(folder / name).items() if v is not None}
        if (folder / name).is_file()
        else {}
        for name in ("tokenizer_config.json", added_tokens.MAP, added_tokens.FILE)
    )
    config = {**mapped, **own}
    templates = _templates(folder, config)
    special = added_tokens.unnamed_special(folder, own, mapped)
    named = [text for name in NAMED_TOKENS if (text := text_of(config.get(name)))]
    tokens = added_tokens.by_id(folder, config, legacy, [*named, *special], templates.values())
    return _Folder(config, templates, special, tokens)


def _from_folder(folder: Path, file: Path) -> Parts:
    described = _described(folder)
    config = described.config
    implied: Mapping[str, Any]
    if file.suffix == ".model":
        backend, implied = _spm(file, config)
    elif file.name == "vocab.json":
        merges = folder / "merges.txt"
        backend, implied = vocab_files.read(file, merges, read_json(file), config)
    else:
        implied = {}
        check_tokenizer_json(file)
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for any fault of the file
            raise CheckpointError(
                f"{file} is not a valid tokenizer.json: {brief(error)}"
            ) from error
    added_tokens.add(file, backend, described.added, described.special)
    return _finish(file, backend, {**implied, **config}, described.templates)


def _spm(file: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    model = read_spm_model(file, always_prefix=bool(config.get("legacy", True)))
    texts = model.pieces.texts
    ids = {"bos_token": model.bos_id, "eos_token": model.eos_id, "pad_token": model.pad_id,
           "unk_token": model.pieces.unk_id}  # fmt: skip
    own = {name: texts[i] for name, i in ids.items() if i is not None and i < len(texts)}
    # SentencePiece models add BOS unless their config says otherwise.
    return sentencepiece(model.pieces), {"add_bos_token": "bos_token" in own, **own}


def _finish(
    file: Path,
    backend: tokenizers.Tokenizer,
    config: Mapping[str, Any],
    templates: dict[str, str],
) -> Parts:
    named = {name: text for name in NAMED_TOKENS if (text := text_of(config.get(name)))}
    for name in ("bos_token", "eos_token"):
        if name in named and backend.token_to_id(named[name]) is None:
            raise CheckpointError(
                f"{file}: the {name} {shown(named[name])} is not in the vocabulary"
            )
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens(
        [
            AddedToken(text, normalized=False, special=True)
            for text in named.values()
            if text not in added and backend.token_to_id(text) is not None
        ]
    )
    return Parts(
        backend,
        named=named,
        chat_templates=templates,
        add_bos=config.get("add_bos_token"),
        add_eos=config.get("add_eos_token"),
    )


def _from_gguf(path: Path, metadata: Mapping[str, Any]) -> Parts:
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _listed(path, metadata, "tokens", str)
    if kind not in ("gpt2", "llama") or not tokens:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.model is {shown(kind)} with {len(tokens)} tokens; "
            "'gpt2' (BPE) and 'llama' (SentencePiece) are supported"
        )
    ids = {name: _gguf_id(path, metadata, name, len(tokens)) for name in _GGUF_IDS}
    kinds = _listed(path, metadata, "token_type", int) or [NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{path}: {len(tokens)} tokens but {len(kinds)} token types")
    scores = _listed(path, metadata, "scores", float)
    if kind == "llama" and len(scores) != len(tokens):
        raise CheckpointError(f"{path}: {len(tokens)} tokens but {len(scores)} scores")
    count = _without_padding(path, metadata, tokens)
    tokens, kinds, scores = tokens[:count], kinds[:count], scores[:count]
    # Some files call an end of turn a normal token; what starts or ends a text is a control.
    for name in ("bos", "eos", "eot", "eom"):
        if (index := ids[name]) is not None:
            kinds[index] = CONTROL
    if kind == "gpt2":
        rule = splitter(_text(path, metadata, "tokenizer.ggml.pre", "default"))
        merges = _listed(path, metadata, "merges", str)
        backend, add_bos = byte_level_bpe(tokens, merges, kinds, rule), rule.add_bos
    else:
        backend, add_bos = (
            sentencepiece(_gguf_pieces(path, metadata, tokens, kinds, scores, ids)),
            True,
        )
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token",
             "padding": "pad_token"}  # fmt: skip
    return Parts(
        backend,
        named={n: tokens[i] for key, n in names.items() if (i := ids[key]) is not None},
        chat_templates=_gguf_templates(path, metadata),
        eos_ids=tuple(i for name in ("eot", "eom") if (i := ids[name]) is not None),
        add_bos=_flag(path, metadata, "tokenizer.ggml.add_bos_token", add_bos),
        add_eos=_flag(path, metadata, "tokenizer.ggml.add_eos_token", False),
    )


def _gguf_pieces(
    path: Path,
    metadata: Mapping[str, Any],
    tokens: list[str],
    kinds: list[int],
    scores: list[float],
    ids: Mapping[str, int | None],
) -> Pieces:
    # llama.cpp's converter writes the spaces of user-defined pieces as such.
    texts = [
        token.replace(" ", SPACE) if kind == USER_DEFINED else token
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    return Pieces(
        texts,
        scores,
        kinds,
        unk_id=ids["unknown"] or 0,
        dummy_prefix=_flag(path, metadata, "tokenizer.ggml.add_space_prefix", True),
    )


def _listed(path: Path, metadata: Mapping[str, Any], name: str, of: type) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(values, list) or (values and not isinstance(values[0], of)):
        raise CheckpointError(f"{path}: tokenizer.ggml.{name} is not a list of {of.__name__}")
    return list(values)


def _gguf_id(path: Path, metadata: Mapping[str, Any], name: str, size: int) -> int | None:
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if _is_spm(metadata) else {}
    value = metadata.get(f"tokenizer.ggml.{name}_token_id", defaults.get(name))
    if value is None or value == 2**32 - 1:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < size:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.{name}_token_id is {shown(value)}, outside the {size} tokens"
        )
    return value


def _is_spm(metadata: Mapping[str, Any]) -> bool:
    return metadata.get("tokenizer.ggml.model") == "llama"


def _gguf_templates(path: Path, metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    names = metadata.get("tokenizer.chat_templates", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _wrong(path, "tokenizer.chat_templates", names, "a list of names")
    keys = {"default": key, **{name: f"{key}.{name}" for name in names}}
    return {name: _text(path, metadata, at) for name, at in keys.items() if at in metadata}


def _text(path: Path, values: Mapping[str, Any], key: str, default: str = "") -> str:
    value = values.get(key, default)
    if not isinstance(value, str):
        raise _wrong(path, key, value, "a text")
    return value


def _flag(path: Path, values: Mapping[str, Any], key: str, default: bool) -> bool:
    value = values.get(key, default)
    if not isinstance(value, bool):
        raise _wrong(path, key, value, "true or false")
    return value


def _wrong(path: Path, key: str, value: object, right: str) -> CheckpointError:
    return CheckpointError(f"{path}: {key} is {shown(value)}; it must be {right}")


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; a `.jinja` file goes before the config's field."""
    templates: dict[str, str] = {}
    field, file = config.get("chat_template"), folder / "tokenizer_config.json"
    if isinstance(field, str):
        templates["default"] = field
    elif isinstance(field, list):
        for entry in field:
            if not isinstance(entry, Mapping) or not {"name", "template"} <= entry.keys():
                raise _wrong(file, "chat_template", entry, "an object with a name and a template")
            templates[_text(file, entry, "name")] = _text(file, entry, "template")
    elif field is not None:
        raise _wrong(file, "chat_template", field, "a text, or a list of named ones")
    if (file := folder / "chat_template.json").is_file():
        templates["default"] = _text(file, read_json(file), "chat_template")
    if (file := folder / "chat_template.jinja").is_file():
        templates["default"] = file.read_text(encoding="utf-8")
    for file in sorted(folder.glob("additional_chat_templates/*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    return {name: text for name, text in templates.items() if text}
