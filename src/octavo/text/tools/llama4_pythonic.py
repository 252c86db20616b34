"""Llama 4: a list of calls as Python writes them, with or without markers around."""

from octavo.text.tools.pythonic import PythonicFormat


class Llama4Pythonic(PythonicFormat):
    name = "llama4_pythonic"
    wrap = ("<|python_start|>", "<|python_end|>")
    markers = wrap

    def matches(self, template: str) -> bool:
        return "<|header_start|>" in template and "func_name1(" in template
