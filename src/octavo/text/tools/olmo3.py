"""OLMo 3: calls as Python writes them, but for JSON's values, one on each line between tags."""

import msgspec

from octavo.text.tools.pythonic import NOTATION, PythonicFormat


class Olmo3(PythonicFormat):
    name = "olmo3"
    begin = "<function_calls>"
    opening = closing = ""
    between = space = "\n"
    end = "</function_calls>"
    notation = msgspec.structs.replace(NOTATION, words={True: "true", False: "false", None: "null"})
    markers = ("<function_calls>", "</function_calls>")

    def matches(self, template: str) -> bool:
        return "<function_calls>" in template
