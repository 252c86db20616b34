"""LFM 2 and 2.5: a list of calls as Python writes them, between markers."""

from octavo.text.tools.pythonic import PythonicFormat


class Lfm2(PythonicFormat):
    name = "lfm2"
    begin = "<|tool_call_start|>"
    end = "<|tool_call_end|>"
    markers = ("<|tool_call_start|>", "<|tool_call_end|>")

    def matches(self, template: str) -> bool:
        if "<|tool_call_start|>" in template or "<|tool_list_start|>" in template:
            return True
        # Some of its templates have the tools alone: calls are the content of a message.
        return "List of tools: " in template and "<tool_call>" not in template
