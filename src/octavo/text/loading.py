"""Find a tokenizer's files and read the parts that a `Tokenizer` is made of.

A folder holds `tokenizer.json` (with its `tokenizer_config.json`) or, in older checkpoints, a
SentencePiece `tokenizer.model`; a `.gguf` file carries its tokenizer in its metadata.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from octavo.checkpoint.gguf import read_gguf_header
from octavo.errors import CheckpointError, ConfigError, ModelNotFoundError
from octavo.text.spm_model import read_spm_model
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

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
                "mask_token")  # fmt: skip


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
    path = Path(path).expanduser()
    try:
        return _read(path, metadata)
    except ConfigError:
        raise
    except Exception as error:  # whatever a file that lies brings about, in the library or here
        raise CheckpointError(f"{path}: the tokenizer cannot be built: {error}") from error


def _read(path: Path, metadata: Mapping[str, Any] | None) -> Parts:
    if metadata is not None or path.suffix == ".gguf":
        return _from_gguf(path, read_gguf_header(path).metadata if metadata is None else metadata)
    if path.is_file():
        folder, files = path.parent, [path]
    elif path.is_dir():
        folder, files = path, [path / "tokenizer.json", path / "tokenizer.model"]
    else:
        raise ModelNotFoundError(f"{path} does not exist")
    file = next((f for f in files if f.is_file()), None)
    if file is None:
        raise CheckpointError(f"{path} has no tokenizer: no tokenizer.json, no tokenizer.model")
    config = _config(folder)
    if file.suffix == ".model":
        return _from_spm(file, config, _templates(folder, config))
    return _from_json(file, config, _templates(folder, config))


def _from_json(file: Path, config: Mapping[str, Any], templates: dict[str, str]) -> Parts:
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for any fault of the file
        raise CheckpointError(f"{file} is not a valid tokenizer.json: {error}") from error
    return _finish(file, backend, config, templates)


def _from_spm(file: Path, config: Mapping[str, Any], templates: dict[str, str]) -> Parts:
    model = read_spm_model(file, always_prefix=bool(config.get("legacy", True)))
    texts = model.pieces.texts
    ids = {"bos_token": model.bos_id, "eos_token": model.eos_id, "pad_token": model.pad_id,
           "unk_token": model.pieces.unk_id}  # fmt: skip
    own = {name: texts[i] for name, i in ids.items() if i is not None and i < len(texts)}
    # SentencePiece models add BOS unless their config says otherwise.
    config = {"add_bos_token": "bos_token" in own, **own, **config}
    return _finish(file, sentencepiece(model.pieces), config, templates)


def _finish(
    file: Path,
    backend: tokenizers.Tokenizer,
    config: Mapping[str, Any],
    templates: dict[str, str],
) -> Parts:
    _add_listed_tokens(file, backend, config)
    named = {name: text for name in NAMED_TOKENS if (text := _text_of(config.get(name)))}
    for name in ("bos_token", "eos_token"):
        if name in named and backend.token_to_id(named[name]) is None:
            raise CheckpointError(f"{file}: the {name} {named[name]!r} is not in the vocabulary")
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


def _add_listed_tokens(
    file: Path, backend: tokenizers.Tokenizer, config: Mapping[str, Any]
) -> None:
    """Tokens that only `tokenizer_config.json` lists, by id."""
    listed = config.get("added_tokens_decoder") or {}
    present = backend.get_added_tokens_decoder()
    for key, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        if int(key) in present:
            continue
        flags = {k: v for k, v in entry.items() if k not in ("content", "__type")}
        backend.add_tokens([AddedToken(entry["content"], **flags)])
        if (found := backend.token_to_id(entry["content"])) != int(key):
            raise CheckpointError(
                f"{file}: the added token {entry['content']!r} should have the id {key}, "
                f"but the vocabulary gives it {found}"
            )


def _from_gguf(path: Path, metadata: Mapping[str, Any]) -> Parts:
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _listed(path, metadata, "tokens", str)
    if kind not in ("gpt2", "llama") or not tokens:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.model is {kind!r} with {len(tokens)} tokens; "
            "'gpt2' (BPE) and 'llama' (SentencePiece) are supported"
        )
    ids = {
        name: _gguf_id(path, metadata, name, len(tokens))
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    kinds = _listed(path, metadata, "token_type", int) or [NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{path}: {len(tokens)} tokens but {len(kinds)} token types")
    # Some files call an end of turn a normal token; what starts or ends a text is a control.
    for name in ("bos", "eos", "eot", "eom"):
        if (index := ids[name]) is not None:
            kinds[index] = CONTROL
    if kind == "gpt2":
        rule = splitter(metadata.get("tokenizer.ggml.pre", "default"))
        merges = _listed(path, metadata, "merges", str)
        backend, add_bos = byte_level_bpe(tokens, merges, kinds, rule), rule.add_bos
    else:
        backend, add_bos = sentencepiece(_gguf_pieces(path, metadata, tokens, kinds, ids)), True
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token",
             "padding": "pad_token"}  # fmt: skip
    return Parts(
        backend,
        named={n: tokens[i] for key, n in names.items() if (i := ids[key]) is not None},
        chat_templates=_gguf_templates(metadata),
        eos_ids=tuple(i for name in ("eot", "eom") if (i := ids[name]) is not None),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    )


def _gguf_pieces(
    path: Path,
    metadata: Mapping[str, Any],
    tokens: list[str],
    kinds: list[int],
    ids: Mapping[str, int | None],
) -> Pieces:
    scores = _listed(path, metadata, "scores", float)
    if len(scores) != len(tokens):
        raise CheckpointError(f"{path}: {len(tokens)} tokens but {len(scores)} scores")
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
        dummy_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
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
    if not isinstance(value, int) or not 0 <= value < size:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.{name}_token_id is {value!r}, outside the {size} tokens"
        )
    return value


def _is_spm(metadata: Mapping[str, Any]) -> bool:
    return metadata.get("tokenizer.ggml.model") == "llama"


def _gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    templates = {"default": metadata[key]} if key in metadata else {}
    for name in metadata.get("tokenizer.chat_templates", []):
        if f"{key}.{name}" in metadata:
            templates[name] = metadata[f"{key}.{name}"]
    return templates


def _config(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json` over `special_tokens_map.json`; fields that are null count as
    absent."""
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (file := folder / name).is_file():
            merged.update({k: v for k, v in _json(file).items() if v is not None})
    return merged


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not {type(value).__name__}")
    return value


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; a `.jinja` file goes before the config's field."""
    templates: dict[str, str] = {}
    field = config.get("chat_template")
    if isinstance(field, str):
        templates["default"] = field
    elif isinstance(field, list):
        templates.update({entry["name"]: entry["template"] for entry in field})
    if (file := folder / "chat_template.json").is_file():
        templates["default"] = str(_json(file).get("chat_template", ""))
    if (file := folder / "chat_template.jinja").is_file():
        templates["default"] = file.read_text(encoding="utf-8")
    for file in sorted(folder.glob("additional_chat_templates/*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    return {name: text for name, text in templates.items() if text}


def _text_of(token: Any) -> str | None:
    """A special token of a config: its text, or an object that holds it."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None
