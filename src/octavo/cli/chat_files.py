"""Conversations of `octavo chat` in files: JSON to go on with later, Markdown to read.

The JSON has `messages` as OpenAI's interface has them, `settings` in SamplingParams' names, and
`model`. Raises RequestError, naming the file and what is wrong with it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from octavo.cli.chat_session import Turn, messages
from octavo.errors import RequestError, brief, cause, shown
from octavo.params import SamplingParams

_JSON, _MARKDOWN = ".json", (".md", ".markdown")
_LARGEST = 64 << 20


@dataclass(frozen=True, slots=True)
class Saved:
    """What a file holds. settings: None where it has none, as a bare list of messages."""

    system: str | None
    turns: list[Turn]
    settings: SamplingParams | None


def changed_settings(params: SamplingParams) -> dict[str, Any]:
    """The fields that differ from SamplingParams' own defaults, as JSON has them."""
    plain = SamplingParams()
    found = {f.name: getattr(params, f.name) for f in fields(SamplingParams)}
    found = {name: value for name, value in found.items() if value != getattr(plain, name)}
    found.pop("output_kind", None)
    return {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}


def check_name(path: Path) -> None:
    """Raise RequestError unless the name says how to write the file."""
    if path.suffix.lower() not in (_JSON, *_MARKDOWN):
        raise RequestError(f"{str(path)!r} must end in .json or .md, which says how to write it")


def save(
    path: Path,
    model: str,
    system: str | None,
    turns: Sequence[Turn],
    params: SamplingParams,
    replace: bool,
) -> None:
    """Write the conversation. replace: whether an existing file may be overwritten."""
    check_name(path)
    if path.suffix.lower() == _JSON:
        content: dict[str, Any] = {
            "model": model,
            "settings": changed_settings(params),
            "messages": messages(system, turns),
        }
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    else:
        text = _markdown(model, system, turns)
    try:
        with path.open("w" if replace else "x", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except FileExistsError:
        raise RequestError(
            f"{str(path)!r} exists and is not of this conversation; choose another name"
        ) from None
    except (OSError, ValueError) as error:
        raise RequestError(f"cannot write {str(path)!r}: {cause(error)}") from None


def load(path: Path) -> Saved:
    """Read a conversation that `save` wrote as JSON, or a list of messages."""
    try:
        if path.stat().st_size > _LARGEST:
            raise RequestError(f"{str(path)!r} is larger than {_LARGEST >> 20} MiB")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"cannot read {str(path)!r}: {cause(error)}") from None
    except RequestError:
        raise
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{str(path)!r} is not JSON: {brief(error, 120)}") from None
    if isinstance(content, list):
        content = {"messages": content}
    if not isinstance(content, dict) or not isinstance(content.get("messages"), list):
        raise RequestError(f"{str(path)!r} has no list of messages; /save FILE.json writes one")
    try:
        system, turns = _turns(content["messages"])
        return Saved(system, turns, _settings(content.get("settings")))
    except RequestError as error:
        raise RequestError(f"{str(path)!r}: {error}") from None


def _turns(found: list[Any]) -> tuple[str | None, list[Turn]]:
    texts = [_text(message, i) for i, message in enumerate(found)]
    system = texts.pop(0)[1] if texts and texts[0][0] == "system" else None
    offset = len(found) - len(texts)
    for i, (role, _) in enumerate(texts):
        wanted = ("user", "assistant")[i % 2]
        if role != wanted:
            raise RequestError(f"messages[{i + offset}].role must be {wanted!r}, not {shown(role)}")
    if len(texts) % 2:
        raise RequestError("the last message must be the assistant's: a message has no answer")
    return system, [Turn(texts[i][1], texts[i + 1][1]) for i in range(0, len(texts), 2)]


def _text(message: Any, index: int) -> tuple[str, str]:
    if not isinstance(message, Mapping):
        raise RequestError(f"messages[{index}] must be an object, not {shown(message)}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise RequestError(f"messages[{index}] must have a role and a content, both of them texts")
    return role, content


def _settings(found: Any) -> SamplingParams | None:
    if found is None:
        return None
    if not isinstance(found, dict):
        raise RequestError(f"settings must be an object, not {shown(found)}")
    if isinstance(bias := found.get("logit_bias"), dict):  # whose keys JSON turns into texts
        found = {**found, "logit_bias": {int(k) if k.isdigit() else k: v for k, v in bias.items()}}
    return SamplingParams(**found)


def _markdown(model: str, system: str | None, turns: Sequence[Turn]) -> str:
    parts = [f"# Conversation with {model}"]
    if system is not None:
        parts += ["## System", system]
    for turn in turns:
        parts += ["## User", turn.user, "## Assistant", turn.answer]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"
