"""How one model writes tool calls and reasoning: as an option says, or its chat template shows."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from octavo.constraints import Sections, Thinking
from octavo.errors import RequestError, shown
from octavo.structured_outputs import StructuredOutputsParams
from octavo.text.answer_form import AnswerForm
from octavo.text.reasoning import registry as reasoning_formats
from octavo.text.reasoning.base import ReasoningFormat
from octavo.text.tokenizer import Tokenizer
from octavo.text.tool_request import ToolChoice
from octavo.text.tools import registry as tool_formats
from octavo.text.tools.base import Tool, ToolFormat

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# Variables with which templates turn thinking on and off.
THINKING_SWITCHES = ("enable_thinking", "thinking")
# In which a model that was taught no format is made to write calls.
_USUAL = "hermes"


class Limits(NamedTuple):
    """What the engine holds an answer to."""

    grammar: str | None = None
    sections: Sections | None = None
    thinking: Thinking | None = None

    @classmethod
    def of(cls, form: AnswerForm, tokenizer: Tokenizer) -> "Limits":
        """Raises RequestError for what cannot be enforced. May take seconds."""
        grammar = form.grammar(tokenizer)
        sections = None if grammar is None else form.sections(tokenizer)
        return cls(grammar, sections, form.thinking(tokenizer))


class ModelFormats(msgspec.Struct, frozen=True):
    """tools: the format of tool calls; None if none is known, and then a model that is free to
    call tools cannot be understood. reasoning: that of reasoning; None for a model that has none.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        chat_template: str | None,
        tool_call_parser: str | None,
        reasoning_parser: str | None,
    ) -> "ModelFormats":
        """Of a model. chat_template: if it is not the tokenizer's. Raises ConfigError for a parser
        that is not known."""
        known = tokenizer.chat_templates
        template = chat_template or known.get("tool_use") or known.get("default") or ""
        return cls(
            tool_formats.detect(template)
            if tool_call_parser is None
            else tool_formats.find(tool_call_parser, template),
            reasoning_formats.detect(template)
            if reasoning_parser is None
            else reasoning_formats.find(reasoning_parser),
        )

    def describe(self) -> str:
        """For the log."""
        tools = self.tools.name if self.tools else "no known format"
        return (
            f"tool calls: {tools}; reasoning: {self.reasoning.name if self.reasoning else 'none'}"
        )

    @property
    def calls(self) -> ToolFormat:
        """The format in which calls are written, known or not."""
        return self.tools or tool_formats.find(_USUAL)

    def check(self, choice: ToolChoice) -> None:
        """Raise RequestError unless a model of these formats can be given this choice."""
        if choice.mode == "auto" and self.tools is None:
            raise RequestError(
                "tools: this model's chat template has no known format of calls, so that it cannot "
                "be left to make some; name one at the start (--tool-call-parser, one of "
                f"{', '.join(tool_formats.names())}), or force a call with tool_choice 'required' "
                "or a function's name",
                "tools",
            )

    def form(
        self,
        tokenizer: Tokenizer,
        prompt: str,
        tools: tuple[Tool, ...],
        choice: ToolChoice,
        parallel: bool,
        structured: StructuredOutputsParams | None,
    ) -> AnswerForm | None:
        """What an answer may be; None if it is nothing but a text. prompt: its text. tools: all of
        the request. choice: one that `check` has let pass."""
        reasoning = self.reasoning
        if choice.mode == "none" and reasoning is None:
            return None
        return AnswerForm(
            tools=choice.among(tools),
            choice=choice.mode,
            named=choice.name,
            parallel=parallel,
            format=self.calls,
            structured=structured,
            reasoning=reasoning,
            in_reasoning=reasoning is not None and reasoning.starts_in_reasoning(prompt, tokenizer),
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
    said = dict.fromkeys(THINKING_SWITCHES, reasoning_effort != "none")
    found = {"reasoning_effort": reasoning_effort, **said, **(given or {})}
    if found["reasoning_effort"] != reasoning_effort:
        raise RequestError(
            f"reasoning_effort ({reasoning_effort}) and chat_template_kwargs.reasoning_effort "
            f"({shown(found['reasoning_effort'])}) differ; give one of them",
            "reasoning_effort",
        )
    return found
