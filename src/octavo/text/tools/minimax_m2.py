"""MiniMax M2: `<invoke name="f">` and `<parameter name="k">` tags, several calls in one section."""

from octavo.text.tools.tagged import TaggedFormat


class MinimaxM2(TaggedFormat):
    name = "minimax_m2"
    begin = "<minimax:tool_call>"
    end = "</minimax:tool_call>"
    call = ('<invoke name="', '">', "</invoke>")
    key = ('<parameter name="', '">')
    value_end = "</parameter>"
    several = True
    markers = ("<minimax:tool_call>", "</minimax:tool_call>")

    def matches(self, template: str) -> bool:
        return "<minimax:tool_call>" in template
