"""A body of Anthropic's Messages API as a conversation and sampling parameters.

What its fields ask for, and errors in its words; its messages are `server.messages_turns`'s part.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from octavo.errors import ContextLengthError, RequestError, shown
from octavo.params import RequestOutputKind, SamplingParams
from octavo.server.conversation import Conversation
from octavo.server.messages_protocol import (
    ChooseAny,
    ChooseNone,
    ChooseTool,
    InputTool,
    JSONFormat,
    MessagesBody,
    PromptBody,
    ThinkingDisabled,
    ThinkingEnabled,
)
from octavo.server.messages_turns import chat_messages
from octavo.structured_outputs import StructuredOutputsParams
from octavo.text.answer_form import enforceable
from octavo.text.model_formats import THINKING_SWITCHES
from octavo.text.placement import Placement
from octavo.text.tool_request import ToolChoice, check_count, checked, named, tool
from octavo.text.tools.base import Tool

MIN_BUDGET = 1024  # Anthropic's
_FIELDS = MappingProxyType({"stop": "stop_sequences"})


def conversation(body: PromptBody, places: Placement) -> Conversation:
    """What is to be answered. Raises RequestError naming the field at fault."""
    messages = chat_messages(body, places)
    if not messages:
        raise RequestError("messages is empty; give at least one message", "messages")
    tools = _tools(body)
    return Conversation(
        messages=messages,
        tools=tools,
        tool_choice=_choice(body, tools),
        parallel_tool_calls=not getattr(body.tool_choice, "disable_parallel_tool_use", None),
        reasoning_effort=_effort(body),
        continue_final_message=messages[-1]["role"] == "assistant",
        chat_template_kwargs=_template_options(body),
        model=body.model,
    )


def loosened(tools: Sequence[Tool], body: PromptBody) -> tuple[Tool, ...]:
    """`tools`, of which those whose schemas cannot be enforced take any object, unless they are to
    be `strict`: only that is a promise of Anthropic's."""
    return tuple(
        tool if given.strict or enforceable(tool) else msgspec.structs.replace(tool, strict=False)
        for tool, given in zip(tools, body.tools or (), strict=True)
    )


def sampling(body: MessagesBody, defaults: Mapping[str, Any], thinks: bool) -> SamplingParams:
    """How it is answered; `defaults` (the model's own) fill the fields that are absent. thinks:
    whether the model is known to, which can then be limited."""
    options = dict(defaults)
    for name in ("temperature", "top_p", "top_k", "max_tokens"):
        if (value := getattr(body, name)) is not None:
            options[name] = value
    form, budget = _form(body), _budget(body)
    return SamplingParams(
        **options,
        thinking_token_budget=budget if thinks else None,
        stop=body.stop_sequences,
        output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
        structured_outputs=None if form is None else StructuredOutputsParams(json=form.schema),
    )


@contextlib.contextmanager
def field_names(body: PromptBody) -> Iterator[None]:
    """Errors name the fields of the Messages API, and say of a window that is too small what its
    clients read: Claude Code shortens the conversation, or the answer, and asks again."""
    try:
        yield
    except ContextLengthError as error:
        raise _of_window(error, body) from None
    except RequestError as error:
        form = (error.param or "").startswith("structured_outputs")
        names = {error.param or "": _form_field(body)} if form else _FIELDS
        with _renamed(names):
            raise type(error)(str(error).replace("'required'", "'any'"), error.param) from None


@contextlib.contextmanager
def _renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors have the new names in place of the old ones."""
    try:
        yield
    except RequestError as error:
        param, text = error.param or "", str(error)
        if not (found := [name for name in names if name in param]):
            raise
        old, new = found[0], names[found[0]]
        raise type(error)(text.replace(old, new), param.replace(old, new)) from None


def _of_window(error: ContextLengthError, body: PromptBody) -> ContextLengthError:
    tokens, limit = error.tokens, error.limit
    if error.param == "max_tokens" and isinstance(body, MessagesBody):
        text = (
            f"input length and `max_tokens` exceed context limit: {tokens} + {body.max_tokens} > "
            f"{limit}; max_tokens may be at most {(limit or 0) - (tokens or 0)}"
        )
    else:
        text = f"prompt is too long: {tokens} tokens > {limit} maximum"
    return ContextLengthError(text, error.param, tokens, limit)


def _tools(body: PromptBody) -> tuple[Tool, ...]:
    found = []
    check_count(len(body.tools or ()))
    for i, given in enumerate(body.tools or ()):
        with _renamed({".parameters": ".input_schema"}):
            schema, where = given.input_schema, f"tools[{i}]"
            found.append(tool(given.name, _description(given), schema, given.strict, where))
    return checked(found) if found else ()


def _description(given: InputTool) -> str | None:
    """With the examples, which chat templates do not know of."""
    examples = [json.dumps(example, ensure_ascii=False) for example in given.input_examples or ()]
    if not examples:
        return given.description
    return "\n".join([*filter(None, [given.description]), "Examples of its input:", *examples])


def _choice(body: PromptBody, tools: Sequence[Tool]) -> ToolChoice:
    choice = body.tool_choice
    if isinstance(choice, ChooseNone):
        return ToolChoice("none")
    if isinstance(choice, (ChooseAny, ChooseTool)) and not tools:
        raise RequestError("tool_choice needs tools", "tool_choice")
    if isinstance(choice, ChooseTool):
        return ToolChoice("required", named(choice.name, tools, "tool_choice.name"))
    if not tools:
        return ToolChoice("none")
    return ToolChoice("required" if isinstance(choice, ChooseAny) else "auto")


def _effort(body: PromptBody) -> str | None:
    effort = body.output_config and body.output_config.effort
    return effort or ("none" if isinstance(body.thinking, ThinkingDisabled) else None)


def _template_options(body: PromptBody) -> dict[str, Any] | None:
    """The variables by which templates are told whether the model is to think."""
    if body.thinking is None:
        return None
    return dict.fromkeys(THINKING_SWITCHES, not isinstance(body.thinking, ThinkingDisabled))


def _budget(body: MessagesBody) -> int | None:
    """The most tokens of thinking; None if there is no limit."""
    if isinstance(body.thinking, ThinkingDisabled):
        return 0  # also of a model whose chat template cannot turn it off
    if not isinstance(body.thinking, ThinkingEnabled):
        return None
    budget, where = body.thinking.budget_tokens, "thinking.budget_tokens"
    if not MIN_BUDGET <= budget < body.max_tokens:
        raise RequestError(
            f"{where} must be at least {MIN_BUDGET} and less than max_tokens, {body.max_tokens}; "
            f"it is {shown(budget, 60)}",
            where,
        )
    return budget


def _form(body: PromptBody) -> JSONFormat | None:
    new = body.output_config and body.output_config.format
    if new and body.output_format:
        raise RequestError("output_format and output_config.format are both given", "output_format")
    return new or body.output_format


def _form_field(body: PromptBody) -> str:
    return "output_format.schema" if body.output_format else "output_config.format.schema"
