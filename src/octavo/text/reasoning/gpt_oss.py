"""gpt-oss, whose reasoning is the messages of the channel `analysis`.

One parser reads all channels of an answer (`octavo.text.tools.harmony`), so that none has to guess
what another has left.
"""

from octavo.text.answer import Parser
from octavo.text.markers import Markers
from octavo.text.reasoning.base import ReasoningFormat
from octavo.text.tokenizer import Tokenizer
from octavo.text.tools import harmony


class GptOss(ReasoningFormat):
    name = "openai_gptoss"
    aliases = ("harmony",)
    recurs = True
    begins = (f"{harmony.CHANNEL}analysis{harmony.MESSAGE}",)
    ends = (f"{harmony.END}{harmony.START}assistant",)
    content = f"{harmony.CHANNEL}final{harmony.MESSAGE}"

    @property
    def markers(self) -> tuple[str, ...]:
        return harmony.MARKERS

    def matches(self, template: str) -> bool:
        return harmony.CHANNEL in template and "analysis" in template

    def starts_in_reasoning(self, prompt: str, tokenizer: Tokenizer) -> bool:
        _, begin, rest = prompt.rpartition(self.begins[0])
        return bool(begin) and not any(word in rest for word in harmony.MARKERS)

    def parser(self, rest: Parser, markers: Markers, inside: bool, calls: str = "") -> Parser:
        tools = rest.tools if isinstance(rest, harmony.HarmonyParser) else {}
        return harmony.HarmonyParser(tools, markers, inside)

    def after(self) -> str:
        return ""
