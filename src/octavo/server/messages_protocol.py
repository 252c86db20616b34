"""What comes in at Anthropic's Messages API: typed bodies and content blocks.

Names and types are checked here, and that a block may stand where it does. What a conversation
consists of, and what each field asks for, is in `server.messages_turns` and
`server.messages_conversation`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from octavo.errors import RequestError, RequestTypeError, nearest, shown
from octavo.server.protocol import Body, NeutralValues, inner, kept, object_at, struct_of

Role = Literal["user", "assistant", "system"]
Display = Literal["summarized", "omitted"]
Effort = Literal["low", "medium", "high", "xhigh", "max"]

# What Anthropic's clients send for its bookkeeping, billing and caches: no answer depends on it.
NO_OPS = frozenset(
    ("anthropic_beta", "anthropic_version", "betas", "cache_control", "diagnostics",
     "inference_geo", "metadata", "service_tier", "user_profile_id", "workspace_id")
)  # fmt: skip
# Each with the values that ask for what is done anyway.
_REFUSED: NeutralValues = {
    "billing_policy": (),
    "compaction": (),
    "container": (),
    "fallback_credit_token": (),
    "fallbacks": ([],),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thread": (),
}
_OTHER_BLOCKS = (
    "image document search_result server_tool_use web_search_tool_result container_upload"
)


class _Marked(Body, kw_only=True):
    """What may have a mark for Anthropic's cache. Here all prompts are cached, with or without."""

    cache_control: Any = None


class TextBlock(_Marked, kw_only=True, tag_field="type", tag="text"):
    refused: ClassVar[NeutralValues] = {"citations": ([],)}
    text: str


class ToolReferenceBlock(_Marked, kw_only=True, tag_field="type", tag="tool_reference"):
    """A result of a tool search: a tool that was found, by its name."""

    tool_name: str


