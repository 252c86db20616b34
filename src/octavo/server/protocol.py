"""What comes in over HTTP: typed request bodies, and their sampling parameters.

A body is strict JSON: no duplicate keys, no NaN, no lone surrogates. `null` is the same as
absent. A field that is not known, or known but not supported, is refused by name; a short list
of OpenAI's fields that have no effect here is accepted. Ranges are checked in one place,
`SamplingParams`; this module checks names and types.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, NoReturn, TypeVar, get_type_hints

import msgspec

from octavo import vllm_names
from octavo.errors import RequestError, RequestTypeError, nearest, shown
from octavo.params import MAX_LOGPROBS, RequestOutputKind, SamplingParams
from octavo.server.response_format import renamed, structured_outputs
from octavo.vllm_names import Kind, Status

DEFAULT_MAX_TOKENS = 16  # of a completion, as far as the window has room

# OpenAI's bookkeeping fields: they change nothing in an answer, so clients may send them.
NO_OPS = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
)

# Known fields that are not supported, each with its neutral values, which change nothing: so
# clients that always send the field are served. `null` is neutral for all of them. Every
# other value is refused by name.
NeutralValues = dict[str, tuple[object, ...]]


def never(names: str) -> NeutralValues:
    """Fields of which only `null` is neutral."""
    return dict.fromkeys(names.split(), ())


# vLLM's are in its table, which says also why they are refused; the others are those of OpenAI and
# of other servers.
UNSUPPORTED: NeutralValues = {
    **{
        entry.name: entry.neutral
        for entry in vllm_names.entries(Kind.REQUEST)
        if entry.status in (Status.NO_EFFECT, Status.REFUSED) and entry.name not in NO_OPS
    },
    **never("regex ebnf json_schema lora_path custom_logit_processor custom_params"),
    "no_stop_trim": (False,),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
}
# What only conversations have.
_UNSUPPORTED_COMPLETION: NeutralValues = {
    **UNSUPPORTED,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": ("none",),
    "include_reasoning": (True,),
    "thinking_token_budget": (),
}
_UNSUPPORTED_CHAT: NeutralValues = {
    **UNSUPPORTED,
    **never("audio moderation prediction web_search_options"),
    "add_special_tokens": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "separate_reasoning": (False,),
    "verbosity": ("medium",),
}
# Clients send an assistant's message back as they received it, unused fields included.
_UNSUPPORTED_MESSAGE: NeutralValues = {
    **never("audio cache_control function_call parsed"),
    "annotations": ([],),
    "images": ([],),
    "prefix": (False,),
    "provider_specific_fields": ({},),
    "reasoning_details": ([],),
    "refusal": ("",),
    "thinking_blocks": ([],),
}
# What messages of one role have, with the values that say nothing.
_OF_ASSISTANTS: NeutralValues = {
    "reasoning": ("",),
    "reasoning_content": ("",),
    "tool_calls": ([],),
}
_OF_TOOLS: NeutralValues = {"tool_call_id": ("",)}
_REASONS_OF_COMPLETION = dict.fromkeys(
    ("tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "include_reasoning",
     "thinking_token_budget"),
    "a prompt has no form in which it could be said; use /v1/chat/completions",
)  # fmt: skip
_REASONS_OF_CHAT = {
    "functions": "OpenAI has replaced it; use tools",
    "function_call": "OpenAI has replaced it; use tool_choice",
}
_REASONS_OF_MESSAGES = {
    "function_call": "OpenAI has replaced it; use tool_calls",
    **dict.fromkeys(_OF_ASSISTANTS, "only messages of the role 'assistant' have it"),
    "tool_call_id": "only messages of the role 'tool' have it",
}
# A field that is also neutral where it repeats the value of another one.
_SAME_AS = {"best_of": "n"}


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request body, or an object inside one.

    refused: known fields that are not supported, with their neutral values. reasons: why, where it
    is to be said. no_ops: fields that are accepted without effect.
    """

    refused: ClassVar[NeutralValues] = {}
    reasons: ClassVar[Mapping[str, str]] = {}
    no_ops: ClassVar[frozenset[str]] = NO_OPS

    @classmethod
    def check_inner(cls, fields: dict[str, Any]) -> None:
        """Check the names inside the objects of a body, and take out those without effect."""


