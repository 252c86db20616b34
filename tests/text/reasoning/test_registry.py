"""Which format of reasoning a model has, by its chat template, and where an answer begins."""

import json

import pytest
from tests import kit

from octavo.errors import ConfigError
from octavo.text.reasoning import registry
from octavo.text.sandbox import Template
from octavo.text.tokenizer import load_tokenizer

# The layouts of models' own templates, in short.
TEMPLATES = {
    "qwen3": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
        "{% endif %}{% endif %}"
    ),
    "deepseek_r1": (
        "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}"
        "<｜Assistant｜>{{ m.content.split('</think>')[-1] }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
    ),
    "deepseek_v3": (
        "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}"
        "<｜Assistant｜></think>{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜>"
        "{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}"
    ),
    "glm45": (
        "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>"
        "{{ '\n<think></think>' if enable_thinking is defined and not enable_thinking }}{% endif %}"
    ),
    "olmo3": (
        "<|im_start|>system\nYou have <functions>{{ tools }}</functions><|im_end|>\n"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
    ),
    "granite": (
        "{% if thinking %}Write your thoughts after 'Here is my thought process:' and the answer "
        "after 'Here is my response:'.{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    ),
    "mistral": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}"
        "[THINK]{{ m.reasoning }}[/THINK]{{ m.content }}{% endif %}{% endfor %}"
    ),
    "gemma4": (
        "{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|turn>model\n{% if not enable_thinking | default(false) %}"
        "<|channel>thought\n<channel|>{% endif %}{% endif %}"
    ),
    "openai_gptoss": (
        "{% for m in messages %}<|start|>{{ m.role }}"
        "{{ '<|channel|>analysis' if m.reasoning else '<|channel|>final' if m.role != 'user' }}"
        "<|message|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
}
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
TURNS = [
    "<|im_start|>",
    "<|im_end|>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<|assistant|>",
    "<|user|>",
    "[INST]",
    "[/INST]",
    "<|turn>",
    "<turn|>",
    "<|channel>",
    "<channel|>",
]
TAGS = ["<think>", "</think>"]  # added tokens that are not special, as Qwen3 has them


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("turns")
    kit.write_tokenizer(folder, added=[*TURNS, *TAGS])
    path = folder / "tokenizer.json"
    parts = json.loads(path.read_text())
    for token in parts["added_tokens"]:
        token["special"] = token["content"] not in TAGS
    path.write_text(json.dumps(parts))
    return load_tokenizer(folder)


def test_names_and_aliases_are_found_once():
    assert len(set(registry.names())) == len(registry.names())
    assert registry.find("glm47") is registry.find("glm45")
    with pytest.raises(ConfigError, match="did you mean 'qwen3'"):
        registry.find("qwen33")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_says_which_format_its_model_has(name):
    found = registry.detect(TEMPLATES[name])
    assert found is registry.find(name)


def test_models_that_do_not_think_have_none():
    assert registry.detect(PLAIN) is None
    assert registry.detect(kit.CHAT_TEMPLATE) is None


@pytest.mark.parametrize(
    ("name", "variables", "inside"),
    [
        ("qwen3", {}, False),
        ("qwen3", {"enable_thinking": False}, False),
        ("deepseek_r1", {}, True),
        ("deepseek_v3", {}, False),
        ("deepseek_v3", {"thinking": True}, True),
        ("glm45", {}, False),
        ("glm45", {"enable_thinking": False}, False),
        ("olmo3", {}, True),
        ("granite", {"thinking": True}, False),
        ("mistral", {}, False),
        ("gemma4", {}, False),
        ("gemma4", {"enable_thinking": True}, False),
        ("openai_gptoss", {}, False),
    ],
)
@pytest.mark.parametrize("said", ["Hi", "What is <think>?", "It ends with </think>. <think>"])
def test_the_prompt_says_whether_an_answer_begins_with_reasoning(
    tokenizer, name, variables, inside, said
):
    """Not what a user writes, which stands before the turn of the model."""
    messages = [{"role": "user", "content": said}]
    variables = {"messages": messages, "add_generation_prompt": True, **variables}
    prompt = Template(TEMPLATES[name]).render(variables, 100)
    assert registry.find(name).starts_in_reasoning(prompt, tokenizer) is inside


def test_an_answer_that_is_continued_begins_where_it_stands(tokenizer):
    found = registry.find("qwen3")
    turn = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert found.starts_in_reasoning(f"{turn}<think>\nLet me{' see' * 500}", tokenizer)
    assert not found.starts_in_reasoning(f"{turn}<think>\nHm.\n</think>\n\nYes", tokenizer)
    assert not found.starts_in_reasoning(f"{turn}Yes", tokenizer)
    assert not found.starts_in_reasoning("Hi", tokenizer)
    found = registry.find("openai_gptoss")
    turn = "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>analysis<|message|>Hm"
    assert found.starts_in_reasoning(turn, tokenizer)
    assert not found.starts_in_reasoning(f"{turn}<|end|><|start|>assistant", tokenizer)


def test_markers_as_tokens(tokenizer):
    ids = tokenizer.token_id
    thinking = registry.find("qwen3").thinking(tokenizer, inside=True)
    assert (thinking.begin, thinking.end) == ((ids("<think>"),), (ids("</think>"),))
    assert thinking.inside
    spelled = registry.find("granite").thinking(tokenizer, inside=False)
    assert bytes(spelled.end).decode() == "Here is my response:"
    channel = registry.find("gemma4").thinking(tokenizer, inside=False)
    assert channel.begin == (ids("<|channel>"), *b"thought")
