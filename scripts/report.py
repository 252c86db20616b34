"""Lines of code per folder, counted by tokens, and the longest functions. A report, not a gate.

A line of code is a line that holds a token other than a comment, a docstring or white space.
"""

import ast
import io
import statistics
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
_BLANK = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)
_PARTS = ("src", "tests", "benchmarks", "scripts")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(source: str) -> int:
    """Lines of `source` that hold code."""
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _BLANK:
            held.update(range(token.start[0], token.end[0] + 1))
    return len(held - docstring_lines(ast.parse(source)))


def docstring_lines(tree: ast.AST) -> set[int]:
    """The lines of every docstring below `tree`."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node):
            text = node.body[0]
            lines.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return lines


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def length(function: Function) -> int:
    """Lines from `def` to the end, the docstring left out."""
    return (
        (function.end_lineno or function.lineno)
        - function.lineno
        + 1
        - len(docstring_lines(ast.Module([function], [])))
    )


def main() -> None:
    folders: dict[str, list[int]] = defaultdict(list)
    lengths: list[tuple[int, str]] = []
    for path in sorted(path for part in _PARTS for path in (ROOT / part).rglob("*.py")):
        name, source = path.relative_to(ROOT), path.read_text()
        folders[str(name.parent)].append(code_lines(source))
        if name.parts[0] == "src":
            found = functions(ast.parse(source))
            lengths += [(length(f), f"{name}:{f.lineno} {f.name}") for f in found]
    _print_folders(folders)
    _print_functions(lengths)


def _print_folders(folders: dict[str, list[int]]) -> None:
    print(f"{'folder':<28} files  code lines")
    for folder, counts in folders.items():
        print(f"{folder:<28} {len(counts):5}  {sum(counts):10,}")
    for part in _PARTS:
        own = [sum(counts) for folder, counts in folders.items() if folder.split("/")[0] == part]
        print(f"{part + ', all':<28} {'':5}  {sum(own):10,}")


def _print_functions(lengths: list[tuple[int, str]]) -> None:
    sizes = sorted(size for size, _ in lengths)
    middle, most = statistics.median(sizes), sizes[int(0.95 * len(sizes))]
    print(f"\nfunctions in src: {len(sizes)}; median {middle:.0f} lines, 95% within {most}")
    for size, text in sorted(lengths, reverse=True)[:12]:
        print(f"{size:4}  {text}")


if __name__ == "__main__":
    main()
