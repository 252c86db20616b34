"""What an answer may be, said once: from it come the grammar that limits it and its parser.

An answer is reasoning, where the model thinks, then tool calls, a text of the form that
`structured_outputs` asks for, or any text. How calls are written is in `octavo.text.tools`, the
markers of reasoning are in `octavo.text.reasoning`; applying a grammar is the engine's part.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from octavo.constraints import Sections, Thinking
from octavo.errors import RequestError, shown
from octavo.structured_outputs import MAX_CHARACTERS, StructuredOutputsParams
from octavo.text import json_schema
from octavo.text.answer import Content, Event, Parser
from octavo.text.grammar import check, grammar_of
from octavo.text.lark import LarkRules
from octavo.text.markers import Markers
from octavo.text.reasoning.base import ReasoningFormat
from octavo.text.tokenizer import Tokenizer
from octavo.text.tool_request import Mode
from octavo.text.tools.base import MAX_CALLS, Tool, ToolFormat

MAX_SCHEMAS = 2**19  # characters of all tools' schemas
_CHECKED, _LOADED = 64, 256  # grammars and schemas of tools that are remembered


class AnswerForm(msgspec.Struct, frozen=True, kw_only=True):
    """What one request's answers may be.

    tools: those that it may call. choice: whether it may call some (`auto`), must, or must not, and
    then nothing is read as a call. named: the one of them that it must call, once.
    parallel: whether an answer may have more than one call. format: how the model writes calls.
    structured: the form of an answer that has no calls. reasoning: how the model marks what it
    thinks before it answers. in_reasoning: whether the prompt ends in that.

    Tools and choice are those of `octavo.text.tool_request`, which has checked them.
    """

    tools: tuple[Tool, ...] = ()
    choice: Mode = "none"
    named: str | None = None
    parallel: bool = True
    format: ToolFormat | None = None
    structured: StructuredOutputsParams | None = None
    reasoning: ReasoningFormat | None = None
    in_reasoning: bool = False

    def __post_init__(self) -> None:
        calls = self.choice != "none"
        assert not calls or (self.tools and self.format is not None), "checked before"

    def grammar(self, tokenizer: Tokenizer) -> str | None:
        """Of the whole answer or of its `sections`, in the library's notation; None if nothing
        limits it. Raises RequestError for what cannot be enforced."""
        calls, structured = self._calls, self.structured
        if structured is not None and calls is None and self.reasoning is None:
            return grammar_of(structured)
        sections, markers = self.sections(tokenizer), self._all_markers(tokenizer)
        if sections is None and not self._forced and calls is None:
            return None
        rules = LarkRules(markers)
        if sections is None:
            rest = self._rest(rules)
            if rest is None:
                return None
            start = f"{self._thought(rules, markers)}{rest}"
        elif calls is not None:
            start = calls.after_trigger(rules)
        else:
            assert self.reasoning is not None, "nothing else has sections"
            start = f"{self.reasoning.after()} {self._rest(rules)}"
        return _checked(rules.grammar(start), "tools" if structured is None else structured.param)

    def sections(self, tokenizer: Tokenizer) -> Sections | None:
        """Where the grammar holds, if that is not everywhere: after the token that begins calls,
        in an answer that is free otherwise; or after the one that ends the reasoning."""
        calls, markers = self._calls, self._all_markers(tokenizer)
        if calls is not None:
            trigger = None if self._forced else calls.trigger(markers)
            if trigger is None:
                return None
            # A trigger may begin more than calls, such as reasoning; then a call ends the answer.
            only_calls = calls.format.trigger == calls.format.begin
            return Sections((trigger,), repeats=self.parallel or not only_calls)
        if self.structured is None or self.reasoning is None or not self.in_reasoning:
            return None
        ends = self.reasoning.end_ids(markers)
        return Sections(ends, repeats=False, may_end=False) if ends else None

    def markers(self, tokenizer: Tokenizer) -> Markers | None:
        """Those that `parser` needs to see in the text; None if it needs none."""
        if self._calls is None and self.reasoning is None:
            return None
        return self._all_markers(tokenizer)

    def parser(self, tokenizer: Tokenizer) -> Parser:
        """Of the text of one answer, with `markers` as characters."""
        calls, markers = self._calls, self._all_markers(tokenizer)
        rest: Parser = PlainText(markers)
        if calls is not None:
            rest = calls.format.parser({tool.name: tool for tool in calls.tools}, markers)
        if self.reasoning is None:
            return rest
        begin = "" if calls is None else calls.format.begin
        return self.reasoning.parser(rest, markers, self.in_reasoning, begin)

    def thinking(self, tokenizer: Tokenizer) -> Thinking | None:
        """How the engine finds the reasoning; None for a model that does not think."""
        if self.reasoning is None:
            return None
        return self.reasoning.thinking(tokenizer, self.in_reasoning)

    def calls_token(self, tokenizer: Tokenizer) -> int | None:
        """The token that begins tool calls, if one does and the answer may have some."""
        calls = self._calls
        return None if calls is None else calls.trigger(self._all_markers(tokenizer))

    def _all_markers(self, tokenizer: Tokenizer) -> Markers:
        formats = (self.reasoning, self.format if self._calls else None)
        return Markers(tokenizer, [w for f in formats if f is not None for w in f.markers])

    def _thought(self, rules: LarkRules, markers: Markers) -> str:
        if self.reasoning is None:
            return ""
        return f"{self.reasoning.grammar(rules, markers, self.in_reasoning)} "

    @property
    def _calls(self) -> "_Calls | None":
        """None if an answer has no calls."""
        if self.choice == "none" or self.format is None:
            return None
        if self.named is None:
            return _Calls(self.format, self.tools, self.parallel)
        return _Calls(self.format, [t for t in self.tools if t.name == self.named], False)

    @property
    def _forced(self) -> bool:
        """Whether an answer is either calls alone or a text of a given form."""
        return self.choice == "required" or self.structured is not None

    def _rest(self, rules: LarkRules) -> str | None:
        """What follows the reasoning; None if nothing limits it."""
        calls = self._calls
        if calls is None or (self.choice == "auto" and self.structured is not None):
            assert self.structured is not None, "nothing is limited"
            form = rules.other(grammar_of(self.structured))
            if self.reasoning is not None and self.reasoning.content:
                form = f"{rules.literal(self.reasoning.content)} {form}"
            return form if calls is None else f"({calls.alone(rules, beside_form=True)} | {form})"
        return calls.alone(rules) if self._forced else calls.in_text(rules)


class PlainText:
    """The parser of a text that is nothing but content."""

    def __init__(self, markers: Markers) -> None:
        self._markers = markers

    def feed(self, text: str) -> list[Event]:
        return [Content(self._markers.spelled(text))] if text else []

    def finish(self) -> list[Event]:
        return []


class _Calls:
    """The calls that an answer may have, as expressions of a grammar."""

    def __init__(self, format_: ToolFormat, tools: Sequence[Tool], parallel: bool) -> None:
        self.format, self.tools = format_, tools
        self.most = MAX_CALLS if parallel else 1

    def trigger(self, markers: Markers) -> int | None:
        """The token that begins a section, if one does."""
        first, *_ = [*markers.parts(self.format.trigger), ""]
        return first if isinstance(first, int) else None

    def alone(self, rules: LarkRules, beside_form: bool = False) -> str:
        """One call or more, and nothing else. beside_form: or else a text of a given form."""
        make = self.format.section_beside_json if beside_form else self.format.section
        section = make(rules, self._enforced, self._in_section)
        one = rules.rule(f"{self._literal(rules, self.format.begin)}{section}")
        if self.format.several or self.most == 1:
            return one
        another = rules.rule(f"{self._literal(rules, self.format.separator)}{one}")
        return f"{one} {another}{{0,{self.most - 1}}}"

    def after_trigger(self, rules: LarkRules) -> str:
        """A section, without the token that begins it."""
        return self.format.behind_trigger(rules, self._enforced, self._in_section)

    def in_text(self, rules: LarkRules) -> str | None:
        """Any text, in which what spells the beginning of a section begins one; None if nothing is
        known of where one begins."""
        if not self.format.begin:
            return self.format.in_text(rules, self._enforced, self._in_section)
        one = rules.rule(f"{rules.until(self.format.begin)} {self._section(rules)}")
        return f"({one} | TEXT)" if self.most == 1 else f"{one}{{0,{self.most}}} TEXT"

    @property
    def _enforced(self) -> list[Tool]:
        """The tools, with their schemas as a grammar takes them. Raises RequestError."""
        texts = [json.dumps(tool.schema) for tool in self.tools]
        if (size := sum(map(len, texts))) > MAX_SCHEMAS:
            raise RequestError(
                f"the tools' parameters must have at most {MAX_SCHEMAS} characters together, not "
                f"{size}; with strict: false, those of a tool do not count",
                "tools",
            )
        return [_as_enforced(tool, text) for tool, text in zip(self.tools, texts, strict=True)]

    @property
    def _in_section(self) -> int:
        return self.most if self.format.several else 1

    def _section(self, rules: LarkRules) -> str:
        return self.format.section(rules, self._enforced, self._in_section)

    def _literal(self, rules: LarkRules, text: str) -> str:
        return f"{rules.literal(text)} " if text else ""


def _checked(grammar: str, param: str) -> str:
    """The grammar itself. Raises RequestError, which names `param`, if it cannot be enforced."""
    if (problem := _problem(grammar, param)) is not None:
        raise RequestError(problem, param)
    return grammar


@lru_cache(_CHECKED)
def _problem(grammar: str, param: str) -> str | None:
    """Why a grammar cannot be enforced."""
    try:
        check(grammar, param)
    except RequestError as error:
        return str(error)
    return None


def enforceable(tool: Tool) -> bool:
    """Whether arguments can be held to the tool's schema."""
    return _loaded(json.dumps(tool.schema))[0] is not None


def _as_enforced(tool: Tool, text: str) -> Tool:
    """The tool, with its schema, of this text, as a grammar takes it. Raises RequestError."""
    if not tool.strict:
        return tool
    schema, problem = _loaded(text)
    if schema is None:
        raise RequestError(
            f"tools: {shown(tool.name)}: {problem}; with strict: false its arguments may be any "
            "JSON object",
            "tools",
        )
    return msgspec.structs.replace(tool, parameters=schema)


@lru_cache(_LOADED)
def _loaded(text: str) -> tuple[Mapping[str, Any] | None, str]:
    """A schema of arguments, checked; or None and why it cannot be enforced."""
    if len(text) > MAX_CHARACTERS:
        return None, f"its schema must have at most {MAX_CHARACTERS} characters, not {len(text)}"
    try:
        schema = json_schema.load(text, "its schema")
        if schema["type"] != "object":
            return None, f"its schema must be of type 'object', not {shown(schema['type'])}"
        rules = LarkRules()
        check(rules.grammar(rules.json(schema)), "its schema")
    except RequestError as error:
        return None, str(error)
    return schema, ""
