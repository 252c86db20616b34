"""Run a chat template that nobody vouches for: sandboxed jinja with a meter.

Templates come with model files, and with requests where the operator allows it. The sandbox of
jinja keeps them from Python's internals and from changing what they are given; it does not keep
them from looping for hours or making a gigabyte of text. So every template is compiled with a
meter: each turn of a loop or macro, each string made and each value printed is charged to a
budget of work and of processor time, and the render ends when one is spent.

The filters and globals are those that transformers gives to chat templates.
"""

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 0.5
BASE_WORK = 4_000_000
WORK_PER_CHARACTER = 64
_MAX_WIDTH = 100_000
_MAX_BITS = 4096
_MAX_DEPTH = 200
# A name that no template can write, and so can neither read nor replace.
_BUDGET = "octavo budget"
# Widths of six digits, or taken from an argument, in the two languages of formats.
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(?:\d{6}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(?:\d{6}|\{)")


class Budget:
    """Work (about one unit a character) and processor seconds that a render may still use."""

    def __init__(self, work: int, seconds: float = MAX_SECONDS) -> None:
        self.left = work
        self.deadline = time.thread_time() + seconds

    def charge(self, units: int) -> None:
        self.left -= units
        if self.left < 0:
            raise SecurityError("the template makes too much text")

    def tick(self, units: int) -> None:
        self.charge(units)
        if time.thread_time() > self.deadline:
            raise SecurityError("the template runs for too long")

    def weigh(self, value: Any, depth: int = 0) -> Any:
        """Charge for all of `value` that turning it into text would write; gives it back."""
        if isinstance(value, str):
            self.charge(len(value))
        elif isinstance(value, Mapping):
            self._weigh_all((*value.keys(), *value.values()), depth)
        elif isinstance(value, (list, tuple)):
            self._weigh_all(value, depth)
        else:
            self.charge(1)
        return value

    def _weigh_all(self, values: Iterable[Any], depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise SecurityError("the template nests values too deeply")
        self.charge(1)
        for value in values:
            self.weigh(value, depth + 1)


def _budget(context: Context) -> Budget:
    budget = context.parent[_BUDGET]
    assert isinstance(budget, Budget)
    return budget


class _Meter(Extension):
    """What the compiled template calls to pay, and the `generation` block of transformers,
    which marks what an assistant wrote and prints it as it is."""

    tags = {"generation"}  # noqa: RUF012 - the name and form are jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    @jinja2.pass_context
    def tick(self, context: Context, units: int) -> None:
        _budget(context).tick(units)

    @jinja2.pass_context
    def weighed(self, context: Context, value: Any) -> Any:
        return _budget(context).weigh(value)

    @jinja2.pass_context
    def bounded(self, context: Context, value: Any) -> Any:
        """An argument of a filter: no number that a width or a count could abuse."""
        return _budget(context).weigh(_narrow(value))

    @jinja2.pass_context
    def joined(self, context: Context, *values: Any) -> str:
        """The `~` operator."""
        budget = _budget(context)
        return "".join([str(budget.weigh(value)) for value in values])


def _narrow(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > _MAX_WIDTH:
        raise SecurityError(f"the template uses a number as large as {value:.3g} as a width")
    return value


class _Metered(NodeTransformer):
    """Puts the payments into a parsed template."""

    def _pay(self, method: str, *args: nodes.Expr) -> nodes.Call:
        target = nodes.ExtensionAttribute(_Meter.identifier, method)
        return nodes.Call(target, list(args), [], None, None)

    def _loop(self, node: Any) -> nodes.Node:
        fixed = sum(len(part.data) for part in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._pay("tick", nodes.Const(1 + fixed))))
        assert isinstance(node, nodes.Node)
        return node

    visit_For = visit_Macro = visit_CallBlock = _loop  # noqa: N815 - jinja's names

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - jinja's name
        self.generic_visit(node)
        return self._pay("joined", *node.nodes)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:  # noqa: N802 - jinja's name
        self.generic_visit(node)
        if node.node is not None:
            node.node = self._pay("weighed", node.node)
        node.args = [self._pay("bounded", arg) for arg in node.args]
        for keyword in node.kwargs:
            keyword.value = self._pay("bounded", keyword.value)
        return node


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Metered().visit(super()._parse(source, name, filename))
        assert isinstance(tree, nodes.Template)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget(context)
        if operator == "**" or (isinstance(left, int) and isinstance(right, int)):
            bits = left.bit_length() if isinstance(left, int) else 64
            grown = bits * abs(int(right)) if operator == "**" else bits + right.bit_length()
            if grown > _MAX_BITS:
                raise SecurityError("the template computes a number that is too large")
        elif operator == "*":
            size, count = (left, right) if hasattr(left, "__len__") else (right, left)
            if hasattr(size, "__len__") and isinstance(count, int):
                budget.charge(max(count, 0) * len(size))
        elif operator == "%" and isinstance(left, str):
            _check_widths(_WIDE_PERCENT, left)
            budget.weigh((left, right))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            budget.charge(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _charge_method(_budget(__context), owner, __obj.__name__, args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_widths(_WIDE_BRACES, str(value.__self__))
        return wrapped

    def call_filter(
        self,
        name: str,
        value: Any,
        args: Any = None,
        kwargs: Any = None,
        context: Context | None = None,
        eval_ctx: Any = None,
    ) -> Any:
        """A filter named inside another (`map`): its results are charged one by one."""
        result = super().call_filter(name, value, args, kwargs, context, eval_ctx)
        if context is not None:
            _budget(context).weigh(result)
        return result


def _charge_method(budget: Budget, owner: str, name: str, args: tuple[Any, ...]) -> None:
    """Pay for a method of a string before it runs, by what it may make at most."""
    for arg in args:
        _narrow(arg)
        budget.weigh(arg)
    budget.charge(len(owner))
    if name in ("ljust", "rjust", "center", "zfill", "expandtabs"):
        budget.charge(_MAX_WIDTH if name != "expandtabs" else len(owner) * 100)
    elif name == "replace" and len(args) > 1:
        budget.charge(_copies(owner, args[0]) * len(str(args[1])))
    elif name == "join" and args and hasattr(args[0], "__len__"):
        budget.charge(len(owner) * len(args[0]))


def _copies(text: str, old: Any) -> int:
    return len(text) + 1 if old == "" else text.count(str(old))


def _check_widths(wide: re.Pattern[str], text: str) -> None:
    if wide.search(text):
        raise SecurityError("the template formats with a width that is too large")


@jinja2.pass_context
def _emit(context: Context, value: Any) -> Any:
    """Called for each value that is printed."""
    return _budget(context).weigh(value)


@jinja2.pass_context
def _join(context: Context, value: Any, d: str = "", attribute: Any = None) -> str:
    items = list(value)
    if attribute is not None:
        items = [context.environment.getitem(item, attribute) for item in items]
    _budget(context).weigh(items)
    _budget(context).charge(len(str(d)) * len(items))
    return str(d).join(map(str, items))


@jinja2.pass_context
def _replace(context: Context, value: Any, old: str, new: str, count: int = -1) -> str:
    text = str(value)
    _budget(context).charge(_copies(text, old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


@jinja2.pass_context
def _indent(
    context: Context, value: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    text = str(value)
    space = width if isinstance(width, str) else " " * width
    lines = text.splitlines(keepends=True) or [""]
    _budget(context).charge(len(lines) * len(space))
    rest = "".join(space + line if blank or line.strip() else line for line in lines[1:])
    return (space if first else "") + lines[0] + rest


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it for templates: not escaped for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: Any) -> str:
    if len(str(form)) > 200 or re.search(r"\d{3}", str(form)):
        raise SecurityError("the template formats the time with a width that is too large")
    return datetime.now().strftime(str(form))


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Meter, loopcontrols],
        finalize=_emit,
    )
    for name in ("center", "wordwrap", "urlize", "xmlattr", "format", "pprint"):
        del environment.filters[name]
    del environment.globals["lipsum"]
    environment.filters.update(tojson=_tojson, join=_join, replace=_replace, indent=_indent)
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


class Template:
    """A compiled template. Raises jinja2.TemplateSyntaxError when it cannot be compiled.

    shows_tools: it reads the variable `tools`. takes_parts: it goes through the parts of a
    message's content and never asks whether the content is a string, so that it must be given a
    list. knows_developer: it names the role `developer`. reads_thinking: it reads a message's
    `thinking`, a third name of reasoning.
    """

    def __init__(self, source: str) -> None:
        environment = _environment()
        self._template = environment.from_string(source)
        tree = environment.parse(source)
        self.shows_tools = any(name.name == "tools" for name in tree.find_all(nodes.Name))
        self.takes_parts = _takes_parts(tree)
        self.knows_developer = any(
            constant.value == "developer" for constant in tree.find_all(nodes.Const)
        )
        self.reads_thinking = any(
            attribute.attr == "thinking" for attribute in tree.find_all(nodes.Getattr)
        )

    def render(self, variables: Mapping[str, Any], size: int) -> str:
        """The text for `variables`, which hold about `size` characters.

        Raises jinja2.TemplateError, or whatever an operation of the template raises.
        """
        budget = Budget(BASE_WORK + WORK_PER_CHARACTER * size)
        return "".join(self._charged(budget, variables))

    def _charged(self, budget: Budget, variables: Mapping[str, Any]) -> Iterator[str]:
        for part in self._template.generate({**variables, _BUDGET: budget}):
            budget.charge(len(part))
            yield part


def _takes_parts(tree: nodes.Template) -> bool:
    asks = any(test.name == "string" for test in tree.find_all(nodes.Test))
    return not asks and any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return False
