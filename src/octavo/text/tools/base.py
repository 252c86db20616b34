"""What a tool is, and what a format of tool calls has to say.

A format is one description: how calls are written. From it come the parser of what a model writes,
the grammar that holds a model to it, and `write`, with which tests compare both with a model's own
chat template. A new one is a file of its own and a line in `octavo.text.tools.registry`.
"""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.text.answer import Parser
from octavo.text.lark import LarkRules
from octavo.text.markers import Markers

MAX_CALLS = 128  # in one answer that must have calls
CALL_ID = "chatcmpl-tool-"  # what ids begin with in formats that have no style of their own


class Tool(msgspec.Struct, frozen=True):
    """A function that a model may call.

    parameters: the JSON Schema of its arguments, an object. strict: whether they must match it;
    else they are any JSON object.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = {}
    strict: bool = True

    @property
    def schema(self) -> Mapping[str, Any]:
        """Of the arguments, as it is enforced."""
        return {"type": "object", **self.parameters} if self.strict else {"type": "object"}


class Call(msgspec.Struct, frozen=True):
    """A call that was made: a tool's name, and the arguments by their names."""

    name: str
    arguments: Mapping[str, Any]


class ToolFormat(ABC):
    """How a family of models writes tool calls.

    name, aliases: of `--tool-call-parser`, vLLM's. begin: what opens a section of one or more
    calls; empty where nothing does. several: whether one section may have several calls; else
    each has its own section, and `separator` stands between them. markers: the words that a
    tokenizer may have as added tokens. trigger: what `behind_trigger` follows in an answer that is
    free otherwise; by default `begin`.
    """

    name: str
    aliases: tuple[str, ...] = ()
    begin: str = ""
    several: bool = False
    separator: str = ""
    markers: tuple[str, ...] = ()

    @property
    def trigger(self) -> str:
        return self.begin

    def behind_trigger(self, rules: LarkRules, tools: Sequence[Tool], most: int) -> str:
        """An expression of what follows the added token with which `trigger` begins, up to where
        the answer is free again."""
        _, *rest = rules.literals(self.trigger)
        return " ".join([*rest, self.section(rules, tools, most)])

    @abstractmethod
    def matches(self, template: str) -> bool:
        """Whether a model with this chat template writes calls so."""

    @abstractmethod
    def section(self, rules: LarkRules, tools: Sequence[Tool], most: int) -> str:
        """An expression of what follows `begin` in a section, to its end. most: calls, 1 unless
        `several`."""

    def section_beside_json(self, rules: LarkRules, tools: Sequence[Tool], most: int) -> str:
        """As `section`, in an answer that may be JSON of another form instead. Where calls begin
        as JSON does they are `%json` here, of which the lexer tells both apart."""
        return self.section(rules, tools, most)

    def in_text(self, rules: LarkRules, tools: Sequence[Tool], most: int) -> str | None:
        """Of a format without `begin`: an expression of any answer, in which what is a call is held
        to the tools. None if there is no such expression."""
        return None

    @abstractmethod
    def parser(self, tools: Mapping[str, Tool], markers: Markers) -> Parser:
        """A parser of one answer (without reasoning). tools: by name."""

    @abstractmethod
    def write(self, calls: Sequence[Call]) -> str:
        """The text that a model writes for these calls, markers spelled."""

    def new_id(self, index: int, name: str) -> str:
        """An id for a new call."""
        return f"{CALL_ID}{uuid.uuid4().hex}"
