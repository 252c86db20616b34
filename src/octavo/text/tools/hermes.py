"""Hermes 2 and 3, Qwen2.5, Qwen3 and many others: a JSON object between `<tool_call>` tags."""

from octavo.text.tools.json_object import JsonObjectFormat


class Hermes(JsonObjectFormat):
    name = "hermes"
    aliases = ("qwen3_json", "granite4")
    begin = "<tool_call>"
    opening = "\n"
    closing = "\n</tool_call>"
    end = "</tool_call>"
    separator = lead = "\n"
    markers = ("<tool_call>", "</tool_call>")

    def matches(self, template: str) -> bool:
        other = ("<function=", "<arg_key>", "<|tool_call|>", "<tool_calls>", "<invoke name=")
        return "<tool_call>" in template and not any(word in template for word in other)
