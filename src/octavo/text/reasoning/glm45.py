"""GLM 4.5 and later."""

from octavo.text.reasoning.think_tags import ThinkTags


class Glm45(ThinkTags):
    name = "glm45"
    aliases = ("glm47",)

    def matches(self, template: str) -> bool:
        return "[gMASK]" in template and "</think>" in template
