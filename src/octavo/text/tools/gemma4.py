"""Gemma 4: `call:f{k:<|"|>text<|"|>}` between markers."""

from octavo.text.tools.gemma_call import GemmaFormat


class Gemma4(GemmaFormat):
    name = "gemma4"
    begin = "<|tool_call>"
    end = "<tool_call|>"
    quote = '<|"|>'
    markers = ("<|tool_call>", "<tool_call|>", '<|"|>')

    def matches(self, template: str) -> bool:
        return "<|tool_call>" in template
