"""Llama 3.1 to 3.3, and Llama 4 with its JSON prompt: a bare object with `parameters`."""

import re

from octavo.text.tools.json_object import JsonObjectFormat

_PROMPT = re.compile(r'\\?"parameters\\?": dictionary of argument')


class Llama3Json(JsonObjectFormat):
    """Calls are told from other JSON by their keys and by a tool's name, wherever they stand."""

    name = "llama3_json"
    aliases = ("llama4_json",)
    begins = ("<|python_tag|>", "{")
    key = "parameters"
    several = True
    between = "; "
    markers = ("<|python_tag|>",)
    annotations = ("type",)  # models write "type": "function", as it stands in their prompt

    def matches(self, template: str) -> bool:
        return _PROMPT.search(template) is not None
