"""Magistral and later models of Mistral: `[THINK]` tokens, or `<think>` in the older ones."""

from octavo.text.reasoning.base import ReasoningFormat


class Mistral(ReasoningFormat):
    name = "mistral"
    begins = ("[THINK]", "<think>")
    ends = ("[/THINK]", "</think>")

    def matches(self, template: str) -> bool:
        return "[INST]" in template and any(end in template for end in self.ends)
