"""Messages to a prompt: the model's chat template, and ids in which no message can forge a turn.

For messages without special tokens in them the ids are those of transformers'
`apply_chat_template(tokenize=True)`. Where a caller's text spells a special token, or begins or
ends with a part of one, the template is rendered a second time with a mark put inside each such
spelling: whatever special token still stands whole in that text was written by the template,
and everything between them is encoded as mere text. The mark is a character that occurs nowhere
else, and sits where trimming and splitting leave it.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from octavo.errors import ConfigError, RequestError, RequestTypeError, shown
from octavo.text.loading import NAMED_TOKENS
from octavo.text.sandbox import Template
from octavo.text.tokenizer import Tokenizer
from octavo.text.tool_prompt import told
from octavo.text.tools.base import ToolFormat

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
RESERVED = frozenset(
    {
        *NAMED_TOKENS,
        "messages",
        "conversation",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "raise_exception",
        "strftime_now",
        "namespace",
        "range",
        "dict",
    }
)
# Stands after the text that is to be continued: whether a template trimmed it shows whether it
# would have trimmed that text's own last spaces. No template writes this kind of space.
_RARE_SPACE = "\u205f"
_MAX_TEMPLATE = 1_000_000


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation: its text, and the ids to compute."""

    text: str
    token_ids: list[int]


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_format: ToolFormat | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> ChatPrompt:
    """The prompt of a conversation, with exactly one BOS where the tokenizer uses one.

    chat_template: jinja source, or the name of one of the tokenizer's; None is the model's own.
    tools: descriptions that the template shows to the model, as transformers passes them.
    tool_format: how calls are written where the template knows no tools, which then are told in
        words; None refuses them.
    add_generation_prompt: open the assistant's turn; None does, unless the final message is
        to be continued.
    continue_final_message: the prompt ends with the final assistant message's text.
    chat_template_kwargs: further variables of the template; those it gets anyway are refused.

    Raises RequestError: a message is malformed, there is no template, or it refuses.
    """
    template = _template(tokenizer, chat_template, tools)
    checked, shown_tools = _messages(messages, template.knows_developer), _objects("tools", tools)
    if template.reads_thinking:
        checked = [_with_thinking(message) for message in checked]
    if not template.shows_tools:
        if tool_format is not None:
            checked, shown_tools = told(checked, shown_tools, tool_format), None
        elif tools:
            raise RequestError(
                "tools were given, but the chat template does not show them", "tools"
            )
    job = _Job(
        tokenizer,
        template,
        _Inputs(checked, shown_tools, _extra(chat_template_kwargs)),
        _opens_turn(add_generation_prompt, continue_final_message),
        continue_final_message,
    )
    text = job.render()
    if not job.control.touches(job.inputs.strings()):
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = job.guarded(text)
    bos = tokenizer.bos_id
    if tokenizer.adds_bos and bos is not None and ids[:1] != [bos]:
        ids.insert(0, bos)
    return ChatPrompt(text, ids)


def read_chat_template(value: str) -> str:
    """The template that an option names: a file, or jinja source given in place.

    Raises ConfigError when it is neither, or does not compile.
    """
    path = Path(os.path.expanduser(value))  # which, unlike Path.expanduser, needs no home
    source = value
    if "{" not in value:
        if not path.is_file():
            raise ConfigError(f"chat template: {value!r} is neither a file nor jinja source")
        source = path.read_text(encoding="utf-8")
    try:
        _compiled(source)
    except Exception as error:
        raise ConfigError(f"the chat template does not compile: {_explain(error)}") from error
    return source


@lru_cache(maxsize=32)
def _compiled(source: str) -> Template:
    return Template(source)


