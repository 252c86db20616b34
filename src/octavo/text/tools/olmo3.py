"""OLMo 3: calls as Python writes them, one on each line between `<function_calls>` tags."""

from octavo.text.tools.pythonic import PythonicFormat


class Olmo3(PythonicFormat):
    name = "olmo3"
    begin = "<function_calls>"
    opening = between = "\n"
    closing = "\n</function_calls>"
    end = "</function_calls>"
    markers = ("<function_calls>", "</function_calls>")

    def matches(self, template: str) -> bool:
        return "<function_calls>" in template
