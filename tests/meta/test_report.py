"""The report counts what it says: lines that hold code."""

import ast

from scripts.report import code_lines, functions, length

SOURCE = '''"""A docstring
of two lines."""

# a comment
x = 1  # code with a comment


def f(
    a: int,
) -> str:
    """One line."""
    return """a string
that is code"""
'''


def test_lines_of_code_are_counted_by_tokens() -> None:
    assert code_lines(SOURCE) == 1 + 3 + 2


def test_a_function_s_length_leaves_its_docstring_out() -> None:
    (f,) = functions(ast.parse(SOURCE))
    assert length(f) == 5
