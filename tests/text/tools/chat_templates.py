"""Templates that write calls as those of the formats' models do, where values are not JSON."""

_RAW = "{{ v if v is string else v | tojson }}"

# A value in a notation: the words, what a string and a key are, what follows a comma and a colon.
_LITERAL = (
    "{{% macro text(v) %}}{string}{{% endmacro %}}"
    "{{% macro name(v) %}}{key}{{% endmacro %}}"
    "{{% macro value(v) %}}{{% if v is none %}}{none}{{% elif v is boolean %}}"
    "{{{{ '{true}' if v else '{false}' }}}}{{% elif v is string %}}{{{{ text(v) }}}}"
    "{{% elif v is mapping %}}{{{{ '{{' }}}}{{% for k, w in v.items() %}}{{{{ name(k) }}}}:{space}"
    "{{{{ value(w) }}}}{{{{ ',{space}' if not loop.last }}}}{{% endfor %}}{{{{ '}}' }}}}"
    "{{% elif v is iterable %}}[{{% for w in v %}}{{{{ value(w) }}}}"
    "{{{{ ',{space}' if not loop.last }}}}{{% endfor %}}]{{% else %}}{{{{ v | tojson }}}}"
    "{{% endif %}}{{% endmacro %}}"
)
_PYTHON = _LITERAL.format(
    string="{{ v | tojson }}", key="{{ v | tojson }}", none="None", true="True", false="False",
    space=" ",
)  # fmt: skip
_ARGUMENTS = (
    "{{ c.name }}({% for k, v in c.arguments.items() %}{{ k }}={{ value(v) }}"
    "{{ ', ' if not loop.last }}{% endfor %})"
)
_LIST = f"[{{% for c in calls %}}{_ARGUMENTS}{{{{ ', ' if not loop.last }}}}{{% endfor %}}]"


def _gemma(begin: str, quote: str, end: str) -> str:
    quoted = f"{quote}{{{{ v }}}}{quote}"
    key = f"{{% if v.isalnum() and v.isascii() %}}{{{{ v }}}}{{% else %}}{quoted}{{% endif %}}"
    literal = _LITERAL.format(
        string=quoted, key=key, none="null", true="true", false="false", space=""
    )
    call = "call:{{ c.name }}{{ value(c.arguments) }}"
    return f"{literal}{{% for c in calls %}}{begin}{call}{end}{{% endfor %}}"


TEMPLATES = {
    "Pythonic": "{# a python list of calls #}" + _PYTHON + _LIST,
    "Llama4Pythonic": "{# <|header_start|> [func_name1(name=value)] #}" + _PYTHON + _LIST,
    "Lfm2": _PYTHON + "<|tool_call_start|>" + _LIST + "<|tool_call_end|>",
    "Olmo3": "<function_calls>{% for c in calls %}{{ c.name }}("
             "{% for k, v in c.arguments.items() %}{{ k }}={{ v | tojson }}"
             "{{ ', ' if not loop.last }}{% endfor %}){{ '\\n' if not loop.last }}"
             "{% endfor %}</function_calls>",
    "Qwen3Coder": "{% for c in calls %}{{ '\\n' if not loop.first }}<tool_call>\n"
                  "<function={{ c.name }}>\n{% for k, v in c.arguments.items() %}"
                  "<parameter={{ k }}>\n" + _RAW + "\n</parameter>\n{% endfor %}"
                  "</function>\n</tool_call>{% endfor %}",
    "Glm45": "{% for c in calls %}{{ '\\n' if not loop.first }}<tool_call>{{ c.name }}\n"
             "{% for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
             "<arg_value>" + _RAW + "</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
    "Glm47": "{% for c in calls %}<tool_call>{{ c.name }}{% for k, v in c.arguments.items() %}"
             "<arg_key>{{ k }}</arg_key><arg_value>" + _RAW + "</arg_value>{% endfor %}"
             "</tool_call>{% endfor %}",
    "MinimaxM2": "<minimax:tool_call>\n{% for c in calls %}<invoke name=\"{{ c.name }}\">\n"
                 "{% for k, v in c.arguments.items() %}<parameter name=\"{{ k }}\">" + _RAW +
                 "</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>",
    "FunctionGemma": _gemma("<start_function_call>", "<escape>", "<end_function_call>"),
    "Gemma4": _gemma("<|tool_call>", '<|"|>', "<tool_call|>"),
}  # fmt: skip
