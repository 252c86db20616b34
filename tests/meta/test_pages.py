"""What users read holds: links lead somewhere, command lines parse, programs run.

Held for every hand-written page: README, CONTRIBUTING, docs/, examples/. Generated pages and the
log of past experiments are left out where they quote what no longer exists.
"""

import ast
import contextlib
import io
import re
import shlex
from collections.abc import Iterator

import pytest
from scripts.docs import PAGES, ROOT

from octavo.cli import bench
from octavo.cli.main import COMMANDS, command_parser
from octavo.models.files import EMBEDDED
from octavo.models.registry import FAMILIES, WRAPPERS
from octavo.quant.gguf import BLOCKS

PAST = {"docs/log.md", "CHANGELOG.md"}  # of commands as they once were
MARKDOWN = sorted(
    str(path.relative_to(ROOT))
    for folder in (".", "docs", "docs/decisions", "examples")
    for path in (ROOT / folder).glob("*.md")
)
CURRENT = [name for name in MARKDOWN if name not in PAST and "decisions" not in name]
LINK = re.compile(r"\]\(([^()\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"^# needs: (.+)$", re.MULTILINE)  # what a block needs to run


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def anchors(text: str) -> set[str]:
    """The anchors that a Markdown renderer makes of the headings, and those that are written."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    written = re.findall(r'<a id="([\w-]+)">', text)
    return {title.strip().replace(" ", "-") for title in kept} | set(written)


@pytest.mark.parametrize("name", MARKDOWN)
def test_links_lead_somewhere(name: str) -> None:
    broken = []
    for link in LINK.findall(re.sub(r"`[^`]*`", "", text_of(name))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    assert broken == []


def test_every_page_is_in_the_index() -> None:
    linked = set(LINK.findall(text_of("docs/README.md")))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages - linked == set()


# Command lines.


def spans(text: str) -> Iterator[str]:
    """Shell lines of code blocks, and `code` in running text."""
    for kind, body in FENCE.findall(text):
        if kind in ("sh", "bash", "console", ""):
            yield from body.replace("\\\n", " ").splitlines()
    prose = re.sub(r"^( {4}|\t).*$", lambda found: f"`{found[0].strip()}`", text, flags=re.M)
    yield from re.findall(r"`([^`\n]+)`", FENCE.sub("", prose))


def command_lines(text: str) -> list[list[str]]:
    """Each `octavo ...` with arguments, without what the shell does with it."""
    found = []
    for line in spans(text):
        line = re.split(r"\s#\s", line.strip().removeprefix("$ "))[0]
        match = re.match(r"(?:[A-Z_]+=\S+ |nohup |exec |numactl (?:--\S+ )+)*octavo (.+)", line)
        if match and not re.search(r"\.\.\.|[A-Z]{4,}$|\bNAME\b", match[1]):
            found.append(shlex.split(re.split(r"\s(?:[|&;<>]|2>)", match[1])[0]))
    return found


def refusal(arguments: list[str]) -> str | None:
    """Why the parser of a command refuses it; None if it does not."""
    command, *rest = arguments
    if command.startswith("-"):
        return None if command in ("-h", "--help", "-V", "--version") else "unknown flag"
    if command not in COMMANDS:
        return f"no command {command}"
    if not rest:
        return None  # only named
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        try:
            parse_line(command, rest)
        except SystemExit as end:
            return printed.getvalue() if end.code else None
    return None


def parse_line(command: str, rest: list[str]) -> None:
    if command == "bench" and rest and rest[0] in bench.COMMANDS:
        bench.benchmark_parser(rest[0]).parse(rest[1:])
    else:
        command_parser(command).parse(rest)


@pytest.mark.parametrize("name", [n for n in CURRENT if command_lines(text_of(n))])
def test_command_lines_parse(name: str) -> None:
    refused = {" ".join(line): refusal(line) for line in command_lines(text_of(name))}
    assert {line: why for line, why in refused.items() if why} == {}


# Of other programs: pip, numactl, the benchmarks of a checkout; and of `octavo` itself.
OTHER_FLAGS = {
    "--editable",
    "--generate",
    "--cpunodebind",
    "--membind",
    "--kv",
    "--engines",
    "--suite",
    "--list",
    "--weight-format",
    "--version",
}


def test_flags_named_in_the_pages_exist() -> None:
    parsers = [command_parser(name) for name in COMMANDS]
    parsers += [bench.benchmark_parser(name) for name in bench.COMMANDS]
    known = {flag for parser in parsers for flag in parser.flags()} | OTHER_FLAGS
    unknown = {
        (name, flag)
        for name in CURRENT
        if name not in PAGES  # made of the flags, or of vLLM's, refused ones too
        for flag in re.findall(r"`[^`\n]*?(--[a-z][a-z0-9-]+)", text_of(name))
        if flag not in known
    }
    assert unknown == set()


def test_command_lines_in_examples_parse() -> None:
    for path in (ROOT / "examples").glob("*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        for line in re.findall(r"octavo ((?:serve|run-batch|generate) .+)", docstring):
            assert refusal(shlex.split(line)) is None, f"{path.name}: {line}"


def test_a_wrong_command_line_is_found() -> None:
    text = "```sh\noctavo serve smollm2 --prot 80 | tee log\n```\n`octavo gnerate -p x`"
    lines = command_lines(text)
    assert lines == [["serve", "smollm2", "--prot", "80"], ["gnerate", "-p", "x"]]
    assert all(refusal(line) for line in lines)


# Programs.


def blocks(name: str) -> list[str]:
    return [body for kind, body in FENCE.findall(text_of(name)) if kind == "python"]


BLOCKS_OF = [(name, i) for name in CURRENT for i in range(len(blocks(name)))]


@pytest.mark.parametrize(("name", "index"), BLOCKS_OF)
def test_programs_in_the_pages_run(name: str, index: int, llm_without_weights: None) -> None:
    """A block that needs a server, or is a part of a program, is only compiled."""
    source = blocks(name)[index]
    if source.startswith("from octavo.schedulers import Gauge\n\n    def "):
        source = re.sub(r"\n    ", "\n", source)  # a method, shown as it stands in its class
    code = compile(source, f"{name}, block {index + 1}", "exec")
    if not NEEDS.search(source):
        exec(code, {"__name__": "__page__"})


# The page of models, against the tables that decide.


def test_every_family_is_on_the_page_of_models() -> None:
    text = text_of("docs/models.md")
    rows = re.findall(r"^\|(.+?)\|(.+?)\|(.+?)\|$", text, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+For\w+)`", row[1])}
    known = {f.architecture for f in FAMILIES} | {w.architecture for w in WRAPPERS}
    assert listed == known
    by_architecture = {f.architecture: f.gguf for f in FAMILIES}
    for _, architectures, gguf in rows:
        for name in re.findall(r"`(\w+ForCausalLM)`", architectures):
            # Mistral's GGUF files carry Llama's name.
            wanted = "llama" if name == "MistralForCausalLM" else by_architecture[name]
            assert f"`{wanted}`" in gguf if wanted else gguf.strip() == "none yet"


def test_every_embedded_model_and_gguf_type_is_on_the_page_of_models() -> None:
    text = text_of("docs/models.md")
    for name, model in EMBEDDED.items():
        assert f"| `{name}` |" in text
        assert f"{model.download_mb} MB" in text
    assert all(kind in text for kind in BLOCKS)


def test_generated_pages_say_so() -> None:
    for name in PAGES:
        assert "`make docs`" in text_of(name)[:400]
