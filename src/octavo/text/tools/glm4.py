"""GLM 4.5 to 4.7: `<arg_key>` and `<arg_value>` tags. 4.7 writes them without line breaks."""

from octavo.text.tools.tagged import TaggedFormat


class Glm45(TaggedFormat):
    name = "glm45"
    begin = "<tool_call>"
    end = "</tool_call>"
    call = ("", "", "")
    key = ("<arg_key>", "</arg_key>", "<arg_value>")
    value_end = "</arg_value>"
    separator = "\n"
    markers = (
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    )

    def matches(self, template: str) -> bool:
        return "<arg_key>" in template


class Glm47(Glm45):
    name = "glm47"
    line = separator = lead = ""

    def matches(self, template: str) -> bool:
        return "</arg_key><arg_value>" in template
