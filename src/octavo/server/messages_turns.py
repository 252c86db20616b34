"""The messages of a body of Anthropic's Messages API, in the form of chat completions.

A turn of Anthropic's may hold text, calls and results in one list of blocks; chat templates know
each as a message of its own. What is the same in two requests is the same in their prompts, so that
the second finds the first one's blocks in the prefix cache: neither a cache mark nor the header
that Claude Code puts before its instructions, which is another one each time, gets into a prompt.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from octavo.errors import RequestError, shown
from octavo.server.messages_protocol import (
    Block,
    ClearThinking,
    InputMessage,
    PromptBody,
    TextBlock,
    ThinkingBlock,
    ThinkingTurns,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from octavo.text.placement import Placement

BILLING = "x-anthropic-billing-header"
TOOL_USE = "toolu_"  # what the ids of calls begin with
_BETWEEN = "\n\n"  # of two messages that become one


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
