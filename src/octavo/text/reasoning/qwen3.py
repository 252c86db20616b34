"""Qwen3 and its successors, SmolLM3, and others that think unless the template's
`enable_thinking` forbids it."""

from octavo.text.reasoning.think_tags import ThinkTags


class Qwen3(ThinkTags):
    name = "qwen3"

    def matches(self, template: str) -> bool:
        return "enable_thinking" in template and "</think>" in template
