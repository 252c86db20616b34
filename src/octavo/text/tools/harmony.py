"""gpt-oss: answers of messages, each in a channel ("harmony").

    <|channel|>analysis<|message|>...<|end|><|start|>assistant
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>

Messages of `analysis` are reasoning, those of `final` and those of `commentary` to nobody are
content, and those to a function are calls. All of an answer is read and written here, reasoning
included, because a message's kind is in the middle of its header.

A line break stands between the texts of two messages. A message to a recipient that is no tool is
content as it was written. A model makes one call and ends there.
"""

import json
import re
from collections.abc import Mapping, Sequence

from octavo.text.answer import Parser, Reasoning
from octavo.text.lark import LarkRules
from octavo.text.markers import Markers
from octavo.text.tools.base import Call, Tool, ToolFormat
from octavo.text.tools.section_parser import NoCallError, SectionParser, Steps

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, CALL, RETURN = "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)

_ENDS = (END, CALL, RETURN)
_ROLE = f"{START}assistant"
_RECIPIENT = " to="
_FUNCTIONS = "functions."
_LONGEST_HEADER = 256
_CHANNELS = ("analysis", "commentary", "final")
_WORDS = re.compile(r"[A-Za-z0-9_.= -]*")
_HEADER = re.compile(
    rf"(?:{re.escape(_ROLE)}(?: to=(?P<before>[^\s<]+))?)?\s*"
    rf"{re.escape(CHANNEL)}(?P<channel>{'|'.join(_CHANNELS)})(?:\s+to=(?P<behind>[^\s<]+))?"
    rf"\s*(?:{re.escape(CONSTRAIN)})?\s*\w*"
)


class Harmony(ToolFormat):
    """A section is one message to a function; nothing opens it that other messages have not.

    The word that ends the message is not in it: the token ends the model's answer, too.
    """

    name = "openai"
    aliases = ("harmony",)
    separator = f"{CALL}{_ROLE}"
    markers = MARKERS

    def matches(self, template: str) -> bool:
        return CHANNEL in template and "commentary" in template

    def section(self, rules: LarkRules, tools: Sequence[Tool], most: int) -> str:
        return rules.rule(" | ".join(self._call(rules, tool) for tool in tools))

    @property
    def trigger(self) -> str:
        return CHANNEL

    def behind_trigger(self, rules: LarkRules, tools: Sequence[Tool], most: int) -> str:
        """The rest of a message's header; the arguments of a call, too."""
        others = f"({' | '.join(map(json.dumps, _CHANNELS))}) {rules.literal(MESSAGE)}"
        calls = [
            f"{rules.literal(self._header(tool.name).removeprefix(CHANNEL))} "
            f"{rules.json(tool.schema)}"
            for tool in tools
        ]
        return rules.rule(" | ".join([others, *calls]))

    def _call(self, rules: LarkRules, tool: Tool) -> str:
        return f"{rules.literal(self._header(tool.name))} {rules.json(tool.schema)}"

    def _header(self, name: str) -> str:
        return f"{CHANNEL}commentary{_RECIPIENT}{_FUNCTIONS}{name} {CONSTRAIN}json{MESSAGE}"

    def parser(self, tools: Mapping[str, Tool], markers: Markers) -> Parser:
        return HarmonyParser(tools, markers)

    def write(self, calls: Sequence[Call]) -> str:
        return self.separator.join(
            f"{self._header(call.name)}{json.dumps(call.arguments, ensure_ascii=False)}"
            for call in calls
        )


class HarmonyParser(SectionParser):
    """Of an answer with its reasoning. in_reasoning: whether the prompt ends in a message of it.

    Text that is in no message is content.
    """

    def __init__(
        self, tools: Mapping[str, Tool], markers: Markers, in_reasoning: bool = False
    ) -> None:
        super().__init__((START, CHANNEL, *_ENDS), "", tools, markers, Harmony().new_id)
        self._in_reasoning = in_reasoning
        self._has_reasoning = self._has_content = False

    def section(self, begin: str) -> Steps[None]:
        while begin in (START, CHANNEL):
            begin = yield from self._message(begin)

    def _answer(self) -> Steps[None]:
        yield from self._decided(self._first())
        yield from super()._answer()

    def _first(self) -> Steps[None]:
        """Where the prompt ends in reasoning, or in the role, after which a recipient may come."""
        if self._in_reasoning:
            yield from self.section((yield from self._reasoning()))
            return
        self.body()
        if (yield from self.literal(_RECIPIENT)):
            yield from self.section((yield from self._message(f"{_ROLE}{_RECIPIENT}")))

    def _message(self, begin: str) -> Steps[str]:
        """Reads a message, or only its header if content follows. Returns what has ended it."""
        header = _HEADER.fullmatch((yield from self._header_text(begin)))
        if header is None:
            raise NoCallError
        recipient = header["before"] or header["behind"]
        if recipient is not None:
            yield from self._call(recipient)
        elif header["channel"] == "analysis":
            return (yield from self._reasoning())
        else:
            self._begin_content()
        return ""

    def _header_text(self, begin: str) -> Steps[str]:
        header = begin
        while not (yield from self.literal(MESSAGE)):
            header += self.spelled((yield from self.peek()))
            self.advance(1)
            if len(header) > _LONGEST_HEADER or not _may_begin_header(header):
                raise NoCallError
        return header

    def _call(self, recipient: str) -> Steps[None]:
        name = recipient.removeprefix(_FUNCTIONS)
        if name not in self.tools:
            raise NoCallError
        self._has_content = False
        self.begin_call(name)
        yield from self.skip()
        for end in _ENDS:
            if (yield from self.ahead(end)):
                self.arguments("{}")
                break
        else:
            if (yield from self.peek()) != "{":
                raise NoCallError
            yield from self.json(self.arguments)
        self.end_call()

    def _reasoning(self) -> Steps[str]:
        between = "\n" if self._has_reasoning else ""

        def take(text: str) -> None:
            nonlocal between
            self.emit(Reasoning(between + text))
            between, self._has_reasoning = "", True

        return (yield from self.upto((START, CHANNEL, *_ENDS), take))

    def _begin_content(self) -> None:
        if self._has_content:
            self._add_content(self._content.add("\n"))
        self._has_content = True


def _may_begin_header(text: str) -> bool:
    """Whether more text could make a header of it, as far as its words and characters say."""
    role, has_channel, rest = text.partition(CHANNEL)
    if not has_channel:
        return f"{_ROLE}{CHANNEL}".startswith(role) or (
            role.startswith(f"{_ROLE} ") and _begins_words(role.removeprefix(_ROLE), CHANNEL)
        )
    named = any(name.startswith(rest) or rest.startswith(name) for name in _CHANNELS)
    return named and _begins_words(rest.replace(CONSTRAIN, "", 1), CONSTRAIN)


def _begins_words(text: str, marker: str) -> bool:
    """Whether `text` is what stands between markers, perhaps with the beginning of `marker`."""
    words, opened, rest = text.partition("<")
    return _WORDS.fullmatch(words) is not None and marker.startswith(opened + rest)
