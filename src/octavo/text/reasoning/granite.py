"""Granite 3.2 and 3.3, which mark reasoning with sentences."""

from octavo.text.reasoning.base import ReasoningFormat

_THOUGHT, _RESPONSE = "my thought process:", "my response:"


class Granite(ReasoningFormat):
    name = "granite"
    begins = (f"Here is {_THOUGHT}", f"Here's {_THOUGHT}")
    ends = (f"Here is {_RESPONSE}", f"Here's {_RESPONSE}")
    blank = " \n"

    def matches(self, template: str) -> bool:
        return any(begin in template for begin in self.begins)
