"""OLMo 3 Think, whose tokenizer spells the tags in several tokens."""

from octavo.text.reasoning.think_tags import ThinkTags


class Olmo3(ThinkTags):
    name = "olmo3"

    def matches(self, template: str) -> bool:
        return "<think>" in template and "<functions>" in template
