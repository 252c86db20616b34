"""A body of Anthropic's Messages API as a conversation: messages in the form of chat completions.

A turn of Anthropic's may hold text, calls and results in one list of blocks; chat templates know
each as a message of its own. What is the same in two requests is the same in their prompts, so that
the second finds the first one's blocks in the prefix cache: neither a cache mark nor the header
that Claude Code puts before its instructions, which is another one each time, gets into a prompt.
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
    Block,
    ChooseAny,
    ChooseNone,
    ChooseTool,
    ClearThinking,
    InputMessage,
    InputTool,
    JSONFormat,
    MessagesBody,
    PromptBody,
    TextBlock,
    ThinkingBlock,
    ThinkingDisabled,
    ThinkingEnabled,
    ThinkingTurns,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from octavo.structured_outputs import StructuredOutputsParams
from octavo.text.answer_form import enforceable
from octavo.text.placement import Placement
from octavo.text.tool_request import ToolChoice, checked, named, tool
from octavo.text.tools.base import Tool

BILLING = "x-anthropic-billing-header"
TOOL_USE = "toolu_"  # what the ids of calls begin with
MIN_BUDGET = 1024  # Anthropic's
_BETWEEN = "\n\n"  # of two messages that become one
_THINKS = ("enable_thinking", "thinking")  # as templates call it
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
            raise


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


def chat_messages(body: PromptBody, places: Placement) -> list[dict[str, Any]]:
    """The messages of `body`, its instructions first. A system message among the others is a user's
    text there, and a user's text after results a part of the last one, where the chat template does
    not take them as they are.

    Raises RequestError for results without their calls, and calls without their results.
    """
    turns = _Turns(places)
    turns.system(_instructions(body.system))
    forgets = _forgotten_thinking(body)
    for number, message in enumerate(body.messages):
        blocks = _blocks(message)
        if number in forgets:
            blocks = [block for block in blocks if not isinstance(block, ThinkingBlock)]
        turns.add(message, blocks, f"messages[{number}]")
    turns.end()
    return turns.messages


def _instructions(system: str | Sequence[TextBlock] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    return "".join(block.text for block in system if not block.text.startswith(BILLING))


def _blocks(message: InputMessage) -> Sequence[Block]:
    content = message.content
    return [TextBlock(text=content)] if isinstance(content, str) else content


def _forgotten_thinking(body: PromptBody) -> frozenset[int]:
    """Places of the messages whose thinking `context_management` leaves out."""
    edits = (body.context_management and body.context_management.edits) or []
    thought = [
        number
        for number, message in enumerate(body.messages)
        if any(isinstance(block, ThinkingBlock) for block in _blocks(message))
    ]
    kept = min((_kept_turns(edit, len(thought), i) for i, edit in enumerate(edits)), default=None)
    return frozenset(() if kept is None else thought[: len(thought) - kept])


def _kept_turns(edit: ClearThinking, turns: int, number: int) -> int:
    keep = edit.keep
    if keep is None:
        return min(1, turns)  # Anthropic's default
    if not isinstance(keep, ThinkingTurns):
        return turns
    if keep.value < 1:
        where = f"context_management.edits[{number}].keep.value"
        raise RequestError(f"{where} must be at least 1, not {shown(keep.value, 60)}", where)
    return min(keep.value, turns)


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
    return dict.fromkeys(_THINKS, not isinstance(body.thinking, ThinkingDisabled))


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


class _Turns:
    """Chat messages, as the turns of a conversation come."""

    def __init__(self, places: Placement) -> None:
        self.messages: list[dict[str, Any]] = []
        self._places = places
        self._open: dict[str, str] = {}  # calls without a result: id -> name
        self._asked = ""  # where they were made

    def system(self, text: str) -> None:
        if text:
            self.messages.append({"role": "system", "content": text})

    def add(self, message: InputMessage, blocks: Sequence[Block], where: str) -> None:
        if message.role == "assistant":
            self._check_results()
            self._assistant(blocks, where)
        elif message.role == "system" and self._places.system:
            self.system(_text(blocks))
        else:
            self._user(blocks, where)

    def end(self) -> None:
        """Check that nothing is missing."""
        self._check_results()

    def _check_results(self) -> None:
        if self._open:
            first = next(iter(self._open))
            raise RequestError(
                f"{self._asked}: the tool_use {shown(first, 80)} has no tool_result in the next "
                "message",
                self._asked,
            )

    def _user(self, blocks: Sequence[Block], where: str) -> None:
        texts: list[TextBlock] = []
        for i, block in enumerate(blocks):
            if isinstance(block, ToolResultBlock):
                if texts:
                    raise RequestError(f"{where}: tool_result blocks must come before text", where)
                self._result(block, f"{where}.content[{i}]")
            elif isinstance(block, TextBlock):
                texts.append(block)
        self._say(_text(texts))

    def _say(self, text: str) -> None:
        """A user's text. Templates want the roles to alternate, so neighbours become one."""
        last = self.messages[-1] if self.messages else {}
        roles = ("user",) if self._places.user_after_tool else ("user", "tool")
        if text and last.get("role") in roles:
            last["content"] += _BETWEEN + text
        elif text:
            self.messages.append({"role": "user", "content": text})

    def _result(self, block: ToolResultBlock, where: str) -> None:
        if block.tool_use_id not in self._open:
            raise RequestError(
                f"{where}.tool_use_id: the assistant's message before has no tool_use with the id "
                f"{shown(block.tool_use_id, 80)}, or none that still needs a result",
                f"{where}.tool_use_id",
            )
        text = "".join(_result_texts(block))
        self.messages.append(
            {
                "role": "tool",
                "tool_call_id": _template_id(block.tool_use_id),
                "name": self._open.pop(block.tool_use_id),
                "content": f"Error: {text}" if block.is_error else text,
            }
        )

    def _assistant(self, blocks: Sequence[Block], where: str) -> None:
        calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
        self._open, self._asked = {call.id: call.name for call in calls}, where
        if len(self._open) < len(calls):
            raise RequestError(f"{where}: two tool_use blocks have the same id", where)
        message: dict[str, Any] = {"role": "assistant"}
        if text := _text(blocks):
            message["content"] = text
        if thought := "".join(b.thinking for b in blocks if isinstance(b, ThinkingBlock)):
            message["reasoning"] = thought
        if calls:
            message["tool_calls"] = [_call(block) for block in calls]
        if len(message) > 1:
            self._answer(message)

    def _answer(self, message: dict[str, Any]) -> None:
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or "tool_calls" in last:
            self.messages.append(message)
            return
        for name in ("content", "reasoning"):
            if name in message:
                last[name] = (
                    last[name] + _BETWEEN + message[name] if name in last else message[name]
                )
        last.update({name: message[name] for name in ("tool_calls",) if name in message})


def _text(blocks: Sequence[Block]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, TextBlock))


def _result_texts(block: ToolResultBlock) -> Iterator[str]:
    if isinstance(block.content, str):
        yield block.content
        return
    for part in block.content or ():
        yield part.tool_name if isinstance(part, ToolReferenceBlock) else part.text


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": block.input}
    return {"id": _template_id(block.id), "type": "function", "function": function}


def _template_id(name: str) -> str:
    """A call's id as its format wrote it: templates may print them, and check their form."""
    return name.removeprefix(TOOL_USE)
