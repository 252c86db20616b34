"""The meter: no template runs long or makes much, and usual ones do not notice."""

import contextlib
import tracemalloc
from typing import Any

import jinja2
import pytest

from octavo.text.sandbox import Budget, Template

DOUBLING = "{% set ns = namespace(x='x' * 1000) %}{% for i in range(60) %}"
BOMBS = {
    "nested loops": "{% for i in range(99999) %}" * 2 + "{% endfor %}" * 2,
    "loop with text": "{% for i in range(99999) %}" + "x" * 500 + "{% endfor %}",
    "big range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "times": "{{ 'x' * 1000000000 }}",
    "list times": "{{ ([0] * 100000000) | length }}",
    "doubling by plus": DOUBLING + "{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "doubling by tilde": DOUBLING + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling by print": DOUBLING + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "doubling by macro": "{% macro d(x) %}{{ x }}{{ x }}{% endmacro %}" + DOUBLING
    + "{% set ns.x = d(ns.x) %}{% endfor %}",
    "doubling by replace": DOUBLING + "{% set ns.x = ns.x.replace('x', 'xx') %}{% endfor %}",
    "doubling by filter": DOUBLING + "{% set ns.x = ns.x | replace('x', 'xx') %}{% endfor %}",
    "doubling by format": DOUBLING + "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "doubling a list": DOUBLING + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "doubling a list to json": DOUBLING + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x | tojson }}",
    "join": "{{ range(99999) | list | join('x' * 100000) }}",
    "join method": "{{ ('x' * 100000).join(['a'] * 99999) }}",
    "replace once": "{{ ('x' * 9999).replace('x', 'y' * 99999) | length }}",
    "replace filter": "{{ ('x' * 9999) | replace('x', 'y' * 99999) | length }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "squares": "{% set ns = namespace(n=9999) %}{% for i in range(90) %}"
    "{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "ljust": "{{ 'x'.ljust(999999999) }}",
    "many ljust": "{% for i in range(99999) %}{{ 'x'.ljust(99999) }}{% endfor %}",
    "format": "{{ '%999999999d' % 1 }}",
    "format star": "{{ '%*d' % (999999999, 1) }}",
    "str.format": "{{ '{:>999999999}'.format('x') }}",
    "str.format nested": "{{ '{:>{w}}'.format('x', w=999999999) }}",
    "indent": "{{ 'x' | indent(999999999, first=true) }}",
    "batch": "{{ [1] | batch(999999999, 'x') | list }}",
    "tojson indent": "{{ [[1]] | tojson(indent=99999999) }}",
    "mapped": "{{ range(99999) | map('string') | map('replace', '1', 'x' * 99999) | list }}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "time": "{{ strftime_now('%999999999Y') }}",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_cht_07_a_bomb_is_defused(name: str) -> None:
    template = Template(BOMBS[name])
    tracemalloc.start()
    try:
        with pytest.raises((jinja2.TemplateError, RecursionError, OverflowError)):
            template.render({}, 10)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Without the meter these take minutes (the suite's time limit ends them) or gigabytes.
    assert peak < 64_000_000


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}", "{{ ().__class__.__bases__ }}", "{{ x.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}", "{{ namespace.__class__ }}",
        "{{ self._TemplateReference__context }}", "{% include 'file' %}",
        "{{ '{0.__class__}'.format(1) }}", "{{ x.clear() }}", "{{ x.update(a=1) }}",
        "{% set ns = namespace() %}{{ ns.__class__ }}",
    ],
)  # fmt: skip
def test_cht_07_the_sandbox_has_no_way_out(source: str) -> None:
    try:
        text = Template(source).render({"x": {}}, 10)
    except (jinja2.TemplateError, TypeError):
        return
    assert text == ""  # an undefined value prints nothing


def test_usual_work_is_far_from_the_limits() -> None:
    source = (
        "{% for m in messages %}{% set c = m.content | trim | replace('a', 'b') %}"
        "{{ '<' + m.role + '>' ~ c[:10000] }}{{ c.split('\\n')[0] }}{{ m | tojson }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "some text\n" * 20} for _ in range(300)]
    assert len(Template(source).render({"messages": messages}, 60_000)) > 100_000


def test_a_long_message_is_no_bomb() -> None:
    text = "word " * 400_000
    template = "{{ messages[0].content | trim }}{{ messages[0].content.split(' ') | length }}"
    rendered = Template(template).render({"messages": [{"content": text}]}, len(text))
    assert rendered == text.strip() + "400001"


def test_what_transformers_gives_to_templates_is_there() -> None:
    render = Template(
        "{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}"
        "{% generation %}g{% endgeneration %}{{ {'a': '<é>'} | tojson }}"
        "{{ [1, 2] | tojson(indent=1) }}{{ ['a', 'b'] | join(', ') }}{{ 'a\nb' | indent(2) }}"
        "{{ undefined_thing | default('d') }}{{ strftime_now('%Y') | length }}"
        "{{ dict(a=1).a }}{{ [{'k': 1}] | map(attribute='k') | join('-') }}"
        "{{ 'abc' | replace('b', 'x') | upper }}{{ '%s' % 'y' }}{{ [3, 1] | sort | first }}"
        "{%- set ns = namespace(n=0) -%}{% for i in range(3) %}"
        "{% set ns.n = ns.n + i %}{% endfor %}"
        "{{ ns.n }}{{ none is none }}{{ 'a' if 'x' in 'xyz' else 'b' }}{{ '{:.2f}'.format(1.5) }}"
    ).render
    expected = '13g{"a": "<é>"}[\n 1,\n 2\n]a, ba\n  bd411AXCy13Truea1.50'
    assert render({}, 10) == expected


def test_the_meter_s_name_cannot_be_reached() -> None:
    for source in ("{{ octavo budget }}", "{{ self['octavo budget'] }}"):
        with contextlib.suppress(jinja2.TemplateError):
            assert Template(source).render({}, 1) == ""


@pytest.mark.parametrize(
    ("source", "takes"),
    [
        ("{% for p in m.content %}{{ p.text }}{% endfor %}", True),
        ("{% for p in m['content'] %}{{ p.text }}{% endfor %}", True),
        ("{% if m.content is string %}{% else %}{% for p in m.content %}{% endfor %}{% endif %}",
         False),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
    ],
)  # fmt: skip
def test_whether_a_template_wants_parts(source: str, takes: bool) -> None:
    assert Template(source).takes_parts is takes


def test_the_budget_counts_shared_values_each_time() -> None:
    nested: Any = ["x"]
    for _ in range(100):
        nested = [nested, nested]
    with pytest.raises(jinja2.TemplateError, match="too much text"):
        Budget(1_000_000).weigh(nested)
