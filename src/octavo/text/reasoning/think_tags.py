"""What the formats with `<think>` tags share."""

from abc import abstractmethod

from octavo.text.reasoning.base import ReasoningFormat


class ThinkTags(ReasoningFormat):
    """Reasoning between `<think>` and `</think>`, tokens of their own in most tokenizers."""

    begins = ("<think>",)
    ends = ("</think>",)

    @abstractmethod
    def matches(self, template: str) -> bool: ...
