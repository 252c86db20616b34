"""LFM 2 and 2.5: a list of calls as Python writes them, between markers."""

from octavo.text.tools.pythonic import PythonicFormat


class Lfm2(PythonicFormat):
    name = "lfm2"
    begin = "<|tool_call_start|>"
    end = "<|tool_call_end|>"
    markers = ("<|tool_call_start|>", "<|tool_call_end|>")

    def matches(self, template: str) -> bool:
        # Most of its templates have the tools, and calls only as the content of a message.
        words = ("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ")
        return any(word in template for word in words)
