"""DeepSeek V3, R1-0528 and V3.1: a section of named calls, whose JSON V3 puts in a fence."""

from octavo.text.tools.named_json import NamedJsonFormat

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"


class DeepSeekV31(NamedJsonFormat):
    name = "deepseek_v31"
    begin = _CALLS
    opening = _CALL
    middle = _SEPARATOR
    closing = _CALL_END
    end = _CALLS_END
    several = True
    markers = (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR)

    def matches(self, template: str) -> bool:
        return _CALLS in template and "```json" not in template


class DeepSeekV3(DeepSeekV31):
    name = "deepseek_v3"
    opening = f"{_CALL}function{_SEPARATOR}"
    middle = "\n```json\n"
    closing = f"\n```{_CALL_END}"
    between = "\n"

    def matches(self, template: str) -> bool:
        return _CALLS in template and "```json" in template
