"""The public names: what `octavo` exports is a list, and changes only on purpose."""

import ast
from pathlib import Path

import octavo

PUBLIC = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "Logprob",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "attention",
    "devices",
    "schedulers",
]


def test_the_list_is_the_one_we_promised() -> None:
    assert octavo.__all__ == PUBLIC
    assert dir(octavo) == sorted(PUBLIC)


def test_every_name_is_there() -> None:
    for name in PUBLIC:
        assert getattr(octavo, name) is not None


def test_types_see_what_run_time_gives() -> None:
    tree = ast.parse(Path(octavo.__file__).read_text())
    typed = {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert typed == set(octavo._WHERE) == set(PUBLIC) - {"__version__"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(octavo, "Llm")