def _template(tokenizer: Tokenizer, given: str | None, tools: object) -> Template:
    known = tokenizer.chat_templates
    if given is None:
        given = "tool_use" if tools and "tool_use" in known else "default"
        if given not in known:
            raise RequestError(
                "this model has no chat template; start with a template of your own "
                "(chat_template=..., --chat-template FILE), or send a plain prompt instead",
                "chat_template",
            )
    source = known.get(given, given)
    if len(source) > _MAX_TEMPLATE:
        raise RequestError(
            f"the chat template has {len(source)} characters, more than {_MAX_TEMPLATE}",
            "chat_template",
        )
    try:
        template = _compiled(source)
    except Exception as error:  # a syntax error, or what the parser raises for abuse
        raise RequestError(
            f"the chat template does not compile: {_explain(error)}", "chat_template"
        ) from error
    return template


def _explain(error: Exception) -> str:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"
    return f"{error}"


def _opens_turn(add_generation_prompt: bool | None, continue_final: bool) -> bool:
    if add_generation_prompt and continue_final:
        raise RequestError(
            "add_generation_prompt and continue_final_message exclude each other: the first opens "
            "a new assistant turn, the second goes on with the last; set one to false",
            "continue_final_message",
        )
    return not continue_final if add_generation_prompt is None else add_generation_prompt


# --- what a caller may send ---------------------------------------------------------------


def _messages(messages: Sequence[Mapping[str, Any]], knows_developer: bool) -> list[dict[str, Any]]:
    """Checked. What developers say is for templates that do not know them the system's: those
    would leave it out, or name a role that the model has never seen."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestTypeError(
            f"messages must be a list of objects, not {type(messages).__name__}", "messages"
        )
    if not messages:
        raise RequestError("messages is empty; give at least one message", "messages")
    checked = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if not knows_developer:
        for message in checked:
            if message["role"] == "developer":
                message["role"] = "system"
    _check_call_ids(checked)
    return checked


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestTypeError(f"{where} must be an object, not {type(message).__name__}", where)
    clean = {key: _json_value(v, f"{where}.{key}") for key, v in message.items() if v is not None}
    role = clean.get("role")
    if role not in ROLES:
        raise RequestError(
            f"{where}.role must be one of {', '.join(ROLES)}, not {role!r}", f"{where}.role"
        )
    if (reasoning := _reasoning(clean, where)) is not None:
        clean["reasoning"] = clean["reasoning_content"] = reasoning
    calls = clean.get("tool_calls", [])
    if not isinstance(calls, list):
        raise RequestTypeError(f"{where}.tool_calls must be a list", f"{where}.tool_calls")
    if "content" in clean:
        clean["content"] = _content(clean["content"], f"{where}.content")
    elif not (role == "assistant" and (calls or reasoning)):
        raise RequestError(f"{where}.content is missing", f"{where}.content")
    for i, call in enumerate(calls):
        _open_arguments(call, f"{where}.tool_calls[{i}]")
    return clean


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """gpt-oss has one place for what comes before a call: text, or else reasoning."""
    if "reasoning" not in message or (message.get("content") and message.get("tool_calls")):
        return message
    return {**message, "thinking": message["reasoning"]}


def _check_call_ids(messages: Sequence[Mapping[str, Any]]) -> None:
    """What a tool answered must be a call of an earlier message, where ids are given."""
    known: set[object] = set()
    for i, message in enumerate(messages):
        answered = message.get("tool_call_id") if message["role"] == "tool" else None
        if answered is not None and answered not in known:
            where = f"messages[{i}].tool_call_id"
            raise RequestError(f"{where}: no earlier message has a call {shown(answered)}", where)
        known.update(
            call["id"] for call in message.get("tool_calls", ()) if isinstance(call.get("id"), str)
        )


def _reasoning(message: Mapping[str, Any], where: str) -> str | None:
    """What an assistant thought, which has two names: templates read either."""
    names = [name for name in ("reasoning", "reasoning_content") if name in message]
    for name in names:
        if not isinstance(message[name], str):
            raise RequestTypeError(
                f"{where}.{name} must be a text, not {shown(message[name])}", f"{where}.{name}"
            )
    if len({message[name] for name in names}) > 1:
        raise RequestError(
            f"{where}.reasoning and {where}.reasoning_content differ; give one of them",
            f"{where}.reasoning_content",
        )
    return message[names[0]] or None if names else None


def _content(content: Any, where: str) -> str:
    """A message's text; several text parts are joined as they are."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestTypeError(
            f"{where} must be a string or a list of text parts, not {type(content).__name__}",
            where,
        )
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise RequestError(
            f"{where} must be a text part ({{'type': 'text', 'text': ...}}); "
            f"type {kind!r} is not supported",
            where,
        )
    if not isinstance(part.get("text"), str):
        raise RequestTypeError(f"{where}.text must be a string", f"{where}.text")
    return str(part["text"])


