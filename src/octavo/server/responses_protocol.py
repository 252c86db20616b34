"""`POST /v1/responses`: the body, and its sampling parameters.

Names, types and values of the request itself. What its `input` holds is `server.responses_input`'s
part, its `tools` are `server.responses_tools`'.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from octavo.errors import RequestError, shown
from octavo.params import MAX_LOGPROBS, RequestOutputKind, SamplingParams
from octavo.server.protocol import (
    UNSUPPORTED,
    Body,
    NeutralValues,
    Sampling,
    kept,
    never,
    shared_options,
)
from octavo.server.response_format import renamed, structured_outputs
from octavo.text.model_formats import EFFORTS

LOGPROBS = "message.output_text.logprobs"
# What `include` may name. Only LOGPROBS adds anything: reasoning is always sent in the clear, and
# the items of tools that are not run here do not occur.
INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
_SUMMARIES = ("auto", "none")
_STATELESS = "the server keeps no conversations; send all items in input"


_REFUSED: NeutralValues = {
    **UNSUPPORTED,
    **never(
        "access_programs background_options context_management conversation image "
        "max_completion_tokens max_tokens messages moderation prompt reasoning_effort "
        "response_format"
    ),
    "n": (1,),
    "prompt_cache_options": ({"mode": "implicit"},),
}


class Reasoning(Body, kw_only=True):
    """`reasoning`. A summary is not made: `auto` asks for what there is."""

    refused: ClassVar[NeutralValues] = {
        "context": ("auto",),
        "generate_summary": ("auto",),
        "mode": ("standard",),
    }
    effort: str | None = None
    summary: str | None = None


class TextConfig(Body, kw_only=True):
    """`text`: the answer's form."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesStreamOptions(Body, kw_only=True):
    include_obfuscation: bool | None = None  # OpenAI's padding against eavesdroppers: no effect


class ResponsesBody(Sampling, kw_only=True):
    """`POST /v1/responses`."""

    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    stream_options: ResponsesStreamOptions | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    structured_outputs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None

    refused: ClassVar[NeutralValues] = _REFUSED
    no_ops: ClassVar[frozenset[str]] = frozenset(("client_metadata", "max_tool_calls"))
    reasons: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "conversation": _STATELESS,
            "n": "a response has one answer; send several requests",
            "prompt": "the server keeps no prompts; write them into instructions and input",
            "max_tokens": "its name here is max_output_tokens",
            "max_completion_tokens": "its name here is max_output_tokens",
            "response_format": "its name here is text.format",
            "reasoning_effort": "its name here is reasoning.effort",
            "messages": "its name here is input",
        }
    )

    @classmethod
    def check_inner(cls, fields: dict[str, Any]) -> None:
        for name, kind in (
            ("reasoning", Reasoning),
            ("text", TextConfig),
            ("stream_options", ResponsesStreamOptions),
        ):
            if isinstance(fields.get(name), dict):
                fields[name] = kept(fields[name], kind, f"{name}.")


def responses_params(body: ResponsesBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """The parameters of `body`; `defaults` (the model's own) fill the fields that are absent."""
    _check_values(body)
    options = shared_options(body, defaults)
    options["max_tokens"] = body.max_output_tokens
    if LOGPROBS in (body.include or ()):
        options["logprobs"] = body.top_logprobs or 0
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    with field_names(body):
        form = structured_outputs(_response_format(body.text), body.structured_outputs)
        return SamplingParams(**options, output_kind=kind, structured_outputs=form)


# What the parts that are shared with chat completions call a field -> its name here. Longer names
# stand before those that they begin with.
_NAMES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
}


_TOOL = re.compile(r"tools\[(\d+)\](?:\.function)?")


@contextlib.contextmanager
def field_names(body: ResponsesBody, tools: Sequence[str] = ()) -> Iterator[None]:
    """Errors that name a field of chat completions name the one of this API.

    tools: the path of each tool that chat completions would have.
    """
    try:
        yield
    except RequestError as raised:
        error = renamed(raised) if body.text and body.text.format else raised
        param = error.param or ""
        if found := _TOOL.match(param):
            place = tools[int(found[1])]
            new = place + param.removeprefix(found[0])
            raise type(error)(str(error).replace(found[0], place), new) from None
        for name, ours in _NAMES.items():
            if param.startswith(name):
                new = param.replace(name, ours, 1)
                text = str(error).replace("response_format.json_schema", "text.format")
                if "_" in name or text.startswith(name):  # `messages` is a word, too
                    text = text.replace(name, ours)
                raise type(error)(text, new) from None
        raise error from None


def _check_values(body: ResponsesBody) -> None:
    """Refuse values of fields that have few."""
    text, reasoning = body.text or TextConfig(), body.reasoning or Reasoning()
    for name, value, known, why in (
        ("text.verbosity", text.verbosity, ("medium",), "models have no such setting"),
        ("reasoning.effort", reasoning.effort, EFFORTS, ""),
        ("reasoning.summary", reasoning.summary, _SUMMARIES, "reasoning is sent as it is"),
        ("truncation", body.truncation, ("disabled",), "items are never left out"),
    ):
        if value is not None and value not in known:
            raise RequestError(
                f"{name} must be {' or '.join(known)}, not {shown(value, 60)}"
                + (f": {why}" if why else ""),
                name,
            )
    for i, name in enumerate(body.include or ()):
        if name not in INCLUDABLE:
            raise RequestError(
                f"include[{i}] must be one of {', '.join(INCLUDABLE)}, not {shown(name, 60)}",
                f"include[{i}]",
            )
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise RequestError(
            f"top_logprobs must be between 0 and {MAX_LOGPROBS}, not {body.top_logprobs}",
            "top_logprobs",
        )
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise RequestError(f"top_logprobs needs {LOGPROBS} in include", "top_logprobs")


def _response_format(text: TextConfig | None) -> dict[str, Any] | None:
    """`text.format` as chat completions have it."""
    if text is None or text.format is None:
        return None
    given = dict(text.format)
    if given.get("type") != "json_schema":
        return given
    described = {name: value for name, value in given.items() if name != "type"}
    return {"type": "json_schema", "json_schema": described}