class _Message(Body, kw_only=True):
    """A message's fields; what they hold is checked where it is rendered."""

    refused: ClassVar[NeutralValues] = {**_UNSUPPORTED_MESSAGE, **_OF_ASSISTANTS, **_OF_TOOLS}
    reasons: ClassVar[Mapping[str, str]] = _REASONS_OF_MESSAGES
    role: Any = None
    content: Any = None
    name: Any = None


class _AssistantMessage(_Message, kw_only=True):
    refused: ClassVar[NeutralValues] = {**_UNSUPPORTED_MESSAGE, **_OF_TOOLS}
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None


class _ToolMessage(_Message, kw_only=True):
    refused: ClassVar[NeutralValues] = {**_UNSUPPORTED_MESSAGE, **_OF_ASSISTANTS}
    tool_call_id: Any = None


class _Call(Body, kw_only=True):
    """A tool call of a message. `index` is that of a streamed answer's."""

    refused: ClassVar[NeutralValues] = {"provider_specific_fields": ({},)}
    id: Any = None
    type: Any = None
    function: Any = None
    index: Any = None


class _CalledFunction(Body, kw_only=True):
    name: Any = None
    arguments: Any = None


_MESSAGES: Mapping[object, type[Body]] = {"assistant": _AssistantMessage, "tool": _ToolMessage}


