"""From what a request says of its text's form to a grammar, in llguidance's notation.

Free of any tokenizer: the front door calls `grammar_of`, which also checks that the grammar can be
enforced, and sends the result along with the request. Matching it is in `octavo.text.matcher`.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from octavo.errors import RequestError, brief
from octavo.structured_outputs import StructuredOutputsParams
from octavo.text import grammar_cost, json_schema, structural_tag

_MAX_MESSAGE = 300
_MAX_SYMBOLS = 50_000  # the library fails, without saying so before, at 65,536
_MAX_ITEMS = 20_000  # ways to go on; a choice has one for each text, an optional property four
_CHECKED = 256  # grammars that are remembered
# What begins the library's remark that it has not seen which tokens a grammar's ids are.
_UNCHECKED = "no tokenizer - can't validate <["
# Where llguidance says in which line and column of its own text an error is.
_PLACE = re.compile(r"^(?:at|near) \d+\(\d+\): ")


def limits() -> LLParserLimits:
    """Of what a grammar may take. Messages do not show the parser's state."""
    return LLParserLimits(
        verbose_errors=False, max_grammar_size=_MAX_SYMBOLS, max_items_in_row=_MAX_ITEMS
    )


@lru_cache(_CHECKED)
def grammar_of(params: StructuredOutputsParams) -> str:
    """The grammar of the texts that `params` asks for.

    Raises RequestError where it is malformed or cannot be enforced.
    """
    try:
        grammar = _MAKERS[params.kind](params)
    except RequestError:
        raise
    except Exception as error:  # llguidance raises bare Exception for a fault of GBNF
        raise _refused(params.param, str(error)) from error
    check(grammar, params.param)
    return grammar


def check(grammar: str, param: str) -> None:
    """Raise RequestError, which names `param`, for a grammar that cannot be enforced."""
    _, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    problems = [message for message in messages if not message.startswith(_UNCHECKED)]
    if problems:  # an error; or what would be ignored
        raise _refused(param, problems[0])


def _refused(param: str, message: str) -> RequestError:
    lines = [line for line in message.splitlines() if line.strip()]
    text = _PLACE.sub("", lines[0]) if lines else "it is not valid"
    if text.rstrip().endswith("regex parse error:"):  # the reason is in the last line of several
        reasons = [line for line in lines if line.startswith("error: ")]
        text = f"not a regular expression: {reasons[0][7:]}" if reasons else text
    return RequestError(
        f"{param} cannot be enforced: {brief(ValueError(text), _MAX_MESSAGE)}", param
    )


def _json(params: StructuredOutputsParams) -> str:
    assert isinstance(params.json, str)  # settled
    schema = json_schema.load(params.json, params.param)
    return _json_with(params, schema)


def _json_object(params: StructuredOutputsParams) -> str:
    return _json_with(params, {"type": "object"})


def _json_with(params: StructuredOutputsParams, schema: dict[str, object]) -> str:
    if params.disable_additional_properties:
        schema = json_schema.without_additional_properties(schema, params.param)
    whitespace = params.whitespace_pattern or json_schema.WHITESPACE
    options = json_schema.options(None if params.disable_any_whitespace else whitespace)
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]


def _regex(params: StructuredOutputsParams) -> str:
    return LLMatcher.grammar_from_regex(json_schema.ascii_classes(str(params.regex)))


def _choice(params: StructuredOutputsParams) -> str:
    options = " | ".join(map(json.dumps, params.choice or ()))
    return LLMatcher.grammar_from_lark(f"start: {options}")


def _grammar(params: StructuredOutputsParams) -> str:
    text = str(params.grammar)
    rules = [line for line in text.splitlines() if not line.lstrip().startswith(("#", "//"))]
    is_gbnf = any("::=" in line for line in rules)
    if is_gbnf:
        grammar_cost.check_count(rules, params.param)
        text = any_to_lark(grammar_cost.without_blank_lines(text))
    grammar_cost.check(text, params.param)
    return LLMatcher.grammar_from_lark(text)


def _structural_tag(params: StructuredOutputsParams) -> str:
    return structural_tag.grammar(str(params.structural_tag), params.param)


_MAKERS: Mapping[str, Callable[[StructuredOutputsParams], str]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}
