"""The exception tree: whose fault it is can be read from the type."""

import re

import pytest

from octavo import errors
from octavo.errors import (
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    EngineError,
    OctavoError,
    QueueFullError,
    RequestError,
    RequestTypeError,
    brief,
    nearest,
    shown,
)


def classes():
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type)
        and issubclass(value, Exception)
        and value.__module__ == errors.__name__
    }


def test_the_docstring_draws_the_tree_that_is_there():
    drawn, path = {}, []
    for line in errors.__doc__.splitlines():
        if found := re.match(r"^    ((?:\|   |    |\|-- |`-- )*)(\w+Error)(?: \((\w+)\))?", line):
            depth = len(found[1]) // 4
            path[depth:] = [found[2]]
            bases = [path[depth - 1]] if depth else ["Exception"]
            drawn[found[2]] = {*bases, *([found[3]] if found[3] else [])}
    actual = {name: {base.__name__ for base in c.__bases__} for name, c in classes().items()}
    assert drawn == actual


def test_everything_raised_on_purpose_is_an_octavo_error():
    assert all(issubclass(c, OctavoError) for c in classes().values())


@pytest.mark.parametrize(
    ("error", "builtin"),
    [(RequestError, ValueError), (RequestTypeError, TypeError), (ConfigError, ValueError),
     (EngineError, RuntimeError)],
)  # fmt: skip
def test_builtin_bases(error, builtin):
    assert issubclass(error, builtin)


def test_faults_do_not_mix():
    kinds = [RequestError, ConfigError, EngineError]
    for c in classes().values():
        assert sum(issubclass(c, kind) for kind in kinds) == (c is not OctavoError)


def test_request_errors_carry_field_and_code():
    error = RequestError("top_p must be ...", "top_p")
    assert (error.param, error.code, str(error)) == ("top_p", "invalid_value", "top_p must be ...")
    assert RequestTypeError("x").param is None
    codes = [c.code for c in (RequestError, RequestTypeError, ContextLengthError, QueueFullError)]
    assert codes == ["invalid_value", "invalid_type", "context_length_exceeded", "queue_full"]


def test_a_dead_engine_says_why():
    error = EngineDeadError("out of memory")
    assert error.reason == "out of memory"
    assert "out of memory" in str(error)


def test_nearest():
    known = ["temperature", "top_p", "top_k"]
    assert nearest("temprature", known) == "; did you mean 'temperature'?"
    assert nearest("xyz", known) == ""
    assert nearest("top_p", iter(known)) == "; did you mean 'top_p'?"


def test_values_and_messages_of_others_are_cut_to_one_line():
    assert shown("a") == "'a'"
    assert shown({"b": [1]}) == "{'b': [1]}"
    for value in ("a\n" * 5000, list(range(5000)), 10**4000, [[[[[[[[[[]]]]]]]]]]):
        assert len(shown(value)) <= 160
        assert "\n" not in shown(value)
    assert brief(ValueError("one\n  two")) == "one two"
    assert brief(ValueError()) == "ValueError"
    assert len(brief(ValueError("a " * 5000))) <= 400
