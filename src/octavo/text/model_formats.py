"""How one model writes tool calls and reasoning: as an option says, or its chat template shows."""

from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.errors import RequestError, shown
from octavo.structured_outputs import StructuredOutputsParams
from octavo.text.answer_form import AnswerForm
from octavo.text.tokenizer import Tokenizer
from octavo.text.tool_request import ToolChoice
from octavo.text.tools import registry
from octavo.text.tools.base import Tool, ToolFormat

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# Variables with which templates turn thinking on and off.
_SWITCHES = ("enable_thinking", "thinking")
# In which a model that was taught no format is made to write calls.
_USUAL = "hermes"


class ModelFormats(msgspec.Struct, frozen=True):
    """tools: the format of tool calls; None if none is known, and then a model that is free to
    call tools cannot be understood."""

    tools: ToolFormat | None = None

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, chat_template: str | None, tool_call_parser: str | None
    ) -> "ModelFormats":
        """Of a model. chat_template: if it is not the tokenizer's. Raises ConfigError for a parser
        that is not known."""
        known = tokenizer.chat_templates
        template = chat_template or known.get("tool_use") or known.get("default") or ""
        if tool_call_parser is not None:
            return cls(registry.find(tool_call_parser, template))
        return cls(registry.detect(template))

    def describe(self) -> str:
        """For the log."""
        return f"tool calls: {self.tools.name if self.tools else 'no known format'}"

    def form(
        self,
        tools: tuple[Tool, ...],
        choice: ToolChoice,
        parallel: bool,
        structured: StructuredOutputsParams | None,
    ) -> AnswerForm | None:
        """What an answer may be; None if it is nothing but a text. Raises RequestError."""
        if choice.mode == "none":
            return None
        return AnswerForm(
            tools=choice.among(tools),
            choice=choice.mode,
            named=choice.name,
            parallel=parallel,
            format=self._format(choice),
            structured=structured,
        )

    def _format(self, choice: ToolChoice) -> ToolFormat:
        if self.tools is not None:
            return self.tools
        if choice.mode == "required":
            return registry.find(_USUAL)
        raise RequestError(
            "tools: this model's chat template has no known format of calls, so that it cannot be "
            "left to make some; name one at the start (--tool-call-parser, one of "
            f"{', '.join(registry.names())}), or force a call with tool_choice 'required' or a "
            "function's name",
            "tools",
        )


def template_variables(
    given: Mapping[str, Any] | None, reasoning_effort: str | None
) -> Mapping[str, Any] | None:
    """`chat_template_kwargs` with what an effort says to templates, for which there are several
    variables: each reads its own. Raises RequestError."""
    if reasoning_effort is None:
        return given
    if reasoning_effort not in EFFORTS:
        raise RequestError(
            f"reasoning_effort must be one of {', '.join(EFFORTS)}, not {shown(reasoning_effort)}",
            "reasoning_effort",
        )
    said = dict.fromkeys(_SWITCHES, reasoning_effort != "none")
    found = {"reasoning_effort": reasoning_effort, **said, **(given or {})}
    if found["reasoning_effort"] != reasoning_effort:
        raise RequestError(
            f"reasoning_effort ({reasoning_effort}) and chat_template_kwargs.reasoning_effort "
            f"({shown(found['reasoning_effort'])}) differ; give one of them",
            "reasoning_effort",
        )
    return found
