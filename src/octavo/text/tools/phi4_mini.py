"""Phi-4-mini: a list of JSON objects after the word `functools`."""

from types import MappingProxyType

from octavo.text.tools.json_object import JsonObjectFormat


class Phi4MiniJson(JsonObjectFormat):
    name = "phi4_mini_json"
    begin = "functools["
    begins = ("<|tool_call|>",)
    closing = "]"
    ends = MappingProxyType({"<|tool_call|>": "<|/tool_call|>"})
    several = True
    markers = ("<|tool_call|>", "<|/tool_call|>")

    def matches(self, template: str) -> bool:
        return "<|/tool|>" in template or "functools" in template
