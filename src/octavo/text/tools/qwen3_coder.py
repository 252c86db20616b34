"""Qwen3-Coder, Qwen3-Next, Qwen3.5 and 3.6: `<function=f>` and `<parameter=k>` tags."""

from octavo.text.tools.tagged import TaggedFormat


class Qwen3Coder(TaggedFormat):
    name = "qwen3_coder"
    aliases = ("qwen3_xml",)
    begin = "<tool_call>"
    end = "</tool_call>"
    call = ("<function=", ">", "</function>")
    key = ("<parameter=", ">")
    value_end = "</parameter>"
    padded = True
    separator = "\n"
    also_begins = ("<function=",)
    markers = ("<tool_call>", "</tool_call>")

    def matches(self, template: str) -> bool:
        return all(word in template for word in ("<tool_call>", "<function=", "<parameter="))
