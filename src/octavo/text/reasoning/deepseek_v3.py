"""DeepSeek V3.1 and later, which think if the template's `thinking` says so."""

import re

from octavo.text.reasoning.think_tags import ThinkTags

_SWITCH = re.compile(r"\bthinking\b")


class DeepSeekV3(ThinkTags):
    name = "deepseek_v3"

    def matches(self, template: str) -> bool:
        return "<｜Assistant｜>" in template and "</think>" in template and bool(
            _SWITCH.search(template))  # fmt: skip