def _open_arguments(call: Any, where: str) -> None:
    """Templates expect the arguments of a tool call as an object, clients send JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise RequestError(f"{where} must hold a 'function' object", where)
    where = f"{where}.function.arguments"
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_no_number) if arguments else {}
            json.dumps(arguments, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise RequestError(f"{where} has an escape for half a surrogate pair", where) from None
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where} is not valid JSON: {str(error)[:100]}", where) from None
        function["arguments"] = _json_value(arguments, where)
    elif arguments is None:
        function["arguments"] = arguments = {}  # of a function without parameters
    if not isinstance(function["arguments"], dict):
        raise RequestError(f"{where} must be a JSON object, not {shown(arguments)}", where)


def _no_number(name: str) -> None:
    raise ValueError(f"it holds {name}")


def _objects(name: str, values: Any) -> list[Any] | None:
    if values is None:
        return None
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Sequence):
        raise RequestTypeError(f"{name} must be a list of objects", name)
    for i, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise RequestTypeError(f"{name}[{i}] must be an object", f"{name}[{i}]")
    return [_json_value(value, name) for value in values]


def _extra(values: Mapping[str, Any] | None) -> dict[str, Any]:
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise RequestTypeError("chat_template_kwargs must be an object", "chat_template_kwargs")
    for name in values:
        if name in RESERVED:
            raise RequestError(
                f"chat_template_kwargs must not set {name!r}: the engine sets it",
                "chat_template_kwargs",
            )
    return {str(k): _json_value(v, "chat_template_kwargs") for k, v in values.items()}


def _json_value(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of plain JSON types, so that a template meets no object with methods."""
    if depth > 64:
        raise RequestError(f"{where} is nested more than 64 deep", where)
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, Mapping):
        return {str(k): _json_value(v, where, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(v, where, depth + 1) for v in value]
    raise RequestTypeError(f"{where} holds a {type(value).__name__}, which is not JSON", where)


# --- special tokens in a caller's text ----------------------------------------------------


@dataclass(frozen=True)
class _Inputs:
    """All that a caller gave to the template."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    extra: dict[str, Any]

    def strings(self) -> Iterator[str]:
        """Every string, keys too; not the roles, which are words of a fixed list."""
        plain = [{k: v for k, v in m.items() if k != "role"} for m in self.messages]
        yield from _strings([plain, self.tools, self.extra])

    def changed(self, change: Callable[[str], str]) -> "_Inputs":
        messages = [{**_changed(m, change), "role": m["role"]} for m in self.messages]
        return _Inputs(messages, _changed(self.tools, change), _changed(self.extra, change))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(k): _changed(v, change) for k, v in value.items()}
    if isinstance(value, list):
        return [_changed(v, change) for v in value]
    return value


# --- rendering ----------------------------------------------------------------------------


class _Job:
    """One conversation on its way to ids."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: Template,
        inputs: _Inputs,
        opens_turn: bool,
        continues: bool,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.inputs = inputs
        self.opens_turn = opens_turn
        self.continues = continues
        self.control = tokenizer.control
        if continues and inputs.messages[-1]["role"] != "assistant":
            raise RequestError(
                "continue_final_message needs a final message of the role 'assistant', not "
                f"{inputs.messages[-1]['role']!r}",
                "continue_final_message",
            )
        if continues and "content" not in inputs.messages[-1]:
            raise RequestError("the final message has no content to continue", "messages")

    def render(self, inputs: _Inputs | None = None) -> str:
        """The prompt's text; up to the end of the final message if that is continued."""
        inputs = inputs or self.inputs
        if not self.continues:
            return self._filled(inputs)
        content = inputs.messages[-1]["content"]
        end = _unused("".join(inputs.strings()), "\U000ffff0")
        final = {**inputs.messages[-1], "content": content + end + _RARE_SPACE}
        messages = [*inputs.messages[:-1], final]
        text = self._filled(_Inputs(messages, inputs.tools, inputs.extra))
        before, found, after = text.rpartition(end)
        if not found:
            raise RequestError(
                "continue_final_message: the chat template does not print the final message",
                "continue_final_message",
            )
        trimmed = not after.startswith(_RARE_SPACE)
        return before.rstrip() if trimmed and content.strip() else before

    def _filled(self, inputs: _Inputs) -> str:
        messages = inputs.messages
        if self.template.takes_parts:
            messages = [_as_parts(message) for message in messages]
        variables = {
            **self.tokenizer.named,
            **inputs.extra,
            "messages": messages,
            "tools": inputs.tools,
            "documents": None,
            "add_generation_prompt": self.opens_turn,
        }
        try:
            return self.template.render(variables, sum(map(len, inputs.strings())))
        except jinja2.TemplateError as error:
            raise RequestError(f"chat template: {error.message or error}", "messages") from error
        except RecursionError as error:
            raise RequestError("chat template: it calls itself without end", "messages") from error
        except Exception as error:  # an operation of the template failed on these messages
            raise RequestError(
                f"the chat template cannot render these messages: {error}", "messages"
            ) from error

    def guarded(self, text: str) -> list[int]:
        """Ids in which only the template's own special tokens are special."""
        mark = _unused(text + "".join(self.inputs.strings()), "\U0010fff0")
        marked = self.render(self.inputs.changed(lambda s: self.control.marked(s, mark)))
        marked = marked.replace(json.dumps(mark)[1:-1], mark)
        ids: list[int] = []
        at = 0
        for match in self.control.pattern.finditer(marked):
            left, right = self.control.strips[match[0]]
            run = marked[at : match.start()]
            ids += self._text_ids(run.rstrip() if left else run, mark, at == 0)
            ids.append(self.control.ids[match[0]])
            at = match.end()
            if right:
                at += len(marked) - at - len(marked[at:].lstrip())
        return ids + self._text_ids(marked[at:], mark, at == 0)

    def _text_ids(self, run: str, mark: str, at_start: bool) -> list[int]:
        """Ids of a stretch without special tokens of the template's."""
        encode = self.tokenizer.encode_ordinary
        forbidden = self.tokenizer.special_ids - {self.control.ids.get(self._unknown, -1)}
        whole = run.replace(mark, "")
        ids = encode(whole, at_start) if whole else []
        if forbidden.isdisjoint(ids):
            return ids
        # A Unigram model holds the spellings among its pieces; cut apart, it cannot find them.
        ids = []
        for part in filter(None, run.split(mark)):
            ids += encode(part, at_start and not ids)
        if forbidden.isdisjoint(ids):
            return ids
        raise RequestError("a message spells a special token that cannot be written as text")

    @property
    def _unknown(self) -> str:
        return self.tokenizer.named.get("unk_token", "")


def _as_parts(message: dict[str, Any]) -> dict[str, Any]:
    if "content" not in message:
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _unused(text: str, first: str) -> str:
    """A private-use character from `first` on that `text` does not hold."""
    return next(c for c in map(chr, range(ord(first), ord(first) - 60_000, -1)) if c not in text)