class ToolUseBlock(_Marked, kw_only=True, tag_field="type", tag="tool_use"):
    refused: ClassVar[NeutralValues] = {"caller": ({"type": "direct"},), "toolset_name": ()}
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(_Marked, kw_only=True, tag_field="type", tag="tool_result"):
    refused: ClassVar[NeutralValues] = {"toolset_name": ()}
    tool_use_id: str
    content: str | list[TextBlock | ToolReferenceBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(_Marked, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Marked, kw_only=True, tag_field="type", tag="redacted_thinking"):
    data: str


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


class InputMessage(Body, kw_only=True):
    role: Role
    content: str | list[Block]


class InputTool(_Marked, kw_only=True):
    """A tool that the client runs.

    input_examples are shown to the model. All tools are offered from the start (`defer_loading`),
    and arguments are streamed as they come (`eager_input_streaming`).
    """

    refused: ClassVar[NeutralValues] = {"allowed_callers": (["direct"],)}
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None


class _Choice(Body, kw_only=True, tag_field="type"):
    disable_parallel_tool_use: bool | None = None


class ChooseAuto(_Choice, kw_only=True, tag="auto"):
    """Tools may be called."""


class ChooseAny(_Choice, kw_only=True, tag="any"):
    """One of the tools must be called."""


class ChooseTool(_Choice, kw_only=True, tag="tool"):
    """This tool must be called."""

    name: str


class ChooseNone(Body, kw_only=True, tag_field="type", tag="none"):
    """No tool is called."""


class ThinkingEnabled(Body, kw_only=True, tag_field="type", tag="enabled"):
    budget_tokens: int
    display: Display | None = None


class ThinkingAdaptive(Body, kw_only=True, tag_field="type", tag="adaptive"):
    display: Display | None = None


class ThinkingDisabled(Body, kw_only=True, tag_field="type", tag="disabled"):
    """The model answers at once."""


class JSONFormat(Body, kw_only=True, tag_field="type", tag="json_schema"):
    schema: dict[str, Any]


class OutputConfig(Body, kw_only=True):
    refused: ClassVar[NeutralValues] = {"task_budget": ()}
    effort: Effort | None = None
    format: JSONFormat | None = None


class AllThinking(Body, kw_only=True, tag_field="type", tag="all"):
    """The thinking of all turns."""


class ThinkingTurns(Body, kw_only=True, tag_field="type", tag="thinking_turns"):
    """The thinking of the last turns."""

    value: int


class ClearThinking(Body, kw_only=True, tag_field="type", tag="clear_thinking_20251015"):
    """Thinking of earlier turns is left out of the prompt."""

    keep: Literal["all"] | AllThinking | ThinkingTurns | None = None


class ContextManagement(Body, kw_only=True):
    edits: list[ClearThinking] | None = None


class PromptBody(Body, kw_only=True):
    """`POST /v1/messages/count_tokens`: what a prompt is made of."""

    no_ops: ClassVar[frozenset[str]] = NO_OPS
    refused: ClassVar[NeutralValues] = _REFUSED
    model: str
    messages: list[InputMessage]
    system: str | list[TextBlock] | None = None
    tools: list[InputTool] | None = None
    tool_choice: ChooseAuto | ChooseAny | ChooseTool | ChooseNone | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    output_format: JSONFormat | None = None
    context_management: ContextManagement | None = None

    @classmethod
    def check_inner(cls, fields: dict[str, Any]) -> None:
        for name, read in _READERS.items():
            if name in fields:
                fields[name] = read(fields[name], name)


class MessagesBody(PromptBody, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None


# --- objects inside a body, which errors name with their places


def _tags(*kinds: type[Body]) -> Mapping[str, type[Body]]:
    return MappingProxyType({str(kind.__struct_config__.tag): kind for kind in kinds})


_BLOCKS: Mapping[str, Mapping[str, type[Body]]] = MappingProxyType(
    {
        "user": _tags(TextBlock, ToolResultBlock),
        "assistant": _tags(TextBlock, ToolUseBlock, ThinkingBlock, RedactedThinkingBlock),
        "system": _tags(TextBlock),
    }
)
_RESULTS = _tags(TextBlock, ToolReferenceBlock)
_CHOICES = _tags(ChooseAuto, ChooseAny, ChooseTool, ChooseNone)
_THINKING = _tags(ThinkingEnabled, ThinkingAdaptive, ThinkingDisabled)
_FORMATS = _tags(JSONFormat)
_EDITS = _tags(ClearThinking)
_KEEPS = _tags(AllThinking, ThinkingTurns)


def _one_of(value: object, kinds: Mapping[str, type[Body]], where: str) -> Body:
    """An object as its `type` says."""
    fields = object_at(value, where)
    name = fields.get("type")
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        hint = nearest(name, kinds) if isinstance(name, str) else ""
        raise RequestError(
            f"{where}.type must be {' or '.join(kinds)}, not {shown(name, 60)}{hint}",
            f"{where}.type",
        )
    return inner(fields, kind, where)


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise RequestTypeError(f"{where} must be a list, not {shown(value, 60)}", where)
    return value


def _messages(value: object, where: str) -> list[InputMessage]:
    return [_message(item, f"{where}[{i}]") for i, item in enumerate(_list(value, where))]


def _message(value: object, where: str) -> InputMessage:
    fields = kept(object_at(value, where), InputMessage, f"{where}.")
    role, content = fields.get("role"), fields.get("content")
    if isinstance(role, str) and role in _BLOCKS and isinstance(content, list):
        fields["content"] = [
            _block(item, role, f"{where}.content[{i}]") for i, item in enumerate(content)
        ]
    if content in ("", []):
        raise RequestError(f"{where}.content is empty; give text or content blocks", where)
    return struct_of(fields, InputMessage, where)


def _block(value: object, role: str, where: str) -> Body:
    fields = object_at(value, where)
    kind = fields.get("type")
    if kind in _OTHER_BLOCKS.split():
        raise RequestError(f"{where}: blocks of the type {kind!r} are not supported", where)
    for other, kinds in _BLOCKS.items():
        if isinstance(kind, str) and kind in kinds and kind not in _BLOCKS[role]:
            raise RequestError(
                f"{where}: a {kind} block belongs into a message of the role {other!r}, not "
                f"{role!r}",
                where,
            )
    if kind == "tool_result" and isinstance(content := fields.get("content"), list):
        parts = [_one_of(item, _RESULTS, f"{where}.content[{i}]") for i, item in enumerate(content)]
        fields = {**fields, "content": parts}
    return _one_of(fields, _BLOCKS[role], where)


def _system(value: object, where: str) -> object:
    if not isinstance(value, list):
        return value
    return [_one_of(item, _BLOCKS["system"], f"{where}[{i}]") for i, item in enumerate(value)]


def _tools(value: object, where: str) -> list[InputTool]:
    return [_tool(item, f"{where}[{i}]") for i, item in enumerate(_list(value, where))]


def _tool(value: object, where: str) -> InputTool:
    kind = object_at(value, where).get("type", "custom")
    if kind not in ("custom", None):
        raise RequestError(
            f"{where}: this server has no tools of the type {shown(kind, 60)}; offer your own "
            "tools, with an input_schema, and leave this one out",
            f"{where}.type",
        )
    return inner(value, InputTool, where)


def _output_config(value: object, where: str) -> OutputConfig:
    fields = kept(object_at(value, where), OutputConfig, f"{where}.")
    if "format" in fields:
        fields["format"] = _one_of(fields["format"], _FORMATS, f"{where}.format")
    return struct_of(fields, OutputConfig, where)


def _context_management(value: object, where: str) -> ContextManagement:
    fields = kept(object_at(value, where), ContextManagement, f"{where}.")
    edits = _list(fields.get("edits", []), f"{where}.edits")
    found = [_edit(item, f"{where}.edits[{i}]") for i, item in enumerate(edits)]
    return struct_of({"edits": found}, ContextManagement, where)


def _edit(value: object, where: str) -> Body:
    fields = dict(object_at(value, where))
    if isinstance(keep := fields.get("keep"), dict):
        fields["keep"] = _one_of(keep, _KEEPS, f"{where}.keep")
    return _one_of(fields, _EDITS, where)


_READERS = MappingProxyType(
    {
        "messages": _messages,
        "system": _system,
        "tools": _tools,
        "tool_choice": lambda value, where: _one_of(value, _CHOICES, where),
        "thinking": lambda value, where: _one_of(value, _THINKING, where),
        "output_config": _output_config,
        "output_format": lambda value, where: _one_of(value, _FORMATS, where),
        "context_management": _context_management,
    }
)
