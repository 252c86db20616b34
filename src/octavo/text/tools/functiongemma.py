"""FunctionGemma: `call:f{k:<escape>text<escape>}` between markers."""

from octavo.text.tools.gemma_call import GemmaFormat


class FunctionGemma(GemmaFormat):
    name = "functiongemma"
    begin = "<start_function_call>"
    end = "<end_function_call>"
    quote = "<escape>"
    markers = ("<start_function_call>", "<end_function_call>", "<escape>")

    def matches(self, template: str) -> bool:
        return "<start_function_call>" in template
