"""Llama 4: a list of calls as Python writes them, with or without markers around."""

from octavo.text.tools.pythonic import PythonicFormat


class Llama4Pythonic(PythonicFormat):
    name = "llama4_pythonic"
    begin = "<|python_start|>"
    closing = "]<|python_end|>"
    end = "<|python_end|>"
    bare = True
    markers = ("<|python_start|>", "<|python_end|>")

    def matches(self, template: str) -> bool:
        return "<|header_start|>" in template and "func_name1(" in template