class StreamOptions(Body, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # OpenAI's padding against eavesdroppers: no effect


class Sampling(Body, kw_only=True):
    """What the bodies of all endpoints that generate have: how to sample, and when."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    priority: int | None = None
    deadline: float | None = None
    request_id: str | None = None
    cache_salt: str | None = None


class _Generation(Sampling, kw_only=True):
    n: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    @classmethod
    def check_inner(cls, fields: dict[str, Any]) -> None:
        if isinstance(options := fields.get("stream_options"), dict):
            fields["stream_options"] = kept(options, StreamOptions, "stream_options.")


class CompletionBody(_Generation, kw_only=True):
    """`POST /v1/completions`. `prompt` is text, token ids, or a list of either."""

    refused: ClassVar[NeutralValues] = _UNSUPPORTED_COMPLETION
    reasons: ClassVar[Mapping[str, str]] = _REASONS_OF_COMPLETION
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class ChatBody(_Generation, kw_only=True):
    """`POST /v1/chat/completions`."""

    refused: ClassVar[NeutralValues] = _UNSUPPORTED_CHAT
    reasons: ClassVar[Mapping[str, str]] = _REASONS_OF_CHAT
    messages: list[dict[str, Any]]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None

    @classmethod
    def check_inner(cls, fields: dict[str, Any]) -> None:
        super().check_inner(fields)
        _check_messages(fields)


class TokenizeBody(Body, kw_only=True):
    """`POST /tokenize`: `prompt`, or `messages` as a chat would have them."""

    refused: ClassVar[NeutralValues] = {n: UNSUPPORTED[n] for n in ("chat_template",)}
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @classmethod
    def check_inner(cls, fields: dict[str, Any]) -> None:
        _check_messages(fields)


class DetokenizeBody(Body, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


BodyT = TypeVar("BodyT", bound=Body)


def without_effect(kind: type) -> dict[str, Any]:
    """JSON schemas of the fields that a body may have although they change nothing."""
    if not issubclass(kind, Body):
        return {}
    no_ops = {name: {"description": "accepted, without effect"} for name in sorted(kind.no_ops)}
    refused = {name: {"enum": [None, *values]} for name, values in kind.refused.items()}
    found = no_ops | refused
    return {name: found[name] for name in found if name not in kind.__struct_fields__}


def parse(raw: bytes, kind: type[BodyT]) -> BodyT:
    """The body `raw` as a `kind`. Raises RequestError or RequestTypeError naming the field."""
    oddities: list[str] = []
    fields = kept(_load_object(raw, oddities), kind)
    kind.check_inner(fields)
    body = struct_of(fields, kind)
    if oddities:
        raise RequestError(f"the body is not valid JSON: it holds {oddities[0]}")
    return body


def inner(value: object, kind: type[BodyT], where: str) -> BodyT:
    """The object `value` inside a body, at the path `where`. Raises as `parse`."""
    return struct_of(kept(object_at(value, where), kind, f"{where}."), kind, where)


def object_at(value: object, where: str) -> dict[str, Any]:
    """`value`, which must be an object."""
    if not isinstance(value, dict):
        raise RequestTypeError(f"{where} must be an object, not {shown(value, 60)}", where)
    return value


def struct_of(fields: Mapping[str, Any], kind: type[BodyT], where: str = "") -> BodyT:
    """What `kept` leaves, as a `kind`. Raises RequestError or RequestTypeError naming the field.

    where: the path of an object inside a body.
    """
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        _refuse(str(error), fields, where)


class _NotANumber:
    """A placeholder for NaN, Infinity or 1e999, so that the error can name its field."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text[:20]


def _load_object(raw: bytes, oddities: list[str]) -> dict[str, Any]:
    """The JSON object in `raw`. Invalid numbers are also listed in `oddities`."""

    def odd(text: str) -> _NotANumber:
        oddities.append(text[:20])
        return _NotANumber(text)

    def real(text: str) -> float | _NotANumber:
        value = float(text)
        return value if math.isfinite(value) else odd(text)

    try:
        value = json.loads(
            raw.decode(), object_pairs_hook=_unique, parse_constant=odd, parse_float=real
        )
        if not oddities and b"\\ud" in raw.lower():
            msgspec.json.decode(raw)  # refuses half a surrogate pair, which Python lets through
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: {error.reason}") from None
    except RecursionError:
        raise RequestError("the body is not valid JSON: nested too deeply") from None
    except msgspec.DecodeError:
        raise RequestError("the body is not valid JSON: half a surrogate pair") from None
    except RequestError:
        raise
    except ValueError as error:  # also of integers with thousands of digits
        raise RequestError(f"the body is not valid JSON: {str(error)[:100]}") from None
    if not isinstance(value, dict):
        raise RequestTypeError(f"the body must be a JSON object, not {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise RequestError(f"the field {shown(name, 60)} is given twice", name[:60])
            seen.add(name)
    return found


def kept(fields: Mapping[str, Any], kind: type[Body], where: str = "") -> dict[str, Any]:
    """The fields of `kind` that are not null. Raises RequestError for those to refuse.

    where: the path of an object inside a body, which has no fields without effect.
    """
    known = kind.__struct_fields__
    tag = kind.__struct_config__.tag_field
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if name in known:
            if value is None:
                continue
            if type(value) is float and name in _integers(kind) and value.is_integer():
                value = int(value)  # JSON has one kind of number: 1.0 is an integer
            found[name] = value
        elif name == tag:
            found[name] = value
        elif name in kind.refused:
            if value is not None and not _neutral(name, value, kind.refused[name], fields):
                raise RequestError(_unsupported(name, kind, where), where + name)
        elif name not in kind.no_ops or where:
            hint = nearest(name[:60], known)
            raise RequestError(f"unknown field {where}{name[:60]!r}{hint}", where + name[:60])
    return found


@cache
def _integers(kind: type[Body]) -> frozenset[str]:
    return frozenset(name for name, hint in get_type_hints(kind).items() if hint == int | None)


def _unsupported(name: str, kind: type[Body], where: str) -> str:
    entry = None if where else vllm_names.find(Kind.REQUEST, name)
    known = entry.refusal() if entry and entry.reason else ""
    why = kind.reasons.get(name, known)
    return f"{where}{name} is not supported by this server" + (f": {why}" if why else "")


def _check_messages(fields: dict[str, Any]) -> None:
    if isinstance(messages := fields.get("messages"), list):
        fields["messages"] = [
            _message(item, f"messages[{i}].") if isinstance(item, dict) else item
            for i, item in enumerate(messages)
        ]


def _message(given: dict[str, Any], where: str) -> dict[str, Any]:
    role = given.get("role")
    kind = _MESSAGES.get(role, _Message) if isinstance(role, str) else _Message
    message = {
        name: value
        for name, value in kept(given, kind, where).items()
        if not (name in _OF_ASSISTANTS and _neutral(name, value, _OF_ASSISTANTS[name], given))
    }
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        name = f"{where}tool_call_id"
        raise RequestError(f"{name} is missing: the id of the call that it answers", name)
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [
            _call(item, f"{where}tool_calls[{i}].") if isinstance(item, dict) else item
            for i, item in enumerate(calls)
        ]
    return message


def _call(given: dict[str, Any], where: str) -> dict[str, Any]:
    call = kept(given, _Call, where)
    call.pop("index", None)
    if not isinstance(call.get("id"), str) or not call["id"]:
        raise RequestError(f"{where}id is missing: what tool_call_id refers to", f"{where}id")
    if call.setdefault("type", "function") != "function":
        raise RequestError(
            f"{where}type must be 'function', not {shown(call['type'], 60)}", f"{where}type"
        )
    if isinstance(function := call.get("function"), dict):
        call["function"] = function = kept(function, _CalledFunction, f"{where}function.")
        if not isinstance(function.get("name"), str):
            name = f"{where}function.name"
            raise RequestError(f"{name} is missing: the name of the tool", name)
    return call


def _neutral(
    name: str, value: object, neutral: tuple[object, ...], fields: Mapping[str, Any]
) -> bool:
    """Whether a field that is not supported has a value that changes nothing."""
    if any(_equal(value, item) for item in neutral):
        return True
    return name in _SAME_AS and _equal(value, fields.get(_SAME_AS[name]))


def _equal(one: object, other: object) -> bool:
    """As JSON has it: 1 and 1.0 are equal, `true` and 1 are not."""
    return one == other and (type(one) is bool) == (type(other) is bool)


def _refuse(text: str, fields: Mapping[str, Any], where: str) -> NoReturn:
    """Raise our error for msgspec's, such as `Expected ..., got ... - at $.a[0].b`.

    where: the path of the object with these fields.
    """
    reason, _, place = text.partition(" - at `$")
    name = place.rstrip("`").lstrip(".").replace("[...]", "")
    path = ".".join(filter(None, (where, name)))
    if missing := re.match(r"Object missing required field `(.*)`", reason):
        path = f"{path}.{missing[1]}" if path else missing[1]
        raise RequestError(f"{path} is missing", path)
    wanted = reason.replace("`", "").replace(" | null", "").replace("Expected", "expected")
    wanted = wanted.replace("_NotANumber", "what is not a JSON number")
    value = fields.get(name)
    had = f": {shown(value, 60)}" if isinstance(value, (str, int, float, bool)) else ""
    raise RequestTypeError(f"{path or 'the body'}: {wanted}{had}", path or None)


# --- from a body to SamplingParams

_SHARED = tuple(
    name
    for name in (
        *Sampling.__struct_fields__,
        "n",
        "max_tokens",
        "prompt_logprobs",
        "thinking_token_budget",
    )
    if name in SamplingParams.__dataclass_fields__ and name != "logit_bias"
)


def shared_options(body: Sampling, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that `body` has under SamplingParams' names; `defaults` fill the others."""
    options = dict(defaults)
    for name in _SHARED:
        if (value := getattr(body, name, None)) is not None:
            options[name] = value
    if body.logit_bias is not None:
        options["logit_bias"] = _bias(body.logit_bias)
    return options


def sampling_params(body: CompletionBody | ChatBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """The parameters of `body`; `defaults` (the model's own) fill the fields that are absent."""
    _check_stream(body)
    options = shared_options(body, defaults)
    if isinstance(body, ChatBody):
        options["max_tokens"] = _chat_limit(body)
        options["logprobs"] = _chat_logprobs(body)
    else:
        options.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
        options.update(_completion_options(body))
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    with body_field_names(body):
        form = structured_outputs(body.response_format, body.structured_outputs)
        return SamplingParams(**options, output_kind=kind, structured_outputs=form)


@contextlib.contextmanager
def body_field_names(body: CompletionBody | ChatBody) -> Iterator[None]:
    """Errors about `max_tokens` name `max_completion_tokens` if the body used that name, and those
    of structured outputs `response_format`."""
    try:
        yield
    except RequestError as error:
        if body.response_format is not None and (other := renamed(error)) is not error:
            raise other from None
        new = "max_completion_tokens"
        if error.param != "max_tokens" or getattr(body, new, None) is None:
            raise
        raise type(error)(str(error).replace("max_tokens", new), new) from None


def _completion_options(body: CompletionBody) -> dict[str, Any]:
    changed: dict[str, Any] = {"logprobs": body.logprobs}
    if body.max_tokens is None and (body.min_tokens or 0) > DEFAULT_MAX_TOKENS:
        changed["max_tokens"] = body.min_tokens  # a default refuses nothing that was asked for
    if body.echo and body.logprobs is not None:
        changed["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    if body.echo and body.max_tokens == 0:
        if body.min_tokens:
            raise RequestError("min_tokens must be 0 with max_tokens 0", "min_tokens")
        # Scoring only: the engine has to make one token, which is not shown.
        changed["max_tokens"] = 1
    return changed


def _check_stream(body: _Generation) -> None:
    options = body.stream_options
    if options is None or not (options.include_usage or options.continuous_usage_stats):
        return
    if not body.stream:
        raise RequestError("stream_options needs stream: true", "stream_options")
    if not options.include_usage:
        raise RequestError(
            "continuous_usage_stats needs include_usage: true",
            "stream_options.continuous_usage_stats",
        )


def _chat_limit(body: ChatBody) -> int | None:
    limit, old = body.max_completion_tokens, body.max_tokens
    if limit is None:
        return old
    if old is not None and old != limit:
        raise RequestError(
            f"max_completion_tokens ({shown(limit, 60)}) and max_tokens ({shown(old, 60)}) differ; "
            "give one of them",
            "max_completion_tokens",
        )
    if limit < 1:
        raise RequestError(
            f"max_completion_tokens must be at least 1, not {shown(limit, 60)}",
            "max_completion_tokens",
        )
    return limit


def _chat_logprobs(body: ChatBody) -> int | None:
    top = body.top_logprobs
    if top is not None:
        if top and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        if not 0 <= top <= MAX_LOGPROBS:
            raise RequestError(
                f"top_logprobs must be between 0 and {MAX_LOGPROBS}, not {shown(top, 60)}",
                "top_logprobs",
            )
    return (top or 0) if body.logprobs else None


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, amount in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise RequestError(
                f"logit_bias keys must be token ids (integers from 0), not {shown(key, 60)}",
                "logit_bias",
            )
        bias[int(key)] = amount
    return bias


def prompts(body: CompletionBody) -> list[str | list[int]]:
    """Each prompt of a completion, as text or as token ids. Raises RequestError for mixtures."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise RequestError("prompt is an empty list; give text or token ids", "prompt")
    if all(isinstance(item, int) for item in given):
        return [[item for item in given if isinstance(item, int)]]
    found: list[str | list[int]] = []
    for item in given:
        if isinstance(item, int):
            raise RequestTypeError(
                "prompt must be text, token ids, or a list of either; ids and texts are mixed",
                "prompt",
            )
        found.append(item)
    return found
