"""What chat templates do with messages in unusual places is found out by rendering them."""

import pytest

import kit
from octavo.text.placement import Placement, placement
from octavo.text.tokenizer import load_tokenizer
from octavo.text.tools import registry

TURN = "<|{{ m.role }}|>{{ m.content }}<|eot|>"
TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
ALL = TOOLS + "{% for m in messages %}" + TURN + "{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    kit.write_tokenizer(folder)
    return load_tokenizer(folder)


def only_if(condition, otherwise=""):
    return ALL.replace(
        TURN, "{% if " + condition + " %}" + TURN + "{% else %}" + otherwise + "{% endif %}"
    )


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (ALL, Placement(True, True)),
        # Left out, refused, moved to the front, written twice.
        (only_if("m.role != 'system' or loop.first"), Placement(False, True)),
        (only_if("m.role != 'system' or loop.first", "{{ raise_exception('first') }}"),
         Placement(False, True)),
        ("{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
         + only_if("m.role != 'system'"), Placement(False, True)),
        (ALL.replace(TURN, TURN + "{% if m.role == 'system' %}" + TURN + "{% endif %}"),
         Placement(False, True)),
        # Among tools alone.
        (only_if("not tools or m.role != 'system' or loop.first"), Placement(False, True)),
        # Roles that must alternate, as those of Llama 2 and Mistral.
        ("{% for m in messages %}{% if m.role == 'user' and not loop.first and "
         "loop.previtem.role in ('user', 'tool') %}{{ raise_exception('no') }}{% endif %}" + TURN
         + "{% endfor %}" + TOOLS, Placement(True, False)),
        # No tools are shown.
        (ALL.replace(TOOLS, ""), Placement(True, False)),
    ],
)  # fmt: skip
def test_templates(tokenizer, template, found):
    assert placement(tokenizer, template) == found


def test_tools_may_be_told_in_words(tokenizer):
    template = ALL.replace(TOOLS, "")
    assert placement(tokenizer, template, registry.find("hermes", template)).user_after_tool


def test_a_model_without_a_template_keeps_nothing(tmp_path):
    kit.write_tokenizer(tmp_path, chat=False)
    assert placement(load_tokenizer(tmp_path), None) == Placement(False, False)
