"""Granite 3: a list of JSON objects after `<|tool_call|>`. Granite 4 writes as Hermes does."""

from octavo.text.tools.json_object import JsonObjectFormat


class Granite(JsonObjectFormat):
    name = "granite"
    begin = "<|tool_call|>"
    begins = ("<tool_call>",)
    opening = "["
    closing = "]"
    several = True
    markers = ("<|tool_call|>", "<tool_call>")

    def matches(self, template: str) -> bool:
        return "<|start_of_role|>" in template and "<|tool_call|>" in template
