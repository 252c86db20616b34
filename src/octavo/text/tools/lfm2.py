"""LFM 2 and 2.5: a list of calls as Python writes them, between markers."""

from octavo.text.tools.pythonic import PythonicFormat


class Lfm2(PythonicFormat):
    name = "lfm2"
    begin = "<|tool_call_start|>"
    closing = "]<|tool_call_end|>"
    end = "<|tool_call_end|>"
    markers = ("<|tool_call_start|>", "<|tool_call_end|>")

    def matches(self, template: str) -> bool:
        return "<|tool_call_start|>" in template
