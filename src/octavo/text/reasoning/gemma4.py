"""Gemma 4, whose reasoning is a channel called `thought`."""

from octavo.text.reasoning.base import ReasoningFormat


class Gemma4(ReasoningFormat):
    name = "gemma4"
    begins = ("<|channel>thought",)
    ends = ("<channel|>",)

    @property
    def markers(self) -> tuple[str, ...]:
        return "<|channel>", "<channel|>"

    def matches(self, template: str) -> bool:
        return "<channel|>" in template
